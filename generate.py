"""Generate text with a trained model.

  python generate.py RUN --prompt "def main(" --tokens 300
  python generate.py RUN --file prompts.jsonl --samples 4 --jsonl > out.jsonl
  echo "Once upon a time" | python generate.py RUN --greedy
  python generate.py RUN --tokens 2000 model.position.scaling.name=yarn model.position.scaling.factor=auto

RUN is a run directory, or hf:FOLDER, hf:NAME or gguf:FILE: a model that is first converted to a run.
Prompts come from --prompt, --file or standard input (one prompt). Without a prompt, the model starts a new
document. Text is printed as it is generated.

Overrides such as model.position.window=256 change the positional scheme for this call, where the trained
weights allow it, in every layer kind that has the setting. Standard error reports the resulting scheme.
Methods that depend on the sequence length use prompt length plus --tokens from the first token on, so results
are the same with and without the cache.

Sample i of a prompt uses seed --seed + i. Its tokens do not depend on the other samples of the batch. In a
shell, write a line break in a prompt or stop string as $'\\n'.
"""

from settings.command_line import answer_quickly, parse

if __name__ == "__main__":
    answer_quickly(__doc__)  # prints help and misspelled settings before torch is imported

import io
import sys
from dataclasses import asdict

import torch

from errors import printable
from generation import (
    JsonLinesWriter,
    SamplingParams,
    TextWriter,
    generate_samples,
    make_samples,
    read_prompts,
)
from interop.runs import run_of
from model import find_device
from settings.script import run_main
from training.logging.console import Console
from training.run.directory import load

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def report_positions(
    console: Console, positions: str, length: int, trained: int, overrides: list[str]
):
    """Print the positional scheme if overrides change it or a sequence exceeds the trained length."""
    about = f"up to {length} tokens, trained at {trained}"
    if length > trained:
        console.info(f"beyond the trained length: {about}; positions: {positions}")
    elif overrides:
        console.info(f"positions: {positions} ({about})")


def main() -> int | None:
    assert __doc__
    args = parse("generate", __doc__)
    console = Console()
    device = find_device(args.device)
    sampling = SamplingParams(
        args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p
    )
    prompts = read_prompts(args.prompt, args.file, sys.stdin, args.stdin)

    dtype = DTYPES.get(args.dtype)
    loaded = load(
        run_of(args.run), args.overrides, device, dtype, console=console, weights=args.weights
    )
    if loaded.changed:
        console.info(loaded.changed)
    samples = make_samples(
        prompts,
        loaded.tokenizer,
        bos=loaded.settings.data.bos,
        count=args.samples,
        seed=args.seed,
        stops=args.stop,
    )
    length = max(len(sample.ids) for sample in samples) + args.tokens
    trained = loaded.settings.train_length
    original = loaded.settings.original_length or trained
    positions = loaded.settings.model.describe_positions(length, original)
    report_positions(console, positions, length, trained, args.overrides)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # independent of the locale
    settings = asdict(sampling) | {
        "tokens": args.tokens,
        "stop": args.stop,
        "run": args.run,
        "step": loaded.step,
        "weights": loaded.weights,
        "overrides": args.overrides,
        "positions": positions,
    }
    if args.jsonl:
        writer = JsonLinesWriter(samples, sys.stdout, settings)
    else:
        writer = TextWriter(samples, sys.stdout, printable)
    try:
        for start in range(0, len(samples), args.batch):
            batch = samples[start : start + args.batch]
            for _ in generate_samples(
                loaded.model,
                loaded.tokenizer,
                batch,
                args.tokens,
                sampling,
                cache=not args.no_cache,
            ):
                writer.update()
    except KeyboardInterrupt:
        for sample in samples:
            sample.interrupt()
        writer.update()
        raise


if __name__ == "__main__":
    run_main(main)
