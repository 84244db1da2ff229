"""Continue text with a trained model.

  python generate.py RUN --prompt "def main(" --tokens 300
  python generate.py RUN --file prompts.jsonl --samples 4 --jsonl > out.jsonl
  echo "Once upon a time" | python generate.py RUN --greedy
  python generate.py RUN --tokens 2000 model.position.scaling.name=yarn model.position.scaling.factor=auto

RUN is a run folder. Prompts come from --prompt, --file, or standard input (all of it is one prompt); without
any, the model begins a document. Text is printed as it is made.

Words like model.position.window=256 change the positional scheme for this call, as far as the trained weights
allow, in every kind of layer that can take them; standard error says what was chosen. A rule that follows the
length takes the declared one, prompt and --tokens, once: cached keys stay right, --no-cache gives the same.

The sample of seed s is the same whatever else is asked for at the same time: sample i of a prompt has seed
--seed + i, and each is measured from its own length under factor=auto. In a shell, write a line break in a
prompt or a stop string as $'\\n'.
"""

import argparse
import codecs
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from model import ModelError
from model.position.describe import describe_choice
from model.sampling import Generation, Sampling
from training.console import Console, run_main
from training.errors import TrainingError
from training.run import Loaded, load

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class TextStream:
    """Tokens in, text out, as early as it is certain.

    Half a character waits for its other bytes, and what could be the beginning of a stop string waits until
    it is one, which ends the text before it, or is not.

    Args:
        tokenizer: any with `pieces` and `prefix`.
        stops: strings that end the text and are not part of it.
        begins: nothing stands before this text, so the space some tokenizers put before each text is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), begins: bool = False):
        self.pieces, self.stops = tokenizer.pieces, [stop for stop in stops if stop]
        self.drop = tokenizer.prefix if begins else b""
        self.bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.waiting = ""  # decoded and not yet given: the beginning of a stop string, perhaps
        self.stopped = False

    def push(self, token: int) -> str:
        """The text this token makes certain; "" once stopped."""
        piece = self.pieces[token]
        if piece and self.drop:
            piece, self.drop = piece.removeprefix(self.drop), b""
        return self._give(self.bytes.decode(piece))

    def end(self) -> str:
        """What was still waiting: no more tokens come."""
        given = self._give(self.bytes.decode(b"", final=True))
        given, self.waiting = given + self.waiting, ""
        return given

    def _give(self, text: str) -> str:
        if self.stopped:
            return ""
        self.waiting += text
        # The stop string that is complete first, wherever the tokens' borders lie.
        found = [(at + len(stop), at) for stop in self.stops if (at := self.waiting.find(stop)) >= 0]
        self.stopped = bool(found)
        keep = len(self.waiting) - min(found)[1] if found else self._may_become_stop()
        given = self.waiting[: len(self.waiting) - keep]
        self.waiting = "" if found else self.waiting[len(given) :]
        return given

    def _may_become_stop(self) -> int:
        """Length of the longest end of `waiting` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for n in range(min(longest, len(self.waiting)), 0, -1):
            if any(stop.startswith(self.waiting[-n:]) for stop in self.stops):
                return n
        return 0


@dataclass
class Sample:
    """One continuation, asked for and, in the end, made."""

    prompt: str
    ids: list[int]  # of the prompt
    index: int  # which prompt, from 0
    seed: int
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


def continue_samples(
    loaded: Loaded, samples: Sequence[Sample], tokens: int, sampling: Sampling, cache: bool = True
) -> Iterator[tuple[Sample, str]]:
    """Make one batch of samples; gives each piece of text with its sample, "" where a sample ends."""
    generation = Generation(
        loaded.model,
        [sample.ids for sample in samples],
        tokens,
        sampling,
        seeds=[sample.seed for sample in samples],
        eos_id=loaded.tokenizer.eos_id,
        cache=cache,
    )
    for new in generation:
        for row, (sample, token) in enumerate(zip(samples, new, strict=True)):
            if token is None:
                continue
            sample.tokens.append(token)
            text = sample.stream.push(token)
            if sample.stream.stopped:
                generation.stop(row)
            if generation.finish[row]:
                text += sample.stream.end()
                sample.finish = generation.finish[row]
            sample.text += text
            if text or sample.finish:
                yield sample, text


