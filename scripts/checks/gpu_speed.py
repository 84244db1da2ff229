"""Speed on one GPU beside its goals: training, decoding, positional schemes and long evaluation.

    python scripts/checks/gpu_speed.py                                  writes docs/benchmarks/gpu/<card>.md
    python scripts/checks/gpu_speed.py --only schemes                   one part
    python scripts/checks/gpu_speed.py --rehearse --results FOLDER      the same code, tiny, on a CPU

Random weights and tokens, bfloat16 autocast, compiled training passes. MFU counts 6 FLOPs per
matrix weight and token and causal attention (Transformer.flops_per_token), relative to the card's
dense bfloat16 peak. Bandwidth is that of a copy, measured here. A measurement that fails is listed
with its error; the others continue, and the file is written after each part. Exit status: 0 if
nothing failed, whether or not the goals are met; otherwise 1.
"""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.files import write_text
from evaluation.reports.results_table import markdown_table
from evaluation.scoring.scoring import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import SCHEMES, TokenPositions, Transformer, decoding
from model.devices import find_device
from run_directory.console import Console
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from training.hardware import peak_flops, peak_memory
from training.optim.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 32_000
TINY = ["model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=32"]
# Share of RoPE's throughput: fixed biases and learned ones (docs/benchmarks); other schemes have no
# goal.
FIXED = {"alibi", "sandwich"}
LEARNED = {"kerple", "t5", "fire", "fox"}
COLUMNS = ["measured", "value", "goal", "met"]


@dataclass(frozen=True)
class Figure:
    """One measured number; `goal` is the least value that meets it."""

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    note: str = ""

    def cells(self) -> list[str]:
        value = "failed" if self.value is None else f"{self.value:,.4g} {self.unit}".strip()
        value = f"{value}; {self.note}" if self.note else value
        if self.goal is None:
            return [self.name, value, "", ""]
        met = "yes" if self.value is not None and self.value >= self.goal else "no"
        return [self.name, value, f"≥ {self.goal:g} {self.unit}".strip(), met]


