"""Compare speed and memory with transformers, and positional schemes with RoPE, on this machine.

    python scripts/benchmark.py                                     all cases of both shapes
    python scripts/benchmark.py --shapes A --cases decode-1 decode-8
    python scripts/benchmark.py --cases scheme-train scheme-decode --schemes alibi t5
    python scripts/benchmark.py --cases startup                     CPU time of --help

Every measurement is a fresh process: ours and the peer take turns for --rounds rounds, on the same random
weights and tokens, with the same settings of the allocator and two calls for warm-up. Losses, logits and
generated tokens are compared before any time is reported.

With one thread (the default) the time is the CPU time of the process, which does not count the time that
other processes use. A sample during which the process had less than --undisturbed of the wall time shared its
core and its caches; up to --retakes further processes replace disturbed samples, and the table states
how many of the samples kept are disturbed. Ratios of medians hold better on a busy machine than speeds.

Results are written to docs/benchmarks/cpu.csv and cpu.md; a row replaces an earlier one of its kind.
"""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pandas as pd
import torch

from data.files import write_text
from errors import TrainingError
from evaluation.reports.base import markdown_table
from model import SCHEMES
from scripts.benchmarks.workloads import CASES, SCHEME_CASES, SHAPES, Measured, Sample, Workload, measure
from training.logging.console import Console
from training.script import Parser, run_main

ROOT = Path(__file__).resolve().parent.parent
STARTUP = ("train.py", "evaluate.py", "generate.py", "study.py")
COMPILED = ("train",)  # cases that are measured compiled too
GOALS = {
    ("train", "A"): 1.28,
    ("train", "B"): 1.40,
    ("prefill", "A"): 1.4,
    ("prefill", "B"): 1.4,
    ("decode-1", "A"): 2.5,
    ("decode-1", "B"): 1.6,
    ("decode-8", "A"): 2.1,
    ("decode-8", "B"): 1.5,
    ("sliding", "A"): 1.7,
    ("sliding", "B"): 1.7,
}
LARGEST_DIFFERENCE = 1e-3  # of a loss or logit, between ours and the peer


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one variant. `ratio` is to `baseline`, measured in turns with it; above 1 is faster."""

    shape: str
    case: str
    variant: str
    baseline: str
    threads: int
    tokens_per_second: float  # from the median time
    fastest: float
    slowest: float
    ratio: float
    ratio_of_fastest: float
    samples: int
    disturbed: int
    peak_mib: float
    equal: str  # the largest difference, or the share of equal tokens


def main() -> int:
    if sys.argv[1:2] == ["--workload"]:
        print(json.dumps(asdict(measure(Workload(**json.loads(sys.argv[2]))))))
        return 0
    parser = Parser(__doc__)
    known = [*CASES, *SCHEME_CASES, "startup"]
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=known, choices=known, metavar="CASE")
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES], choices=SCHEMES, metavar="SCHEME")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each variant (default: 3)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each process (default: 5)")
    parser.add_argument("--undisturbed", type=float, default=0.9, help="CPU time per wall time and thread")
    parser.add_argument("--retakes", type=int, default=2, help="further processes of a variant (default: 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder")
    options = parser.parse_args()
    for name in ("threads", "rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be at least 1")
    bench, console = Benchmark(options), Console()
    for shape in options.shapes:
        for case in options.cases:
            if case == "startup":
                continue
            for baseline, variants in comparisons(case, options.schemes):
                rows = bench.compare(shape, case, baseline, variants)
                write(rows, options.results)
                for row in rows:
                    console.info(
                        f"{shape} {case} {row.variant}: {row.tokens_per_second:,.0f} tokens/s, "
                        f"{row.ratio:.2f} x {row.baseline} (fastest samples {row.ratio_of_fastest:.2f}), "
                        f"{row.disturbed} of {row.samples} samples disturbed; {row.equal}"
                    )
    if "startup" in options.cases:
        for script in STARTUP:
            times = sorted(startup(script) for _ in range(options.rounds))
            console.info(f"{script} --help: {statistics.median(times):.2f} s of CPU time")
    return 0


def comparisons(case: str, schemes: list[str]) -> list[tuple[str, list[str]]]:
    """(baseline, variants) that are measured in turns."""
    if case in SCHEME_CASES:
        return [("rope", [scheme]) for scheme in schemes if scheme != "rope"]
    return [
        ("transformers", ["ours", *(["ours compiled", "transformers compiled"] if case in COMPILED else [])])
    ]


def startup(script: str) -> float:
    """CPU seconds of `script --help`."""
    before = os.times()
    subprocess.run([sys.executable, script, "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


class Benchmark:
    """Runs workloads in processes of their own.

    Args:
        options: the command line.
    """

    def __init__(self, options):
        self.options = options

    def compare(self, shape: str, case: str, baseline: str, variants: list[str]) -> list[SpeedRow]:
        """Measure the variants and their baseline in turns."""
        o, found = self.options, {name: [] for name in [baseline, *variants]}
        for _ in range(o.rounds):
            for name, processes in found.items():
                processes.append(self._run(Workload(shape, case, name, o.threads, o.repeats)))
        for name, processes in found.items():
            for _ in range(o.retakes):
                if self._has_quiet(processes):
                    break
                processes.append(self._run(Workload(shape, case, name, o.threads, o.repeats)))
        reference = self._kept(found[baseline])
        rows = []
        for name, processes in found.items():
            times, tokens = self._kept(processes), processes[0].tokens
            equal = agreement(case, found[baseline][0], processes[0])
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
                    max(one.peak for one in processes) / 2**20,
                    equal,
                )
            )
        return rows

    def _run(self, workload: Workload) -> Measured:
        environment = os.environ | {"OMP_NUM_THREADS": str(workload.threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--workload", json.dumps(asdict(workload))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        if done.returncode:
            raise TrainingError(f"{shlex.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return Measured(**{**found, "samples": [Sample(**one) for one in found["samples"]]})

    def _quiet(self, sample: Sample) -> bool:
        return sample.cpu >= self.options.undisturbed * self.options.threads * sample.wall

    def _has_quiet(self, processes: list[Measured]) -> bool:
        return (
            sum(self._quiet(one) for process in processes for one in process.samples) >= self.options.repeats
        )

    def _kept(self, processes: list[Measured]) -> list[float]:
        """Seconds of the undisturbed samples if there are enough of them, else of all."""
        samples = [one for process in processes for one in process.samples]
        kept = [one for one in samples if self._quiet(one)] if self._has_quiet(processes) else samples
        return [one.cpu if self.options.threads == 1 else one.wall for one in kept]


def agreement(case: str, baseline: Measured, other: Measured) -> str:
    """How well the checked numbers agree. Raises TrainingError if they do not."""
    if case in SCHEME_CASES:
        return ""
    pairs = list(zip(baseline.checked, other.checked, strict=True))
    if case.startswith("decode"):
        share = sum(a == b for a, b in pairs) / len(pairs)
        if share < 0.5:
            raise TrainingError(f"{case}: only {share:.1%} of the generated tokens are equal")
        return f"{share:.1%} of tokens equal"
    largest = max(abs(a - b) for a, b in pairs)
    if not largest <= LARGEST_DIFFERENCE:
        raise TrainingError(f"{case}: results differ by {largest:.2g}")
    return f"difference {largest:.1e}"


def write(rows: list[SpeedRow], folder: Path) -> None:
    """Add rows to cpu.csv and cpu.md, in place of earlier ones of their kind."""
    folder.mkdir(parents=True, exist_ok=True)
    path, measured = folder / "cpu.csv", pd.DataFrame([asdict(row) for row in rows])
    known = [pd.read_csv(path, keep_default_na=False)] if path.exists() else []
    key = ["shape", "case", "variant", "threads"]
    table = pd.concat([*known, measured]).drop_duplicates(key, keep="last")
    order = [*CASES, *SCHEME_CASES]
    table = table.sort_values(["case", "shape"], key=lambda x: x.map(order.index) if x.name == "case" else x)
    write_text(path, table.to_csv(index=False, float_format="%.4g"))
    write_text(folder / "cpu.md", page(table))


def page(table: pd.DataFrame) -> str:
    columns = [
        "case",
        "shape",
        "variant",
        "tokens/s",
        "slowest to fastest",
        "ratio",
        "of the fastest",
        "goal",
    ]
    columns += ["peak, MiB", "samples", "checked"]
    lines = []
    for row in table.to_dict("records"):
        goal = GOALS.get((row["case"], row["shape"])) if str(row["variant"]).startswith("ours") else None
        samples = f"{row['samples']}" + (", disturbed" if row["disturbed"] else "")
        lines.append(
            [
                str(row["case"]),
                str(row["shape"]),
                str(row["variant"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['slowest']:,.0f} to {row['fastest']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_fastest']:.2f}",
                "" if goal is None else f"{goal:g}",
                f"{row['peak_mib']:,.0f}",
                samples,
                str(row["equal"]),
            ]
        )
    return HEAD.format(machine=machine()) + markdown_table(columns, lines) + "\n"


HEAD = """# Speed on CPUs

