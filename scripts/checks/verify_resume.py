"""Verify that a run resumes exactly: train it, kill and resume it several times, and compare every step.

    python scripts/checks/verify_resume.py configs/tiny.yaml --steps 60   any settings of train.py
    python scripts/checks/verify_resume.py runs/tiny-0123456789 --steps 60   settings of a run
    python scripts/checks/verify_resume.py configs/tiny.yaml --ranks 1 2   other numbers of processes

A reference run is not interrupted. A second run with the same settings is killed with SIGKILL at random
steps, one of them just after the end of an epoch if there is one, and resumed each time. The script
compares each step of the two runs (hash of the data, loss, gradient norm, learning rates, validation
losses) and, at the end, every tensor of weights and optimizer. With the same number of processes on a CPU
all must be bit-identical. With --ranks A B, attempts alternate between two numbers of processes in float64,
and losses must agree to 1e-10. The first step that differs is printed. Exit status: 0 if nothing differs; 1
if something differs or no more than one kill was followed by further steps.
"""

import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from safetensors.torch import load_file

from data.files import read_object
from errors import TrainingError
from settings.script import Parser, run_main
from training.checkpoint.storage import MANIFEST, find_checkpoint
from training.logging.console import Console
from training.logging.metrics_file import last_lines, read_metrics
from training.run.directory import SETTINGS, not_a_run
from training.run.parent import read_run_settings

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-10  # of losses and gradient norms in float64, for different numbers of processes
MEASURED = ("loss", "grad_norm", "nll")
CLOCKED = {"attempt", "tokens_per_second", "mfu", "seconds", "memory_bytes", "peak_memory_bytes"}


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run that is killed."""

    ranks: int
    begun: int  # steps before it
    ended: int  # its last logged step
    killed: bool


def parse() -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument("overrides", nargs="+", metavar="RUN | FILE.yaml | key.inner=value")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="a budget of N steps instead of the run's"
    )
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="at least 2 (default: 3)")
    parser.add_argument(
        "--ranks", type=int, nargs=2, metavar=("A", "B"), help="numbers of processes"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the times of the kills"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="keep both runs there (default: a temporary folder)"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    console = Console()
    if options.kills < 2:
        raise TrainingError(
            "--kills must be at least 2: some errors appear only at the second resume"
        )
    for name, least in (("steps", options.steps), ("ranks", min(options.ranks or (1,)))):
        if least is not None and least < 1:
            raise TrainingError(f"--{name} must be at least 1, not {least}")
    overrides, steps, interval = run_arguments(options)
    ranks = options.ranks or (1, 1)
    out = Path(options.out or tempfile.mkdtemp(prefix="verify-resume-"))
    for name in ("reference", "killed"):
        if (out / name).exists():
            raise TrainingError(f"{out / name} already exists; remove it or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    console.info(f"reference: {steps} steps at world size {ranks[0]}, not interrupted")
    run_through(overrides, out / "reference", ranks[0])
    reference = read_metrics(out / "reference" / "metrics.jsonl")
    edges = edges_of(reference)
    moments = kill_steps(steps, options.kills, edges, interval, random.Random(options.seed))
    attempts = run_killed(overrides, out / "killed", ranks, moments, console)
    wrong = differences(
        out / "reference", out / "killed", 0.0 if ranks[0] == ranks[1] else TOLERANCE
    )
    status = report(attempts, edges, steps, wrong, ranks, console)
    if status == 0 and options.out is None:
        shutil.rmtree(out)
    else:
        console.info(f"both runs are kept in {out}")
    return status


def run_arguments(options: Namespace) -> tuple[list[str], int, int]:
    """The arguments of both runs, their number of steps and the interval of checkpoints."""
    overrides = [settings_of(one) for one in options.overrides]
    if options.ranks and options.ranks[0] != options.ranks[1]:
        overrides.append("training.precision=float64")
    settings, _ = read_run_settings(overrides)
    if options.steps:
        overrides.append(
            f"training.tokens={-(-settings.trained_tokens * options.steps // settings.steps)}"
        )
        settings, _ = read_run_settings(overrides)
    steps = settings.steps
    if steps < 3 * options.kills:
        fewer = f", or --kills {steps // 3}" if steps // 3 >= 2 else ""
        raise TrainingError(
            f"{steps} steps are too few for {options.kills} kills, which take 3 each; set "
            f"--steps {3 * options.kills}{fewer}"
        )
    interval = settings.training.checkpoint.interval
    if interval is None or interval > steps // 4:
        interval = max(1, steps // 8)
        overrides.append(f"training.checkpoint.interval={interval}")
    return (
        [*overrides, "training.log_interval=1000000", "training.wandb.mode=disabled"],
        steps,
        interval,
    )


def settings_of(argument: str) -> str:
    """The settings of a run if an argument names one; other arguments unchanged."""
    folder = Path(argument)
    if (folder / SETTINGS).is_file():
        return str(folder / SETTINGS)
    if "=" not in argument and folder.suffix not in (".yaml", ".yml"):
        raise TrainingError(f"{not_a_run(folder)}; pass a run, YAML files or overrides (key=value)")
    return argument


def started(overrides: list[str], folder: Path, ranks: int) -> subprocess.Popen:
    """Start train.py with `ranks` processes in a new session, with its output in `<folder>.log`."""
    environment = dict(os.environ)
    prefix = [sys.executable]
    if ranks > 1:
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if not torch.cuda.is_available():
            environment |= {"ACCELERATE_USE_CPU": "true"}
            environment.setdefault("OMP_NUM_THREADS", "1")
    with open(f"{folder}.log", "ab") as log:
        return subprocess.Popen(
            [*prefix, str(ROOT / "train.py"), *overrides, "--run-dir", str(folder)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def last_error(folder: Path) -> str:
    lines = Path(f"{folder}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "rror:" in line]
    return f"{(errors or lines or ['no output'])[-1]} (all of it in {folder}.log)"


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to all processes of a run, including those that a launcher started in other sessions."""
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def edges_of(lines: list[dict]) -> list[int]:
    """The steps at which a new epoch starts."""
    train = [line for line in lines if line["kind"] == "train"]
    return [b["step"] for a, b in pairwise(train) if b["epoch"] != a["epoch"]]


