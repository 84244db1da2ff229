"""Compare speed and memory with transformers, and positional schemes and mixers with RoPE.

    python scripts/benchmark.py                                      all cases but train-8, of shapes A and B
    python scripts/benchmark.py --shapes A --cases decode-1 decode-8
    python scripts/benchmark.py --cases scheme-train scheme-decode --schemes alibi kda
    python scripts/benchmark.py --device cuda --shapes 125M 1.1B

Every variant runs in its own process. After two warm-up calls, the baseline and the other variants
take turns for --rounds rounds, on the same random weights and tokens. Losses, logits and generated
tokens are compared before any time is reported. Training is also measured in bfloat16 if the
processor has the instruction; on a GPU, only in bfloat16.

With one thread (the default) the time is the CPU time of the process, which excludes the time of
other processes. On a busy machine, ratios of medians are more reliable than speeds.

The results are written to docs/benchmarks: cpu.csv or gpu/<card>.csv, in which a row replaces an
earlier one of its kind, and a page with the table; on a GPU also gpu/<card>_kernels.csv, the time of
each kernel. A variant that fails does not stop the others; the exit status is then 1.
"""

import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from data.files import write_text
from errors import TrainingError
from evaluation.reports.document import markdown_table
from model import SCHEMES
from model.devices import find_device, prepare_cpu
from run_directory.console import Console
from run_directory.run import processor
from scripts.workloads import CASES, MIXERS, SHAPES, Task, Workload, comparisons
from settings.script import Parser, at_least, run_main
from training.hardware import known_peak, peak_memory

ROOT = Path(__file__).resolve().parent.parent
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}  # between losses or logits
KEYS = ["case", "shape", "variant", "threads"]
PROFILED = 3  # number of profiled calls, if they do not generate
KERNELS = 40  # number of the longest kernels of a step that are kept
WARM_SHARE = 0.75  # share of the time of a comparison
DAY = 86_400.0  # seconds
THREADS_ON_GPU = 4  # CPU threads that draw the random weights
SPAWN = get_context("spawn")
# columns of the page: titles and formats
TITLES = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "ratio": ("ratio", "{:.2f}"),
    "ratio_of_fastest": ("of the fastest", "{:.2f}"),
    "busy": ("busy", "{:.2f}"),
    "of_the_peak": ("of the peak", "{:.0%}"),
    "peak_mib": ("peak, MiB", "{:,.0f}"),
    "ms": ("ms", "{:.3g}"),
    "first_token_ms": ("first token, ms", "{:.3g}"),
    "kernels_ms": ("kernels, ms", "{:.3g}"),
    "first_call_s": ("first call, s", "{:.1f}"),
}
HEAD = """# Speed of {machine}

`python scripts/benchmark.py`, torch {torch}. Shape A has 4 layers of width 256, 8 query and 4 key/value
heads, FFN 688, vocabulary 4,096, training steps of 8 x 512 tokens; B 6 layers of width 288, 6 heads, FFN
768, vocabulary 32,000, steps of 8 x 256; 125M and 1.1B are configs/base.yaml and configs/1b.yaml.

All variants of a case take turns, each in a process of its own, on equal weights and tokens; transformers
with its SDPA attention, `llama` is scripts/plain_llama.py. `ratio` compares the median speed with the
baseline's, `of the fastest` the fastest samples; above 1 is faster. `busy`: CPU time over wall time and
threads; below 0.9 other processes used the core and its caches. `ms`: of a step, in `decode` of a token after
the first; `kernels, ms`: the sum of its GPU kernels. `of the peak`: of the GPU's bfloat16 peak (`train`) or
of the bandwidth of a copy, measured alone (`decode`). `first call, s`: with its compilation.
`checked`: the largest difference of losses or logits from the baseline's, or the share of generated tokens
that is equal, each of them the most likely token of a full pass within 0.001.
The peak counts 6 FLOPs for each weight and token and attention to earlier tokens only; the bandwidth
counts one read of the weights and of the cache for each step. `residual` and `graphs` are
training.residual_dtype=autocast and training.cuda_graphs=true.

Cases: `train` is a step with fused AdamW that waits for its loss, `train-8` one of eight micro-batches;
`prefill` 2,048 tokens through the cache; `decode-N` greedy generation of 128 tokens for each of N rows after 32
tokens; `fixed-targets` the last 64 of 2,048 tokens; `long-train` a training step on one window of 16,384
tokens; `scheme-train` and `scheme-decode` a step on one window of 2,048 tokens
(four on a GPU), and generation of one row, beside RoPE. Measured by an earlier version: `core`, the forward
and backward pass of Gated DeltaNet's recurrence, 8 heads of 32, 2,048 tokens, beside causal attention;
`context-decode`, 128 tokens after a context of this many tokens, of a hybrid of three layers of Gated
DeltaNet and one of attention with a window of 256 tokens.

"""


