"""Check one NVIDIA GPU: the tests for GPUs, then speed beside a plain LLaMA and transformers.

    python scripts/gpu_acceptance.py
    python scripts/gpu_acceptance.py --rehearse     tiny models on a CPU, without compilation

configs/benchmark/gpu_aims.yaml lists the pieces and the aims. Models are compiled while the tests
run, into a cache that the measurements share. Every piece is written when it ends, as by
scripts/benchmark.py; one that does not fit into --seconds is named and left out. The last table
compares the results with the aims: ok, short or not run. The exit status is 1 if a test or a
measurement failed, whatever the aims.
"""

import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from evaluation.reports.document import markdown_table
from model.devices import find_device
from run_directory.console import Console
from scripts.benchmark import ROOT, Workload, compare_and_save, results_of
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


def run_tests(rehearse: bool, seconds: float, log: Path) -> bool:
    """Run the tests for GPUs, one line of the log for each; whether all passed in time."""
    marks = ("on_gpu(", "mark.gpu")
    files = [
        file
        for file in ROOT.glob("tests/*/test_*.py")
        if any(mark in file.read_text(encoding="utf-8") for mark in marks)
    ]
    files.sort(key=lambda file: (file.stem != "test_cuda", file))
    select = ["-m", "not gpu and not slow"] if rehearse else ["-m", "gpu"]
    # in the order of the files, whatever the number of processes
    spread = ["-n", str(1 if rehearse else TEST_PROCESSES), "--maxschedchunk", "1"]
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", *select, *spread, *map(str, files)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that use the GPU
            process.wait()
            return False


def compile_first(work: Workload, deadline: float) -> dict[str, float]:
    """The variant of a workload and the seconds of its first call, in a process that then ends;
    nothing if it fails."""
    words = json.dumps(asdict(replace(work, repeats=0, profile=False)))
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "--workload", words]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return {}
    lines = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return {work.variant: json.loads(next(lines))["first_call"]}


def judged(aims: Sequence[dict], rows: Sequence[dict], shape: str | None) -> list[list[str]]:
    """A row of the last table for each aim. `shape`: of all measurements; None: that of the aim."""
    # A baseline is measured again in less important pieces: its first row counts.
    found = {(row["case"], row["shape"], row["variant"]): row for row in reversed(rows)}
    table = []
    for aim in aims:
        row = found.get((aim["case"], shape or aim["shape"], aim["variant"]), {})
        measured = row.get(aim["quantity"])
        if aim["quantity"] == "per_kernel" and row:
            baseline = found.get((row["case"], row["shape"], row["baseline"]), {})
            ours, theirs = row["kernels_ms"], baseline.get("kernels_ms")
            measured = theirs / ours if ours and theirs else None
        sign, limit = aim["aim"].split()
        verdict = "not run"
        if measured is not None:
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
    add("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    rehearse = options.rehearse
    device = find_device("cpu" if rehearse else "cuda")
    file, machine = results_of(device, options.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    plan = yaml.safe_load(AIMS.read_text(encoding="utf-8"))
    pieces = [workloads(piece, str(device), rehearse) for piece in plan["pieces"]]
    if not find_spec("transformers"):
        console.warn("transformers is not installed: its lines are left out")

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    if rehearse:
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}
    console.info("tests, and compilation")
    until = time.monotonic() + SHARE_OF_TESTS * options.seconds
    compiled = [
        work
        for piece, works in zip(plan["pieces"], pieces, strict=True)
        for work in works
        if work.is_compiled and piece.get("compiled_before", True)
    ]
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        waiting = {} if rehearse else {w: pool.submit(compile_first, w, until) for w in compiled}
        log = file.with_name(f"{file.stem}_tests.txt")
        failures = int(not run_tests(rehearse, until - time.monotonic(), log))
        first_calls = {work: call.result() for work, call in waiting.items()}
    console.info((log.read_text(encoding="utf-8").strip().splitlines() or ["no tests ran"])[-1])

    rows = []
    measured: set[Workload] = set()
    for piece, works in zip(plan["pieces"], pieces, strict=True):
        name = f"{works[0].case} {works[0].shape} {', '.join(work.variant for work in works)}"
        if measured.issuperset(works):  # in a rehearsal, where all shapes are one
            continue
        measured.update(works)
        left = deadline - time.monotonic()
        if left < LEAST:
            console.warn(f"left out, no time: {name}")
            continue
        found = compare_and_save(
            works,
            2,
            console,
            file,
            machine,
            None if rehearse else min(piece["seconds"], left),
            dict(item for work in works for item in first_calls.get(work, {}).items()),
        )
        failures += len(works) - len(found)
        rows += found
    head = ["case", "shape", "variant", "quantity", "measured", "aim", "", "source"]
    table = markdown_table(head, judged(plan["aims"], rows, "tiny" if rehearse else None))
    file.with_name(f"{file.stem}_aims.md").write_text(
        f"# Aims on {machine}\n\ntorch {torch.__version__}\n\n{table}\n", encoding="utf-8"
    )
    print(table)
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