def kill_steps(
    steps: int, kills: int, edges: list[int], every: int, rng: random.Random
) -> list[int]:
    """After which steps to kill, ascending: random steps over the run, one of them shortly after the start of
    an epoch and before the next checkpoint, so that the resumed run crosses it again."""
    share = (steps - 1) / kills
    found = [1 + int(share * (i + rng.random())) for i in range(kills)]
    crossing = [edge for edge in edges if 2 < edge < steps - 2]
    if crossing:
        edge = crossing[len(crossing) // 2]
        before_saving = (edge // every + 1) * every - 1
        moment = rng.randint(edge, max(edge, min(before_saving, steps - 2)))
        nearest = min(range(kills), key=lambda i: abs(found[i] - moment))
        found[nearest] = moment
    return sorted(found)


def progress(folder: Path) -> tuple[int, int]:
    """The newest attempt and step in a run's metrics."""
    lines = last_lines(folder / "metrics.jsonl")
    attempt = max((line["attempt"] for line in lines.values()), default=0)
    return attempt, lines["train"]["step"] if "train" in lines else 0


def run_through(
    overrides: list[str], folder: Path, ranks: int, stop_after: tuple[int, int] | None = None
) -> bool:
    """Train to the end, or kill the run once its metrics reach an (attempt, step); returns whether it was
    killed. Raises TrainingError with the last output if it fails."""
    process = started(overrides, folder, ranks)
    try:
        while process.poll() is None:
            if stop_after is not None:
                attempt, step = progress(folder)
                if attempt >= stop_after[0] and step >= stop_after[1]:
                    break
            time.sleep(0.005)
        is_killed = process.poll() is None
    finally:
        kill(process)
    if not is_killed and process.returncode:
        raise TrainingError(f"the run ended with status {process.returncode}: {last_error(folder)}")
    return is_killed


def run_killed(
    overrides: list[str], folder: Path, ranks: tuple[int, int], moments: list[int], console: Console
) -> list[Attempt]:
    """Train, kill after each of `moments`, resume, and train to the end."""
    attempts = []
    for i, moment in enumerate([*moments, None], 1):
        checkpoint = find_checkpoint(folder) if folder.exists() else None
        number = ranks[i % 2]
        begun = checkpoint.step if checkpoint else 0
        goal = "to the end" if moment is None else f"to be killed after step {moment}"
        console.info(f"attempt {i}: from step {begun} at world size {number}, {goal}")
        is_killed = run_through(overrides, folder, number, None if moment is None else (i, moment))
        attempts.append(Attempt(number, begun, progress(folder)[1], is_killed))
        if moment is not None and not is_killed:
            console.info(f"attempt {i} finished before it could be killed")
            break
    return attempts


def differences(reference: Path, other: Path, tolerance: float) -> list[str]:
    """Descriptions of the first step and the first final tensor that differ between two runs."""
    lines = [read_metrics(run / "metrics.jsonl") for run in (reference, other)]
    tensors = other_tensors(reference, other) if tolerance == 0 else None
    return [text for text in (first_difference(*lines, tolerance), tensors) if text is not None]


def first_difference(reference: list[dict], other: list[dict], tolerance: float) -> str | None:
    """The first step whose metrics differ, and the metrics; None if there is none."""
    # Rounding can change tokens of greedily generated text.
    left_out = ("start", "samples") if tolerance else ("start",)
    logged: list[dict] = [
        {(line["step"], line["kind"]): line for line in lines if line["kind"] not in left_out}
        for lines in (reference, other)
    ]
    for step, kind in sorted(logged[0].keys() | logged[1].keys()):
        a, b = (lines.get((step, kind)) for lines in logged)
        if a is None or b is None:
            return (
                f"step {step}: only the {'killed' if a is None else 'reference'} run logs a {kind}"
            )
        for key in sorted(
            a.keys() | b.keys(), key=lambda key: (key != "data", key in MEASURED, key)
        ):
            if key not in CLOCKED and not same(
                a.get(key), b.get(key), tolerance if key in MEASURED else 0.0
            ):
                what = "the data" if key == "data" else key
                return (
                    f"step {step}, {kind}: {what} is {a.get(key)} in the reference and {b.get(key)} in "
                    f"attempt {b['attempt']} of the killed run"
                )
    return None


def same(a: object, b: object, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    if tolerance and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0, abs_tol=tolerance)
    return a == b


def other_tensors(reference: Path, other: Path) -> str | None:
    """The first tensor of the last checkpoints that is not bit-identical; None if there is none."""
    folders = [find_checkpoint(run).folder for run in (reference, other)]
    hashes = [read_object(folder / MANIFEST)["files"] for folder in folders]
    for name in sorted(hashes[0].keys() | hashes[1].keys()):
        if hashes[0].get(name) == hashes[1].get(name):
            continue
        if name.endswith(".safetensors") and all(name in found for found in hashes):
            a, b = (load_file(folder / name) for folder in folders)
            for key in sorted(a.keys() & b.keys()):
                if not torch.equal(
                    a[key].flatten().view(torch.uint8), b[key].flatten().view(torch.uint8)
                ):
                    largest = (a[key].double() - b[key].double()).abs().max().item()
                    return f"at the end, {key} of {name} differs by up to {largest:.3g}"
        return f"at the end, {name} of the last checkpoint is another"
    return None


def kills_tested(attempts: list[Attempt]) -> int:
    """The number of kills that were followed by training steps; others prove nothing."""
    return sum(one.killed and after.ended > after.begun for one, after in pairwise(attempts))


def report(
    attempts: list[Attempt],
    edges: list[int],
    steps: int,
    wrong: list[str],
    ranks: tuple[int, int],
    console: Console,
) -> int:
    """Print the result and return the exit status."""
    rows = []
    for i, one in enumerate(attempts, 1):
        crossed = [edge for edge in edges if one.begun < edge <= one.ended]
        end = "SIGKILL" if one.killed else "done"
        rows.append([i, one.ranks, one.begun + 1, one.ended, end, *(crossed or "–")[:1]])
    columns = ["attempt", "processes", "first step", "last step", "end", "epoch edge crossed"]
    console.table("the run that was killed", columns, rows)
    kills = kills_tested(attempts)
    if kills < 2:
        print(f"NOT PROVEN: only {kills} kills were followed by more steps; increase --steps")
        return 1
    if not edges:
        print(
            f"no epoch ends within {steps} steps; increase --steps or reduce the text (data.max_bytes=...)"
        )
    if wrong:
        print("DIFFERENT: " + "\n           ".join(wrong))
        return 1
    equal = "to the bit" if ranks[0] == ranks[1] else f"to {TOLERANCE:g} (data to the bit)"
    ended = ", weights and optimizer" if ranks[0] == ranks[1] else ""
    print(f"EQUAL: all {steps} steps{ended}, {equal}, after {kills} kills")
    return 0


if __name__ == "__main__":
    run_main(main)