def measure(work: Workload, pipe: Connection) -> None:
    """Run a workload in this process. Sends its facts once it is warm, the times of a turn after
    each message but the last, and the kernels after the last message; a traceback if the workload
    fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings, and lines of the profiler
    try:
        is_cpu = work.device == "cpu"
        prepare_cpu(work.threads if is_cpu else THREADS_ON_GPU)
        if work.has_cpu_time and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        task = CASES[work.case](work)
        if not is_cpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        checked = task.call()
        first_call = time.perf_counter() - start
        if work.repeats:
            task.call()
        facts = {name: getattr(task, name) for name in ("tokens", "steps", "amount")}
        pipe.send({"checked": checked, "first_call": first_call, **facts})
        while pipe.recv() == "turn":
            calls = [timed(task.call) for _ in range(work.repeats)]
            firsts = [timed(task.first) for _ in calls] if task.first else []
            peak = peak_memory(torch.device(work.device))
            pipe.send({"calls": calls, "firsts": firsts, "peak": peak})
        pipe.send(kernels(task, work.device) if work.profile else [])
    except Exception:
        pipe.send(traceback.format_exc().strip())


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU time and of wall time. `call` waits for its results."""
    cpu = time.process_time()
    wall = time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def kernels(task: Task, device: str) -> list[dict]:
    """The kernels of a step (on a CPU its operations), longest first: name, number and time in ms.
    In generation, means over the tokens, including the prompt."""
    profiled = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    calls, steps = (1, task.steps + 1) if task.first else (PROFILED, 1)
    with profile(activities=[profiled], acc_events=True) as seen:
        for _ in range(calls):
            task.call()
    field = f"self_{'cpu' if device == 'cpu' else 'device'}_time_total"
    found = [
        {
            "kernel": event.key[:120],
            "calls": event.count / calls / steps,
            "ms": getattr(event, field) / calls / steps / 1000,
        }
        for event in seen.key_averages()
    ]
    return sorted((x for x in found if x["ms"]), key=lambda x: -x["ms"])


class MeasuredProcess:
    """A workload in its own process. Every wait ends at a time of the monotonic clock.

    Raises TrainingError if the workload has failed or needs more time.
    """

    def __init__(self, work: Workload):
        self.work = work
        self.facts: dict = {}  # set when the process is warm
        self.turns: list[dict] = []
        self.kernels: list[dict] = []
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=measure, args=(work, theirs))
        self._process.start()
        theirs.close()

    def warm_up(self, until: float) -> None:
        """Wait until the process can be timed."""
        self.facts = self._answer(until)

    def turn(self, until: float) -> None:
        """Time the calls of one turn."""
        self._send("turn")
        self.turns.append(self._answer(until))

    def end(self, until: float) -> None:
        """Measure the kernels of the workload."""
        self._send("end")
        self.kernels = self._answer(until)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _send(self, message: str) -> None:
        with suppress(BrokenPipeError):  # the answer is that it has ended
            self._pipe.send(message)

    def _answer(self, until: float) -> Any:
        if not self._pipe.poll(max(0.0, until - time.monotonic())):
            raise TrainingError("ended for lack of time")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            answer = f"ended with status {self._process.exitcode}"
        if isinstance(answer, str):
            print(answer, file=sys.stderr)
            raise TrainingError(answer.splitlines()[-1])
        return answer


class Comparison(NamedTuple):
    """Rows of variants and of their kernels, and the errors of variants by name."""

    rows: list[dict]
    kernels: list[dict]
    errors: dict[str, str]


def compare(works: Sequence[Workload], rounds: int, seconds: float = DAY) -> Comparison:
    """Time variants in turns; the first variant is the baseline.

    Args:
        seconds: time limit, after which only completed turns count. After WARM_SHARE of it,
            variants that are not warm are ended, so that the others get turns.
    """
    start = time.monotonic()
    warm_until = start + WARM_SHARE * seconds
    until = start + seconds
    peak = peak_of(works[0])  # measured before other processes use the device
    processes: list[MeasuredProcess] = []
    errors: dict[str, str] = {}

    def attempt(
        act: Callable[[MeasuredProcess, float], None], process: MeasuredProcess, until: float
    ) -> None:
        if process.work.variant not in errors:
            try:
                act(process, until)
            except TrainingError as error:
                errors[process.work.variant] = str(error)
                process.close()

    try:
        for work in works:
            processes.append(MeasuredProcess(work))
            if work.has_cpu_time:  # all run on one core
                attempt(MeasuredProcess.warm_up, processes[-1], warm_until)
        for process in processes:
            if not process.facts:
                attempt(MeasuredProcess.warm_up, process, warm_until)
        for _ in range(rounds):
            for process in processes:
                attempt(MeasuredProcess.turn, process, until)
        for process in processes:
            attempt(MeasuredProcess.end, process, until)
    finally:
        for process in processes:
            process.close()
    found = Comparison([], [], errors)
    baseline = processes[0] if processes[0].turns else None
    for process in processes:
        if process.turns:
            try:
                found.rows.append(row_of(process, baseline, works[0].variant, peak))
                found.kernels.extend(kernel_rows(process))
            except TrainingError as error:
                errors[process.work.variant] = str(error)
    return found


