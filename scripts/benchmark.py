"""Compare speed and memory with transformers and litgpt, and positional schemes with RoPE, on this
machine.

    python scripts/benchmark.py                                     all cases of both shapes
    python scripts/benchmark.py --shapes A --cases decode-1 decode-8
    python scripts/benchmark.py --cases train prefill decode-1 --litgpt ENVIRONMENT/bin/python
    python scripts/benchmark.py --cases scheme-train scheme-decode --schemes alibi t5
    python scripts/benchmark.py --cases growth                      time against length, rows and parameters
    python scripts/benchmark.py --cases preparing loading startup   data, --help, start of a run

Every measurement is a fresh process: ours and the peer take turns for --rounds rounds, on the same
random weights and tokens, with the same settings of the allocator and two calls for warm-up.
Losses, logits and generated tokens are compared before any time is reported. litgpt needs its own
environment.

With one thread (the default) the time is the CPU time of the process, which does not count the time
that other processes use. A sample during which the process had less than --undisturbed of the wall
time shared its core and its caches; up to --retakes further processes replace disturbed samples,
and the table states how many of the samples kept are disturbed. Ratios of medians hold better on a
busy machine than speeds.

Results are written to docs/benchmarks: tables and figures in cpu.md, and CSV files, in which a row
replaces an earlier one of its kind. Preparing, loading and start-up use wall time: run them with nothing
beside them.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scripts.benchmarks.data_speed import DataWorkload, write_text_file

from errors import TrainingError
from model import SCHEMES, Transformer
from run_directory.console import Console
from scripts.benchmarks.benchmark_report import DataRow, GrowthRow, SpeedRow, StartupRow, add, today
from scripts.benchmarks.workloads import (
    CASES,
    SCHEME_CASES,
    SHAPES,
    Measured,
    Sample,
    Workload,
    litgpt_request,
    measure,
    shape_of,
)
from settings.script import Parser, run_main

ROOT = Path(__file__).resolve().parent.parent
STARTUP = ("train.py", "evaluate.py", "generate.py", "study.py")
FIRST_STEP = "documents are cut at a window boundary"  # the last line before the first step
COMPILED = ("train",)  # cases that are measured compiled too
LITGPT_CASES = ("train", "prefill", "decode-1")
GROWTH: dict[tuple[str, str], dict[str, Sequence[int]]] = {  # sizes by (case, axis) and variant
    ("growth-train", "length"): dict.fromkeys(
        ("ours", "transformers"), tuple(2**n for n in range(8, 14))
    ),
    ("growth-train", "batch"): dict.fromkeys(
        ("ours", "transformers"), tuple(2**n for n in range(6))
    ),
    ("growth-train", "dim"): dict.fromkeys(("ours", "transformers"), (128, 256, 512, 768)),
    ("growth-score", "length"): {
        "ours": [2**n for n in range(8, 18)],
        "transformers": [2**n for n in range(8, 16)],
    },
}
LARGEST_DIFFERENCE = 1e-3  # of a loss or logit, between ours and the peer


def main() -> int:
    if sys.argv[1:2] == ["--workload"]:
        print(json.dumps(asdict(measure(Workload(**json.loads(sys.argv[2]))))))
        return 0
    parser = Parser(__doc__)
    known = [*CASES, *SCHEME_CASES, "growth", "preparing", "loading", "startup"]
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[*SHAPES],
        choices=SHAPES,
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=known,
        choices=known,
        metavar="CASE",
    )
    parser.add_argument(
        "--schemes", nargs="+", default=[*SCHEMES], choices=SCHEMES, metavar="SCHEME"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of each process (default: 1)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="processes of each variant (default: 3)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="samples of each process (default: 5)"
    )
    parser.add_argument(
        "--undisturbed", type=float, default=0.9, help="CPU time per wall time and thread"
    )
    parser.add_argument(
        "--retakes", type=int, default=2, help="further processes of a variant (default: 2)"
    )
    parser.add_argument(
        "--litgpt",
        metavar="PYTHON",
        help="of an environment with litgpt",
    )
    parser.add_argument(
        "--megabytes", type=int, default=32, help="of text for `preparing` (default: 32)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "docs" / "benchmarks",
        help="folder",
    )
    options = parser.parse_args()
    for name in ("threads", "rounds", "repeats", "megabytes"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be at least 1")
    console = Console()
    with TemporaryDirectory() as folder:
        bench = Benchmark(options, Path(folder))
        for case in options.cases:
            for rows in bench.rows(case):
                add(rows, options.results)
                for row in rows:
                    values = {
                        key: f"{v:,.4g}" if isinstance(v, float) else v
                        for key, v in asdict(row).items()
                    }
                    console.info(
                        ", ".join(f"{key} {value}" for key, value in values.items() if value != "")
                    )
    return 0


def comparisons(
    case: str,
    schemes: list[str],
    litgpt: bool,
) -> list[tuple[str, list[str]]]:
    """(baseline, variants) that are measured in turns."""
    if case in SCHEME_CASES:
        return [("rope", [scheme]) for scheme in schemes if scheme != "rope"]
    names = ["ours", *(["litgpt"] if litgpt and case in LITGPT_CASES else [])]
    if case in COMPILED:
        names += [f"{name} compiled" for name in [*names, "transformers"]]
    return [("transformers", names)]


class Benchmark:
    """Runs workloads in processes of their own.

    Args:
        options: the command line.
        folder: for temporary files.
    """

    def __init__(self, options, folder: Path):
        self.options = options
        self.folder = folder
        self._text: Path | None = None
        self._tokenizer = ""

    def rows(self, case: str) -> Iterator[Sequence[Any]]:
        """The rows of a case, some at a time."""
        o = self.options
        if case in ("growth", "startup"):
            yield from self.growth() if case == "growth" else self.startup()
        elif case in ("preparing", "loading"):
            yield self.data(case)
        else:
            for shape in o.shapes:
                for baseline, variants in comparisons(
                    case,
                    o.schemes,
                    bool(o.litgpt),
                ):
                    yield self.compare(shape, case, baseline, variants)

    def growth(self) -> Iterator[list[GrowthRow]]:
        """One call at each size; long ones without warm-up."""
        for (case, axis), variants in GROWTH.items():
            for variant, sizes in variants.items():
                for size in sizes:
                    shape = growth_shape(case, axis, size)
                    short = shape_of(shape).length * shape_of(shape).batch < 1 << 14
                    repeats, warmup = (3, 2) if short else (1, 0)
                    work = Workload(
                        shape,
                        case,
                        variant,
                        self.options.threads,
                        repeats,
                        warmup,
                    )
                    measured = self._run(work)
                    seconds = statistics.median(sample.cpu for sample in measured.samples)
                    name = {"batch": "rows", "dim": "parameters"}.get(axis, axis)
                    value = parameters(shape) if axis == "dim" else size
                    yield [
                        GrowthRow(
                            case, name, value, variant, seconds, measured.peak / 2**20, today()
                        )
                    ]

    def data(self, case: str) -> list[DataRow]:
        """Preparing text, or reading what was prepared."""
        rows = []
        size = self.options.megabytes
        if self._text is None:
            self._text = self.folder / "text.jsonl"
            write_text_file(self._text, size)
            small = self.folder / "small.jsonl"
            write_text_file(small, 2)
            prepared = self._data(
                DataWorkload("tokenizer", "", str(small), str(self.folder / "small"))
            )
            self._tokenizer = f"{prepared['folder']}/tokenizer"
        for turn in range(self.options.rounds if case == "preparing" else 1):
            for variant in ("naive", "ours"):
                root = self.folder / f"{case}-{variant}-{turn}"
                root.mkdir()
                work = DataWorkload(
                    "preparing", variant, str(self._text), str(root), self._tokenizer
                )
                if case == "preparing" or variant == "ours":
                    rows.append((variant, self._data(work)))
        if case == "loading":
            (_, prepared), *_ = rows
            rows = [
                ("ours", self._data(DataWorkload("loading", "ours", "", prepared["folder"])))
                for _ in range(self.options.rounds)
            ]
        table = []
        for variant in dict.fromkeys(variant for variant, _ in rows):
            runs = sorted(
                (run for name, run in rows if name == variant), key=lambda run: run["seconds"]
            )
            median = runs[len(runs) // 2]
            rate = median["tokens"] / median["seconds"]
            waited = median.get("waited", 0.0)
            peak = max(run["peak"] for run in runs) / 2**20
            table.append(
                DataRow(case, variant, size, median["seconds"], rate, waited, peak, today())
            )
        return table

    def _data(self, work: DataWorkload) -> dict[str, Any]:
        script = Path(__file__).parent / "benchmarks" / "data_speed.py"
        return self._json([sys.executable, str(script), json.dumps(asdict(work))])

    def startup(self) -> Iterator[list[StartupRow]]:
        """Seconds of --help, and until a run on prepared data begins its first step."""
        train = ["train.py", "configs/tiny.yaml", f"data.root={self.folder / 'data'}", "--run-dir"]
        self._seconds([*train, str(self.folder / "first")], FIRST_STEP)  # prepares the data
        commands = [(f"{script} --help", [script, "--help"], "") for script in STARTUP]
        commands += [
            ("train.py until the first step", [*train, str(self.folder / "run")], FIRST_STEP)
        ]
        for name, command, until in commands:
            times = []
            for i in range(self.options.rounds):
                own = [*command[:-1], f"{command[-1]}{i}"] if until else command
                times.append(self._seconds(own, until))
            yield [StartupRow(name, *sorted(times)[len(times) // 2], today())]

    def _seconds(self, command: list[str], until: str) -> tuple[float, float]:
        """CPU and wall seconds of a script, up to a line that contains `until` if it is not
        empty."""
        before = os.times()
        begin = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            text=True,
            **pipes,
        ) as process:
            assert process.stdout
            has_line = any(until and until in line for line in process.stdout)
            wall = time.perf_counter() - begin
            process.kill()
        if bool(until) != has_line or not (until or process.returncode == 0):
            raise TrainingError(f"{shlex.join(command)} failed")
        after = os.times()
        cpu = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        return cpu, wall

    def compare(
        self,
        shape: str,
        case: str,
        baseline: str,
        variants: list[str],
    ) -> list[SpeedRow]:
        """Measure the variants and their baseline in turns."""
        o = self.options
        by_variant = {name: [] for name in [baseline, *variants]}
        for _ in range(o.rounds):
            for name, processes in by_variant.items():
                processes.append(self._run(Workload(shape, case, name, o.threads, o.repeats)))
        for name, processes in by_variant.items():
            for _ in range(o.retakes):
                if self._has_quiet(processes):
                    break
                processes.append(self._run(Workload(shape, case, name, o.threads, o.repeats)))
        reference = self._kept(by_variant[baseline])
        rows = []
        for name, processes in by_variant.items():
            times = self._kept(processes)
            tokens = processes[0].tokens
            equal = agreement(case, by_variant[baseline][0], processes[0])
            rows.append(
                SpeedRow(
                    shape,
                    case,
                    name,
                    baseline,
                    o.threads,
                    tokens / statistics.median(times),
                    tokens / min(times),
                    tokens / max(times),
                    statistics.median(reference) / statistics.median(times),
                    min(reference) / min(times),
                    len(times),
                    0 if self._has_quiet(processes) else len(times),
                    max(process.peak for process in processes) / 2**20,
                    equal,
                    today(),
                )
            )
        return rows

    def _run(self, workload: Workload) -> Measured:
        if workload.variant.startswith("litgpt"):
            request = litgpt_request(workload, self.folder)
            script = Path(__file__).parent / "benchmarks" / "litgpt_peer.py"
            record = self._json(
                [self.options.litgpt, str(script), json.dumps(request)], workload.threads
            )
        else:
            command = [sys.executable, str(Path(__file__).resolve()), "--workload"]
            record = self._json([*command, json.dumps(asdict(workload))], workload.threads)
        return Measured(**{**record, "samples": [Sample(**sample) for sample in record["samples"]]})

    def _json(
        self,
        command: list[str],
        threads: int | None = None,
    ) -> dict[str, Any]:
        """What a process prints on its last line."""
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        if done.returncode:
            raise TrainingError(
                f"{shlex.join(command)[:400]} failed: {done.stderr.strip().splitlines()[-1]}"
            )
        return json.loads(done.stdout.splitlines()[-1])

    def _quiet(self, sample: Sample) -> bool:
        return sample.cpu >= self.options.undisturbed * self.options.threads * sample.wall

    def _has_quiet(self, processes: list[Measured]) -> bool:
        return (
            sum(self._quiet(sample) for process in processes for sample in process.samples)
            >= self.options.repeats
        )

    def _kept(self, processes: list[Measured]) -> list[float]:
        """Seconds of the undisturbed samples if there are enough of them, else of all."""
        samples = [sample for process in processes for sample in process.samples]
        kept = (
            [sample for sample in samples if self._quiet(sample)]
            if self._has_quiet(processes)
            else samples
        )
        return [sample.cpu if self.options.threads == 1 else sample.wall for sample in kept]


def growth_shape(case: str, axis: str, size: int) -> str:
    """The shape of `Workload` with one size changed, the others small."""
    sizes = {"length": 256, "batch": 4 if axis == "dim" else 1} | {axis: size}
    if axis == "dim":
        sizes |= {"heads": size // 32, "kv_heads": size // 64, "ffn_dim": size * 8 // 3 // 16 * 16}
    return " ".join(["A", *(f"{key}={value}" for key, value in sizes.items())])


def parameters(shape: str) -> int:
    with torch.device("meta"):
        sizes = shape_of(shape)
        model = Transformer(sizes.settings("rope"), sizes.vocab, sizes.length)
    return sum(p.numel() for p in model.parameters())


def agreement(case: str, baseline: Measured, other: Measured) -> str:
    """How well the checked numbers agree. Raises TrainingError if they do not."""
    if case in SCHEME_CASES:
        return ""
    pairs = list(zip(baseline.checked, other.checked, strict=True))
    if case.startswith("decode"):
        share = sum(a == b for a, b in pairs) / len(pairs)
        return f"{share:.1%} of tokens equal"
    largest = max(abs(a - b) for a, b in pairs)
    if not largest <= LARGEST_DIFFERENCE:
        raise TrainingError(f"{case}: results differ by {largest:.2g}")
    return f"difference {largest:.1e}"


if __name__ == "__main__":
    run_main(main)
