"""Generate text with a trained model.

  python generate.py RUN --prompt "def main(" --tokens 300
  python generate.py RUN --file prompts.jsonl --samples 4 --jsonl > out.jsonl
  echo "Once upon a time" | python generate.py RUN --greedy
  python generate.py RUN --tokens 2000 "model.position.scaling={name: yarn, factor: auto}"

RUN is a run directory, or hf:FOLDER or hf:NAME for a model that is first converted to a run.
Prompts come from --prompt, --file or standard input (one prompt). Without a prompt, the model
starts a new document. Text is printed as it is generated.

Overrides such as model.position.window=256 change the positional scheme for this call, if the
trained weights allow it, in every layer kind that has the setting. Standard error reports the
resulting scheme. Methods that depend on the sequence length use prompt length plus --tokens from
the first token on, so results are the same with and without the cache.

Sample i of a prompt uses seed --seed + i. Its tokens do not depend on the other samples of the
batch. In a shell, write a line break in a prompt or stop string as $'\\n'.
"""

import io
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

import sextant
from data.task_data import generated
from errors import printable
from generation.prompts import read_prompts
from generation.samples import generate_samples, make_samples
from generation.sampling import SamplingParams
from generation.writers import JsonLinesWriter, TextWriter
from model.devices import find_device
from run_directory.console import Console
from run_directory.run_settings import RunSettings
from settings.help import HelpTopics, SettingsParser
from settings.script import at_least, run_main

TOPICS = HelpTopics(
    classes=[RunSettings],
    common="model.position.window model.position.sinks model.position.theta "
    "model.position.scaling model.position.remap model.position.temperature",
    setting="model.position.scaling",
    choice="yarn",
)
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parser_of(usage: str | None) -> SettingsParser:
    """The options of generate.py."""
    parser = SettingsParser(usage, TOPICS)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="run directory")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="model.position.*; - reads stdin",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated",
    )
    add(
        "--file",
        metavar="F",
        help='one prompt per line; .jsonl: objects with a "prompt"',
    )
    add(
        "--samples",
        type=at_least(1),
        default=1,
        metavar="N",
        help="samples per prompt (1)",
    )
    add(
        "--tokens",
        type=at_least(1),
        default=200,
        metavar="N",
        help="maximum number of new tokens (200)",
    )
    add("--temperature", type=float, metavar="T", help="divides logits (0.8)")
    add("--greedy", action="store_true", help="same as --temperature 0")
    add(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K most likely tokens",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens of total probability P",
    )
    add(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the highest probability"
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1: penalize used tokens (1)",
    )
    add(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="S",
        help="seed of the first sample of each prompt (0)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    add("--jsonl", action="store_true", help="print one JSON object per sample")
    add("--batch", type=at_least(1), default=8, metavar="N", help="batch size (8)")
    add(
        "--no-cache",
        action="store_true",
        help="disable the KV cache (slow, for comparison)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the passes after the prompt on a GPU; takes seconds (not yet run on one)",
    )
    add(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:1, ... (auto: a GPU if available)",
    )
    add(
        "--weights",
        choices=["ema", "last"],
        help="default: ema if the run has an EMA, otherwise last",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights (default: as stored)",
    )
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> Namespace:
    """The options of generate.py; `stdin`: whether `-` is among the arguments.

    Raises TrainingError.
    """
    parser = parser_of(__doc__)
    options = parser.parse(arguments)
    if options.run is None:
        parser.error("the following arguments are required: RUN")
    options.stdin = "-" in options.overrides
    options.overrides = [override for override in options.overrides if override != "-"]
    for override in options.overrides:
        if "=" not in override:
            parser.error(
                f"'{override}' is not an override: write --prompt {shlex.quote(override)} for a "
                "prompt, or KEY=VALUE, e.g. model.position.window=256"
            )
    if options.greedy and options.temperature:
        parser.error("argument --temperature: not allowed with argument --greedy")
    if options.greedy:
        options.temperature = 0.0
    elif options.temperature is None:
        options.temperature = 0.8
    if options.seed + options.samples > 1 << 63:
        parser.error("--seed must be below 2**63")
    if "" in options.stop:
        parser.error("--stop must not be empty")
    return options


def report_positions(
    console: Console, positions: str, length: int, trained: int, overrides: list[str]
):
    """Print the positional scheme if overrides change it or a sequence exceeds the trained
    length."""
    about = f"up to {length} tokens, trained at {trained}"
    if length > trained:
        console.info(f"beyond the trained length: {about}; positions: {positions}")
    elif overrides:
        console.info(f"positions: {positions} ({about})")


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if Ctrl-C was pressed. Between its calls the first
    Ctrl-C raises nothing: an exception raised anywhere may be lost in a callback of a library."""
    pressed = 0

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Generate the text that the command line requests."""
    args = parse_options(arguments)
    console = Console()
    find_device(args.device)  # a device that is absent is refused before prompts are read
    sampling = SamplingParams(
        args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p
    )
    prompts = read_prompts(args.prompt, args.file, sys.stdin, args.stdin)

    loaded = sextant.load(
        args.run,
        *args.overrides,
        device=args.device,
        dtype=DTYPES.get(args.dtype),
        console=console,
        weights=args.weights,
        skip_damaged=True,
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
        with interruptible() as check:
            for _ in generate_samples(
                loaded.model,
                loaded.tokenizer,
                samples,
                args.tokens,
                sampling,
                items=generated(loaded.settings.data),
                batch_size=args.batch,
                cache=not args.no_cache,
                is_compiled=args.compile,
            ):
                writer.update()
                check()
    except KeyboardInterrupt:
        for sample in samples:
            sample.interrupt()
        writer.update()
        raise


if __name__ == "__main__":
    run_main(main)