def row_of(
    process: MeasuredProcess, baseline: MeasuredProcess | None, name: str, peak: float
) -> dict:
    """The result of a variant, compared with the baseline, whose name is `name`, and with the peak
    of the device."""
    work = process.work
    facts = process.facts
    times = times_of(process, "calls")
    firsts = times_of(process, "firsts")
    median = float(np.median(times))
    first = float(np.median(firsts)) if len(firsts) else 0.0
    step = (median - first) / facts["steps"]
    cpu, wall = np.concatenate([turn["calls"] for turn in process.turns]).sum(axis=0)
    ratio = ratio_of_fastest = checked = None
    if baseline is not None:
        reference = times_of(baseline, "calls")
        more = facts["tokens"] / baseline.facts["tokens"]
        ratio = more * float(np.median(reference)) / median
        ratio_of_fastest = more * min(reference) / min(times)
        checked = agreement(work, baseline.facts["checked"], facts["checked"])
    return {
        "case": work.case,
        "shape": work.shape,
        "variant": work.variant,
        "threads": work.threads,
        "baseline": name,
        "tokens_per_second": facts["tokens"] / median,
        "ratio": ratio,
        "ratio_of_fastest": ratio_of_fastest,
        "busy": cpu / wall / work.threads,
        "of_the_peak": facts["amount"] / step / peak if peak else None,
        "samples": len(times),
        "peak_mib": max(turn["peak"] for turn in process.turns) / 2**20,
        "checked": checked,
        "date": time.strftime("%Y-%m-%d"),
        "ms": 1000 * step,
        "first_token_ms": 1000 * first or None,
        "kernels_ms": sum(kernel["ms"] for kernel in process.kernels) or None,
        "first_call_s": facts["first_call"],
    }


def times_of(process: MeasuredProcess, name: str) -> list[float]:
    """Seconds of all turns: CPU time for one thread on a CPU, otherwise wall time."""
    return [
        cpu if process.work.has_cpu_time else wall
        for turn in process.turns
        for cpu, wall in turn[name]
    ]


def kernel_rows(process: MeasuredProcess) -> list[dict]:
    """The longest kernels of a variant, with their shares of the time of all."""
    names = dict(zip(KEYS, process.work.key, strict=False))
    total = sum(kernel["ms"] for kernel in process.kernels)
    return [
        {**names, **kernel, "share": kernel["ms"] / total} for kernel in process.kernels[:KERNELS]
    ]


def agreement(work: Workload, baseline: list[float], other: list[float]) -> str:
    """The agreement of the checked numbers, as text. Raises TrainingError if they differ."""
    if not baseline or work.case.startswith(("scheme", "long")):
        return ""
    pairs = list(zip(baseline, other, strict=True))
    if work.is_decoding:
        return f"{sum(a == b for a, b in pairs) / len(pairs):.1%} of tokens equal"
    largest = max(abs(a - b) for a, b in pairs)
    if not largest <= LARGEST_DIFFERENCE["bfloat16" if work.is_half else "float32"]:
        raise TrainingError(f"results differ by {largest:.2g}")
    return f"difference {largest:.1e}"


def peak_of(work: Workload) -> float:
    """FLOP/s of the device for training, bytes per second of a GPU for generation; 0: none."""
    device = torch.device(work.device)
    if "train" in work.case:
        return known_peak(device) or alone(flop_rate, work.device, work.threads)
    if work.is_decoding and device.type == "cuda":
        return alone(byte_rate, work.device, work.threads)
    return 0.0


@cache
def alone(rate: Callable[[str, int], float], device: str, threads: int) -> float:
    """The result of `rate` in its own process."""
    with ProcessPoolExecutor(1, SPAWN) as pool:
        return pool.submit(rate, device, threads).result()


def flop_rate(device: str, threads: int) -> float:
    """FLOP/s of a product of large matrices, in bfloat16 on a GPU, in float32 on a CPU."""
    n = 1024 if device == "cpu" else 8192  # saturates the device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / Timer("x @ x", globals={"x": x}, num_threads=threads).timeit(10).mean


