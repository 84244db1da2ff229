"""Check one NVIDIA GPU: the tests for GPUs, then speed compared with a plain LLaMA and transformers.

    python scripts/gpu_acceptance.py
    python scripts/gpu_acceptance.py --rehearse     tiny models on a CPU, without compilation

configs/benchmark/gpu_aims.yaml lists the pieces and the aims. Models are compiled while the tests
run, into a cache that the measurements share. The results of a piece are written when it ends, as
by scripts/benchmark.py; a piece that does not fit into --seconds is named and left out. The last
table compares the results with the aims: ok, short or not run, with the reason. The exit status is
1 if a test or a measurement failed, regardless of the aims.
"""

import operator
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from errors import TrainingError
from evaluation.reports.document import markdown_table
from model.devices import find_device
from run_directory.console import Console
from scripts.benchmark import (
    DAY,
    ROOT,
    MeasuredProcess,
    compare_and_save,
    results_of,
    set_environment,
)
from scripts.workloads import Workload
from settings.script import Parser, run_main

AIMS = ROOT / "configs" / "benchmark" / "gpu_aims.yaml"
SHARE_OF_TESTS = 0.42  # largest share of the time for tests
COMPILED_AT_ONCE = 4  # processes; with the largest models they need 75 GiB
TEST_PROCESSES = 8
LEAST = 15  # minimum seconds left to start a piece
COMPARISONS = {"<=": operator.le, ">=": operator.ge}
NO_TIME = "not measured in time"


def workloads(piece: dict, device: str, rehearse: bool) -> list[Workload]:
    """The variants of a piece; without transformers if it is not installed."""
    shape = "tiny" if rehearse else piece["shape"]
    work = Workload(
        piece["case"],
        shape,
        "",
        device,
        threads=2 if rehearse else 1,
        repeats=1 if rehearse else piece.get("repeats", 10),
        profile=True,
    )
    works = [replace(work, variant=name) for name in piece["variants"]]
    return [work for work in works if find_spec("transformers") or not work.is_theirs]


def run_tests(rehearse: bool, seconds: float, log: Path) -> int:
    """Run the tests for GPUs, with one line in the log for each. Returns the exit status of pytest, 0
    if the tests were ended for lack of time."""
    marks = ("on_gpu(", "mark.gpu")
    files = [
        file
        for file in ROOT.glob("tests/*/test_*.py")
        if any(mark in file.read_text(encoding="utf-8") for mark in marks)
    ]
    files.sort(key=lambda file: (file.stem != "test_cuda", file))
    select = ["-m", "not gpu and not slow"] if rehearse else ["-m", "gpu"]
    # in the order of the files for any number of processes
    spread = ["-n", str(2 if rehearse else TEST_PROCESSES), "--maxschedchunk", "1"]
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", *select, *spread, *map(str, files)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TORCH_COMPILE_DISABLE": "0"},  # some compile in rehearsals too
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that use the GPU
            process.wait()
            return 0


def summary_of(log: str) -> tuple[str, list[str]]:
    """Numbers of tests by their result, and the names of those that failed, from the log of
    pytest-xdist, which may be cut."""
    ended = re.findall(r"^\[gw\d+\] .*?([A-Z]+) (\S+)", log, flags=re.MULTILINE)
    counts = Counter(result.lower() for result, _ in ended)
    total = re.search(r"\[(\d+) items?\]", log)
    counts["not run"] = int(total[1]) - len(ended) if total else 0
    shown = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    return shown or "none ran", [name for result, name in ended if result in ("FAILED", "ERROR")]


def compile_first(work: Workload, until: float) -> float | None:
    """Seconds of the first call of a workload, in a process that then ends; None if it fails or
    needs more time."""
    process = MeasuredProcess(replace(work, repeats=0, profile=False))
    try:
        process.warm_up(until)
        process.end(until)
    except TrainingError:
        return None
    finally:
        process.close()
    return process.facts["first_call"]


Key = tuple[str, str, str]  # case, shape, variant


def judged(
    aims: Sequence[dict], results: Mapping[Key, dict | str], shape: str | None = None
) -> list[list[str]]:
    """A row of the last table for each aim.

    Args:
        results: rows of measurements, or why they are missing.
        shape: shape of all measurements; None: the shape of the aim.
    """
    table = []
    for aim in aims:
        case, variant = aim["case"], aim["variant"]
        shown = shape or aim["shape"]
        result = results.get((case, shown, variant), NO_TIME)
        measured = None
        if isinstance(result, dict):
            baseline = results.get((case, shown, result["baseline"]), NO_TIME)
            measured = quantity_of(aim["quantity"], result, baseline)
            result = baseline  # the reason why there is no ratio
        sign, limit = aim["aim"].split()
        if measured is not None:
            verdict = "ok" if COMPARISONS[sign](measured, float(limit)) else "short"
        else:
            verdict = f"not run: {result if isinstance(result, str) else NO_TIME}"
        number = "" if measured is None else f"{measured:.3g}"
        about = [case, aim["shape"], variant, aim["quantity"]]
        table.append([*about, number, aim["aim"], verdict, aim["source"]])
    return table


