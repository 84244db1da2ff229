"""Check one NVIDIA GPU: the tests for GPUs, then speed beside a plain LLaMA and transformers.

    python scripts/gpu_acceptance.py
    python scripts/gpu_acceptance.py --rehearse     tiny models on a CPU, without compilation

configs/benchmark/gpu_aims.yaml lists the pieces and the aims. Models are compiled while the tests
run, into a cache that the measurements share. Every piece is written when it ends, as by
scripts/benchmark.py; one that does not fit into --seconds is named and left out. The last table
compares the results with the aims: ok, short or not run, with the reason. The exit status is 1 if a
test or a measurement failed, whatever the aims.
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
from threading import Timer

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from errors import TrainingError
from evaluation.reports.document import markdown_table
from model.devices import find_device
from run_directory.console import Console
from scripts.benchmark import ROOT, MeasuredProcess, Workload, compare_and_save, results_of
from settings.script import Parser, run_main

AIMS = ROOT / "configs" / "benchmark" / "gpu_aims.yaml"
SHARE_OF_TESTS = 0.42  # of the time, at most
COMPILED_AT_ONCE = 4  # processes; with the largest models they need 75 GiB
TEST_PROCESSES = 8
LEAST = 15  # seconds in which a piece may end
COMPARISONS = {"<=": operator.le, ">=": operator.ge}


def workloads(piece: dict, device: str, rehearse: bool) -> list[Workload]:
    """The variants of a piece; without transformers where it is not installed."""
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
    """Run the tests for GPUs, one line of the log for each; the exit status of pytest, 0 where they
    were ended for lack of time."""
    marks = ("on_gpu(", "mark.gpu")
    files = [
        file
        for file in ROOT.glob("tests/*/test_*.py")
        if any(mark in file.read_text(encoding="utf-8") for mark in marks)
    ]
    files.sort(key=lambda file: (file.stem != "test_cuda", file))
    select = ["-m", "not gpu and not slow"] if rehearse else ["-m", "gpu"]
    # in the order of the files, whatever the number of processes
    spread = ["-n", str(2 if rehearse else TEST_PROCESSES), "--maxschedchunk", "1"]
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", *select, *spread, *map(str, files)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TORCH_COMPILE_DISABLE": "0"},  # some compile in a rehearsal too
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that use the GPU
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


def compile_first(work: Workload, deadline: float) -> float | None:
    """Seconds of the first call of a workload, in a process that then ends; None if it fails or
    needs more time."""
    process = MeasuredProcess(replace(work, repeats=0, profile=False))
    timer = Timer(max(0.0, deadline - time.monotonic()), process.kill)
    timer.start()
    try:
        process.warm_up()
        process.end()
    except TrainingError:
        return None
    finally:
        timer.cancel()
        process.close()
    return process.facts["first_call"]


Key = tuple[str, str, str]  # case, shape, variant


def judged(
    aims: Sequence[dict], rows: Sequence[dict], reasons: Mapping[Key, str], shape: str | None = None
) -> list[list[str]]:
    """A row of the last table for each aim.

    Args:
        reasons: why there is no result.
        shape: of all measurements; None: that of the aim.
    """
    # A baseline is measured again in less important pieces: its first row counts.
    found = {(row["case"], row["shape"], row["variant"]): row for row in reversed(rows)}
    table = []
    for aim in aims:
        key = (aim["case"], shape or aim["shape"], aim["variant"])
        row = found.get(key, {})
        measured = row.get(aim["quantity"])
        if row and measured is None:
            key = (*key[:2], row["baseline"])
        if aim["quantity"] == "per_kernel" and row:
            ours, theirs = row["kernels_ms"], found.get(key, {}).get("kernels_ms")
            measured = theirs / ours if ours and theirs else None
        sign, limit = aim["aim"].split()
        if measured is None:
            verdict = f"not run: {reasons.get(key, 'not measured in time')}"
        else:
            verdict = "ok" if COMPARISONS[sign](measured, float(limit)) else "short"
        table.append(
            [
                *(aim[key] for key in ("case", "shape", "variant", "quantity")),
                "" if measured is None else f"{measured:.3g}",
                aim["aim"],
                verdict,
                aim["source"],
            ]
        )
    return table


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--rehearse", action="store_true", help="tiny models on a CPU")
    add("--seconds", type=float, default=570, help="for all of it (default: 570)")
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
    pieces = [workloads(piece, str(device), rehearse) for piece in plan["pieces"]]
    reasons: dict[Key, str] = {}
    if not find_spec("transformers"):
        console.warn("transformers is not installed: its lines are left out")

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    if rehearse:
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}
    compiled = [
        work
        for piece, works in zip(plan["pieces"], pieces, strict=True)
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

    rows: list[dict] = []

    def write_aims() -> str:
        """The table, written after each piece in case that the script is ended from outside."""
        head = ["case", "shape", "variant", "quantity", "measured", "aim", "", "source"]
        results = judged(plan["aims"], rows, reasons, "tiny" if rehearse else None)
        text = (
            f"# Aims on {machine}\n\ntorch {torch.__version__}\n\n{markdown_table(head, results)}\n"
        )
        if rehearse:
            text = f"Tiny models on a CPU: these numbers say nothing about a GPU.\n\n{text}"
        file.with_name(f"{file.stem}_aims.md").write_text(text, encoding="utf-8")
        return text

    measured: set[Workload] = set()
    for piece, works in zip(plan["pieces"], pieces, strict=True):
        if measured.issuperset(works):  # in a rehearsal, where all shapes are one
            continue
        measured.update(works)
        left = deadline - time.monotonic()
        keys = [(work.case, work.shape, work.variant) for work in works]
        if left < LEAST:
            for key in keys:
                reasons.setdefault(key, "no time left")
            say(f"{works[0].case} {works[0].shape}: left out, no time")
            continue
        # that of a compiled variant includes compilation only before its graphs are in the cache
        known = {w.variant: first_calls.get(w) for w in works if w.is_compiled and not rehearse}
        seconds = None if rehearse else min(piece["seconds"], left)
        found = compare_and_save(works, 2, console, file, machine, seconds, known)
        failures += len(works) - len(found.rows)
        for key in keys:
            if key[2] in found.errors:
                reasons.setdefault(key, found.errors[key[2]])
        rows += found.rows
        say(f"{works[0].case} {works[0].shape}: measured {len(found.rows)} of {len(works)}")
        write_aims()
    print(write_aims())
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