def byte_rate(device: str, threads: int) -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = Timer("y.copy_(x)", globals={"x": x, "y": x.clone()}, num_threads=threads)
    return 2 * x.numel() / copy.timeit(10).mean


def save(rows: list[dict], file: Path, keys: list[str]) -> pd.DataFrame:
    """Add rows to a CSV file, in place of earlier rows with the same keys. Returns all rows."""
    table = pd.DataFrame(rows)
    if file.exists():
        known = pd.read_csv(file)
        is_new = known.set_index(keys).index.isin(table.set_index(keys).index)
        table = pd.concat([known.loc[~is_new], table])
    cases = dict.fromkeys([*CASES, *table["case"]])  # cases of earlier versions last
    table["case"] = pd.Categorical(table["case"], categories=list(cases))
    table = table.sort_values(["shape", "case"], kind="stable")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, table.to_csv(index=False, float_format="%.4g"))
    return table


def page(table: pd.DataFrame, machine: str) -> str:
    """Results as a Markdown page."""
    shown = table.drop(columns="threads").dropna(axis="columns", how="all")
    for name in shown.columns.intersection(list(TITLES)):
        shown[name] = shown[name].map(TITLES[name][1].format, na_action="ignore")
    titles = [TITLES[name][0] if name in TITLES else name for name in shown.columns]
    rows = markdown_table(titles, shown.fillna("").to_numpy().tolist())
    return f"{HEAD.format(machine=machine, torch=torch.__version__)}{rows}\n"


def results_of(device: torch.device, folder: Path) -> tuple[Path, str]:
    """The file for the results of a device, and the name of the machine."""
    if device.type != "cuda":
        return folder / "cpu.csv", f"{os.cpu_count()} cores of {processor()}"
    machine = torch.cuda.get_device_name(device)
    return folder / "gpu" / f"{re.sub('[^a-z0-9]+', '-', machine.lower())}.csv", machine


def compare_and_save(
    works: Sequence[Workload],
    rounds: int,
    console: Console,
    file: Path,
    machine: str,
    seconds: float = DAY,
    first_calls: Mapping[str, float | None] = {},
) -> Comparison:
    """Run `compare`, write its rows to `file` and print them; errors become warnings.
    `first_calls`: seconds of the first call of variants compiled before; None: unknown."""
    found = compare(works, rounds, seconds)
    for row in found.rows:
        row["first_call_s"] = first_calls.get(row["variant"], row["first_call_s"])
    if found.rows:
        write_text(file.with_suffix(".md"), page(save(found.rows, file, KEYS), machine))
    if found.kernels:
        save(found.kernels, file.with_name(f"{file.stem}_kernels.csv"), KEYS[:3])
    for row in found.rows:
        ratio = "" if row["ratio"] is None else f"ratio {row['ratio']:.2f}, "
        console.info(
            f"{row['case']} {row['shape']} {row['variant']}: {row['tokens_per_second']:,.0f} "
            f"tokens/s, {row['ms']:.3g} ms, {ratio}{row['checked'] or 'not compared'}"
        )
    for variant, error in found.errors.items():
        console.warn(f"{works[0].case} {works[0].shape} {variant}: {error}")
    return found


def set_environment(threads: int) -> None:
    """Set the environment of the measured processes, which inherit it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}


def main() -> int:
    known = [*SCHEMES, *MIXERS]
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=["A", "B"], choices=SHAPES)
    short = [case for case in CASES if case != "train-8"]
    add("--cases", nargs="+", default=short, choices=CASES, metavar="CASE")
    add("--schemes", nargs="+", default=known, choices=known, metavar="SCHEME")
    add("--device", default="cpu", help="cpu (the default) or cuda")
    add("--threads", type=at_least(1), default=1, help="threads per process (default: 1)")
    add("--rounds", type=at_least(1), default=3, help="turns of each variant (default: 3)")
    add("--repeats", type=at_least(1), default=5, help="timed calls per turn (default: 5)")
    add("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder")
    options = parser.parse_args()
    device = find_device(options.device)
    file, machine = results_of(device, options.results)
    set_environment(options.threads)
    console = Console()
    failures = 0
    for case, shape in itertools.product(options.cases, options.shapes):
        for variants in comparisons(case, device.type, options.schemes):
            works = [
                Workload(
                    case,
                    shape,
                    variant,
                    str(device),
                    options.threads,
                    options.repeats,
                    profile=device.type == "cuda",
                )
                for variant in variants
            ]
            found = compare_and_save(works, options.rounds, console, file, machine)
            failures += len(found.errors)
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