class InOrder:
    """Prints samples one after the other, the first unfinished one as it is made."""

    def __init__(self, samples: Sequence[Sample], out):
        self.samples, self.out = samples, out
        self.at, self.written = 0, 0
        self.opened = False

    def update(self) -> None:
        """Print all that may be printed by now."""
        while self.at < len(self.samples):
            sample = self.samples[self.at]
            if not self.opened:
                if not sample.tokens:
                    return
                self._open(sample)
            self.out.write(sample.text[self.written :])
            self.written = len(sample.text)
            self.out.flush()
            if not sample.finish:
                return
            self.out.write("\n")
            self.at, self.written, self.opened = self.at + 1, 0, False

    def _open(self, sample: Sample) -> None:
        if len(self.samples) > 1:
            blank = "\n" if self.at else ""
            self.out.write(f"{blank}=== prompt {sample.index + 1}, seed {sample.seed} ===\n")
        self.out.write(sample.prompt)
        self.opened = True


class JsonLines:
    """Prints each sample as one JSON object as soon as those before it are done."""

    def __init__(self, samples: Sequence[Sample], out, settings: dict):
        self.samples, self.out, self.settings = samples, out, settings
        self.at = 0

    def update(self) -> None:
        while self.at < len(self.samples) and (sample := self.samples[self.at]).finish:
            about = {
                "prompt": sample.prompt,
                "text": sample.text,
                "tokens": sample.tokens,
                "finish_reason": sample.finish,
                "seed": sample.seed,
                "settings": self.settings,
            }
            self.out.write(json.dumps(about, ensure_ascii=False) + "\n")
            self.out.flush()
            self.at += 1


def read_prompts(args: argparse.Namespace, stdin) -> list[str]:
    """The prompts asked for, in order; one empty prompt where none are given."""
    prompts = list(args.prompt)
    if args.file:
        prompts += _from_file(Path(args.file))
    if args.stdin or (not prompts and not args.file and not stdin.isatty()):
        prompts.append(_text(stdin.buffer.read(), "standard input").removesuffix("\n"))
    return prompts or [""]