`python scripts/benchmark.py` ([numbers](cpu.csv)), {machine}. Shapes: A has 4 layers of width 256, 8 query
and 4 key/value heads, FFN 688, vocabulary 4,096, training steps of 8 x 512 tokens; B 6 layers of width 288, 6
heads, FFN 768, vocabulary 32,000, steps of 8 x 256. float32; transformers with its default SDPA attention.

Ours and transformers take turns in fresh processes with one pinned thread, on equal weights and tokens and
with the same settings of the allocator; tokens/s are by CPU time of the process. `ratio` compares medians,
`of the fastest` the fastest samples; above 1, ours is faster. Samples are called disturbed where other
processes had the core for more than a tenth of the time: they also evict its caches, which costs the process
CPU time, so ratios hold better than speeds. Cases: `train` is a step with fused AdamW; `prefill` 2,048 tokens
through the cache (`logits_to_keep=1`); `decode-B` greedy generation of B rows after 32 tokens
(`generate`); `sliding` windows of 2,048 tokens with stride 512 (the recipe of transformers' documentation);
`fixed-targets` the last 64 of 2,048 tokens. `scheme-train` (one row of 2,048 tokens) and `scheme-decode`
compare schemes with RoPE, both ours.

"""


def machine() -> str:
    date = time.strftime("%Y-%m-%d")
    return f"{date}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"


if __name__ == "__main__":
    run_main(main)