def quantity_of(name: str, row: dict, baseline: dict | str) -> float | None:
    """A column of a row; `per_kernel`: the kernel time of the baseline over that of the row."""
    if name != "per_kernel":
        return row.get(name)
    theirs = baseline["kernels_ms"] if isinstance(baseline, dict) else None
    return theirs / row["kernels_ms"] if theirs and row["kernels_ms"] else None


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--rehearse", action="store_true", help="tiny models on a CPU")
    add("--seconds", type=float, default=570, help="total time limit (default: 570)")
    add("--results", type=Path, help="folder (default: docs/benchmarks; a new one to rehearse)")
    options = parser.parse_args()
    start = time.monotonic()
    deadline = start + options.seconds
    rehearse = options.rehearse
    device = find_device("cpu" if rehearse else "cuda")
    folder = options.results or ROOT / "docs" / "benchmarks"
    if rehearse and options.results is None:
        folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    file, machine = results_of(device, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    console = Console()

    def say(text: str) -> None:
        console.info(f"{time.monotonic() - start:4.0f} s  {text}")

    plan = yaml.safe_load(AIMS.read_text(encoding="utf-8"))
    pieces = [(piece, workloads(piece, str(device), rehearse)) for piece in plan["pieces"]]
    if not find_spec("transformers"):
        console.warn("transformers is not installed: its lines are left out")
    set_environment(threads=2 if rehearse else 1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    if rehearse:
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}

    compiled = [
        work
        for piece, works in pieces
        for work in works
        if work.is_compiled and piece.get("compiled_before", True)
    ]
    if rehearse:
        compiled = compiled[:1]
    say(f"tests and compilation; results: {file.parent}")
    until = start + SHARE_OF_TESTS * options.seconds
    log = file.with_name(f"{file.stem}_tests.txt")
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        waiting = {work: pool.submit(compile_first, work, until) for work in compiled}
        failures = int(run_tests(rehearse, until - time.monotonic(), log) != 0)
        first_calls = {work: call.result() for work, call in waiting.items()}
    summary, failed = summary_of(log.read_text(encoding="utf-8"))
    say(f"tests: {summary}; compiled: {sum(map(bool, first_calls.values()))} of {len(compiled)}")
    for name in failed:
        console.warn(f"failed: {name}")

    results: dict[Key, dict | str] = {}  # the first row of a measurement, or why it is missing
    for piece, works in pieces:
        about = f"{works[0].case} {works[0].shape}"
        left = deadline - time.monotonic()
        if all(work.key in results for work in works):  # in a rehearsal all shapes are one
            continue
        if left < LEAST:
            for work in works:
                results.setdefault(work.key, "no time left")
            say(f"{about}: left out, no time")
            continue
        # a first call includes compilation only before the variant's graphs are in the cache
        known = {w.variant: first_calls.get(w) for w in works if w.is_compiled and not rehearse}
        seconds = DAY if rehearse else min(piece["seconds"], left)
        found = compare_and_save(works, 2, console, file, machine, seconds, known)
        failures += len(works) - len(found.rows)
        for row in found.rows:
            key = (row["case"], row["shape"], row["variant"])
            if not isinstance(results.get(key), dict):
                results[key] = row
        for work in works:
            if work.variant in found.errors:
                results.setdefault(work.key, found.errors[work.variant])
        say(f"{about}: measured {len(found.rows)} of {len(works)}")
        # after each piece, in case the script is killed
        write_aims(plan["aims"], results, file, machine, rehearse)
    print(write_aims(plan["aims"], results, file, machine, rehearse))
    return int(failures > 0)


def write_aims(
    aims: Sequence[dict],
    results: Mapping[Key, dict | str],
    file: Path,
    machine: str,
    rehearse: bool,
) -> str:
    """Write the last table beside the results; returns its page."""
    head = ["case", "shape", "variant", "quantity", "measured", "aim", "", "source"]
    table = markdown_table(head, judged(aims, results, "tiny" if rehearse else None))
    text = f"# Aims on {machine}\n\ntorch {torch.__version__}\n\n{table}\n"
    if rehearse:
        text = f"Tiny models on a CPU: these numbers say nothing about a GPU.\n\n{text}"
    file.with_name(f"{file.stem}_aims.md").write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    run_main(main)