def _from_file(file: Path) -> list[str]:
    lines = _text(file.read_bytes(), str(file)).split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        found.append(_prompt_of(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line)
    if not found:
        raise TrainingError(f"{file} holds no prompt: write one a line")
    return found


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TrainingError(f'{where} must be a JSON object with text under "prompt"')
    return record["prompt"]


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{where} is not UTF-8 text (byte {error.start})") from error


def positions(loaded: Loaded, longest: int) -> str:
    """The positional rule of every kind of layer, as it treats texts declared to be `longest` tokens long."""
    settings = loaded.settings
    original = settings.original_length or settings.train_length
    found = {k: describe_choice(choice, longest, original) for k, choice in settings.model.kinds.items()}
    if not settings.model.is_pattern:
        return found["all"]
    return " | ".join(f"{kind} = {text}" for kind, text in found.items())


def about_positions(loaded: Loaded, longest: int, words: Sequence[str]) -> str | None:
    """One sentence where another rule was asked for or texts go past the trained length; else None."""
    trained = loaded.settings.train_length
    rule = f"positions: {positions(loaded, longest)}"
    declared = f"up to {longest} tokens declared, trained at {trained}"
    if longest > trained:
        return f"going past the trained length, {declared}; {rule}"
    return f"{rule} ({declared})" if words else None


class Parser(argparse.ArgumentParser):
    """Speaks of errors as the rest of the house does."""

    def error(self, message: str):
        raise TrainingError(f"{message} (python generate.py --help lists what there is)")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder")
    add("words", nargs="*", metavar="WORD", help="model.position.…=value, or - for standard input")
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated")
    add("--file", metavar="F", help='prompts, one a line; .jsonl: objects with "prompt"')
    add("--samples", type=int, default=1, metavar="N", help="continuations of each prompt (1)")
    add("--tokens", type=int, default=200, metavar="N", help="new tokens at most (200)")
    add("--temperature", type=float, metavar="T", help="below 1: safer, above: wilder; 0 is greedy (0.8)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="only the likeliest tokens that sum to probability P")
    add("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: tokens used lose (1)")
    add("--seed", type=int, default=0, metavar="S", help="of each prompt's first sample (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--jsonl", action="store_true", help="one JSON object a sample instead of text")
    add("--batch", type=int, default=8, metavar="N", help="samples made at a time (8)")
    add("--no-cache", action="store_true", help="recompute everything for each token: slow, for comparison")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if there is one)")
    add("--weights", choices=["ema", "last"], help="the mean of the weights, the default if there is one")
    add("--dtype", choices=DTYPES, help="of the weights (as stored; bfloat16 on a GPU is faster)")
    args = parser.parse_intermixed_args(argv)
    args.stdin = "-" in args.words
    args.words = [word for word in args.words if word != "-"]
    for word in args.words:
        if "=" not in word:
            parser.error(f"'{word}' is neither an option nor a word like model.position.window=256")
    if args.greedy and args.temperature:
        parser.error("--greedy and --temperature exclude each other")
    for name, least in (("samples", 1), ("tokens", 1), ("batch", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.seed + args.samples > 1 << 63:
        parser.error("--seed must stay below 2**63")
    if "" in args.stop:
        parser.error("--stop needs some text")
    return args


def prepare_samples(args: argparse.Namespace, prompts: Sequence[str], loaded: Loaded) -> list[Sample]:
    tokenizer = loaded.tokenizer
    bos = [tokenizer.bos_id] if loaded.settings.data.bos and tokenizer.bos_id is not None else []
    found = []
    for index, prompt in enumerate(prompts):
        ids = bos + tokenizer.encode(prompt)
        if not ids:
            raise ModelError("this model was trained without a begin-of-document token: give a prompt")
        for i in range(args.samples):
            stream = TextStream(tokenizer, args.stop, begins=not prompt)
            found.append(Sample(prompt, ids, index, args.seed + i, stream))
    return found


def main() -> int | None:
    args = parse()
    temperature = 0.0 if args.greedy else 0.8 if args.temperature is None else args.temperature
    sampling = Sampling(args.repetition_penalty, temperature, args.top_k, args.top_p, args.min_p)
    prompts = read_prompts(args, sys.stdin)
    console = Console()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    dtype = DTYPES.get(args.dtype)
    loaded = load(args.run, args.words, device, dtype, console=console, weights=args.weights)
    if loaded.changed:
        console.say(loaded.changed)
    samples = prepare_samples(args, prompts, loaded)
    longest = max(len(sample.ids) for sample in samples) + args.tokens
    if about := about_positions(loaded, longest, args.words):
        console.say(about)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # whatever the locale says
    settings = asdict(sampling)
    settings |= {"tokens": args.tokens, "stop": args.stop, "run": args.run, "step": loaded.step}
    settings |= {"weights": loaded.weights}
    settings |= {"overrides": args.words, "positions": positions(loaded, longest)}
    printer = JsonLines(samples, sys.stdout, settings) if args.jsonl else InOrder(samples, sys.stdout)
    try:
        for start in range(0, len(samples), args.batch):
            batch = samples[start : start + args.batch]
            for _ in continue_samples(loaded, batch, args.tokens, sampling, not args.no_cache):
                printer.update()
    except KeyboardInterrupt:
        for sample in samples:
            if sample.tokens and not sample.finish:
                sample.text += sample.stream.end()
                sample.finish = "interrupted"
        printer.update()
        raise


if __name__ == "__main__":
    run_main(main)