class Bench:
    """The measurements on one device; `rehearse` shrinks models and lengths."""

    def __init__(self, device: torch.device, rehearse: bool):
        self.device = device
        self.rehearse = rehearse

    def autocast(self) -> AbstractContextManager:
        return (
            torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        )

    def model(
        self, config: str, *overrides: str, vocabulary: int = VOCABULARY
    ) -> tuple[Transformer, RunSettings]:
        arguments = [str(ROOT / "configs" / config), *overrides, *(TINY if self.rehearse else [])]
        settings = load_settings(RunSettings, arguments)
        model = Transformer(settings.model, vocabulary, settings.train_length).initialize(0)
        return model.to(self.device), settings

    def seconds(
        self,
        work: Callable[[], object],
        repeats: int,
        warm: int,
    ) -> float:
        """Median seconds of `work`, after `warm` calls that compile and build tables."""
        times = []
        for n in range(warm + repeats):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            if n >= warm:
                times.append(time.perf_counter() - start)
        return float(np.median(times))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def training(
        self, config: str, length: int, rows: int, *overrides: str, vocabulary: int = VOCABULARY
    ) -> tuple[float, float]:
        """(tokens per second, MFU) of training steps with one micro-batch."""
        length, rows = (64, 2) if self.rehearse else (length, rows)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        model, settings = self.model(
            config, f"train_length={length}", *overrides, vocabulary=vocabulary
        )
        model.train()
        model.compile(dynamic=True, backend="eager" if self.rehearse else "inductor")
        optimizer = make_optimizer(model, settings.training.optimizer)
        tokens = torch.randint(
            vocabulary,
            (rows, length + 1),
            device=self.device,
        )
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].contiguous()
        positions = TokenPositions.plain(length, device=self.device)

        def step() -> None:
            with self.autocast():
                nll = model(inputs, positions, targets, reduction="sum")
            (nll / inputs.numel()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        rate = rows * length / self.seconds(step, *((1, 1) if self.rehearse else (10, 3)))
        return rate, rate * model.flops_per_token(length) / peak_flops(self.device)

    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        x = torch.empty(
            1 << (20 if self.rehearse else 30),
            dtype=torch.uint8,
            device=self.device,
        )
        y = torch.empty_like(x)
        return 2 * x.numel() / self.seconds(lambda: y.copy_(x), 10, 3)

    def decoding(self, compiled: bool) -> tuple[float, float]:
        """(tokens per second, share of the bandwidth at which the weights are read) with one row,
        after the tokens that include the prefill, compilation and the recording of the graph."""
        decoding.COMPILED_PASSES = 1 if compiled else 1 << 30
        model, _ = self.model("1b.yaml")
        model = (
            model.to(torch.bfloat16 if self.device.type == "cuda" else torch.float32).eval().pack()
        )
        first, timed = (4, 4) if self.rehearse else (16, 256)
        tokens = iter(
            Generation(model, [list(range(64))], first + timed, SamplingParams(temperature=0))
        )
        for _ in range(first):
            next(tokens)
        start = time.perf_counter()
        for _ in tokens:  # the host waits for each token
            pass
        rate = timed / (time.perf_counter() - start)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if model.head is not None:  # one row of the embedding is read
            weights -= model.embed.weight.numel() * model.embed.weight.element_size()
        return rate, rate * weights / self.bandwidth()

    def evaluation(self, length: int) -> float:
        """Seconds to score 64 targets after `length` tokens."""
        model, _ = self.model("base.yaml")
        scorer = ModelScorer(
            model.eval(),
            device=self.device,
            chunk=16 if self.rehearse else 8192,
        )
        tokens = np.random.default_rng(0).integers(
            3,
            VOCABULARY,
            (1, length + 1),
        )
        with self.autocast():
            return self.seconds(lambda: scorer(tokens, 64), 1, 1)


def attempt(
    name: str, unit: str, work: Callable[[], tuple[float, str]], goal: float | None = None
) -> Figure:
    """The figure of `work`, or its error."""
    try:
        value, note = work()
        return Figure(name, value, unit, goal, note)
    except Exception as error:  # also those of Triton and of settings, which share no base class
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Figure(
            name, None, unit, goal, f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
        )


def training_figures(bench: Bench) -> list[Figure]:
    def run(config: str, length: int, rows: int) -> tuple[float, str]:
        rate, mfu = bench.training(config, length, rows)
        return (
            100 * mfu,
            f"{rate:,.0f} tokens/s, peak memory {peak_memory(bench.device) / 2**30:.1f} GiB",
        )

    return [
        attempt(
            "training MFU, configs/base.yaml (125M)", "%", lambda: run("base.yaml", 1024, 32), 45
        ),
        attempt(
            "training MFU, configs/1b.yaml (1.1B)",
            "%",
            lambda: run("1b.yaml", 2048, 4),
            58,
        ),
    ]


def decoding_figures(bench: Bench) -> list[Figure]:
    def run(compiled: bool) -> tuple[float, str]:
        rate, share = bench.decoding(compiled)
        return 100 * share, f"{rate:,.0f} tokens/s"

    name = "decoding, configs/1b.yaml, one row: share of bandwidth"
    return [
        attempt(f"{name}, compiled", "%", lambda: run(True), 75),
        attempt(f"{name}, not compiled", "%", lambda: run(False)),
    ]


def scheme_figures(bench: Bench) -> list[Figure]:
    """Throughput of two of the 125M model's twelve layers at 2048 tokens, relative to RoPE's."""
    shape = ("base.yaml", 2048, 8, "model.layers=2")
    vocabulary = 5376  # a sixth, as of the layers: the head takes the same share of the time
    rope = 0.0
    figures = []

    def run(name: str) -> tuple[float, str]:
        torch._dynamo.reset()
        rate, _ = bench.training(
            *shape,
            f"model.position.name={name}",
            vocabulary=vocabulary,
        )
        return rate, ""

    for name in ["rope", *(name for name in SCHEMES if name != "rope")]:
        figure = attempt(
            f"throughput of {name} relative to rope",
            "%",
            lambda name=name: run(name),
        )
        rate = figure.value
        rope = rate or 0.0 if name == "rope" else rope
        goal = 85.0 if name in FIXED else 65.0 if name in LEARNED else None
        value = None if rate is None or not rope else 100 * rate / rope
        note = figure.note if rate is None else f"{rate:,.0f} tokens/s"
        figures.append(Figure(figure.name, value, "%", goal, note))
    return figures


def evaluation_figures(bench: Bench) -> list[Figure]:
    def run(length: int) -> tuple[float, str]:
        seconds = bench.evaluation(length)
        return length / seconds, f"{seconds:.1f} s for 64 targets"

    lengths = (64, 128) if bench.rehearse else (131_072, 1_048_576)
    return [attempt(f"evaluation, {n:,} tokens", "tokens/s", lambda n=n: run(n)) for n in lengths]


PARTS = {
    "training": training_figures,
    "decoding": decoding_figures,
    "evaluation": evaluation_figures,
    "schemes": scheme_figures,
}


def main() -> int:
    assert __doc__
    parser = Parser(__doc__)
    parser.add_argument(
        "--only",
        choices=list(PARTS),
        help="measure one part and write no file",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny models on a CPU",
    )
    parser.add_argument(
        "--results", default=str(ROOT / "docs" / "benchmarks" / "gpu"), help="folder"
    )
    options = parser.parse_args()
    device = find_device("cpu" if options.rehearse else "cuda")
    card = "rehearsal" if options.rehearse else torch.cuda.get_device_name(device)
    bench = Bench(device, options.rehearse)
    console = Console()
    figures: list[Figure] = []
    path = Path(options.results) / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.md"
    head = f"# {card}\n\n`bash scripts/gpu_acceptance.sh`, torch {torch.__version__}, random weights.\n\n"
    for part in [options.only] if options.only else PARTS:
        console.info(f"{part} ...")
        made = PARTS[part](bench)
        console.table("", COLUMNS, [figure.cells() for figure in made])
        figures += made
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if not options.only:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, head + markdown_table(COLUMNS, [figure.cells() for figure in figures]))
            console.info(f"wrote {path}")
    with_goals = [figure for figure in figures if figure.goal is not None]
    missed = [figure.name for figure in with_goals if figure.cells()[-1] == "no"]
    console.info("; ".join([f"{len(missed)} of {len(with_goals)} goals missed", *missed]))
    return int(any(figure.value is None for figure in figures))


if __name__ == "__main__":
    run_main(main)
