"""Runs whose data are still being prepared, on one and two processes: signals, kills and resumes.

python -m tests.training.distributed.streams FOLDER OVERRIDE...   writes all results to FOLDER/results.json
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

import settings.script
import train
from data import prepare
from data.preparation.groups import TextGroups
from tests.training.distributed.ranks import TIMEOUT, Pair, wait_for
from training.logging.console import Console
from training.logging.metrics_file import read_metrics
from training.run.hardware import peak_flops
from training.run.parent import read_run_settings


@contextmanager
def no_further_group(overrides: list[str], root: Path):
    """The first group is prepared, and whoever prepares the next one waits until the block ends."""
    settings = read_run_settings([*overrides, f"data.root={root}"])[0].data
    groups = TextGroups(settings, prepare(settings, Console(quiet=True)))
    with open(groups.list.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def preparing(root: Path) -> list[int]:
    """Processes that prepare groups under `root`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"data.preparation.groups" in line and str(root).encode() in line:
            found.append(int(folder.name))
    return found


def one_sees_it_late(folder: Path, rank: int) -> None:
    """Rank 1 sees the next group later than steps are waited for."""
    real = TextGroups.is_ready
    first = []

    def is_ready(self, line, verify=False):
        first.append(time.monotonic())
        return real(self, line, verify) and time.monotonic() - first[0] > 1.5 * TIMEOUT

    if rank == 1:
        TextGroups.is_ready = is_ready


def tell_threads(folder: Path, rank: int) -> None:
    """Writes down what still runs in a process when its main has returned."""
    real = train.run_main

    def run_main(main):
        def telling():
            status = main()
            names = [thread.name for thread in threading.enumerate()]
            Path(f"{folder}.{rank}.threads").write_text(json.dumps(names), encoding="utf-8")
            return status

        real(telling)

    settings.script.run_main = run_main


def waiting(folder: Path, overrides: list[str], root: Path, world: int) -> dict:
    """A signal to the last rank while all wait, longer than a step is waited for, for a group."""
    overrides = [*overrides, f"data.root={root}"]
    with no_further_group(overrides, root):
        pair = Pair(folder, overrides, tell_threads, world)
        wait_for(lambda: "waiting for group 1" in pair.log(0) or pair.poll())
        time.sleep(1.5 * TIMEOUT if world > 1 else 0.5)
        early = list(pair.statuses)
        children = preparing(root)
        pair.poll()
        pair.send(signal.SIGUSR1, world - 1)
        took = wait_for(pair.poll)
        threads = [
            json.loads(Path(f"{folder}.{rank}.threads").read_text()) for rank in range(world)
        ]
        left = [child for child in preparing(root) if child in children]
    more = {"early": early, "seconds": took, "threads": threads}
    return pair.summary() | more | {"children": len(children), "left": left}


def dying(folder: Path, overrides: list[str], root: Path) -> dict:
    """The process that prepares is killed while two ranks wait for it."""
    overrides = [*overrides, f"data.root={root}"]
    with no_further_group(overrides, root):
        pair = Pair(folder, overrides)
        wait_for(lambda: "waiting for group 1" in pair.log(0) or pair.poll())
        for child in preparing(root):
            os.kill(child, signal.SIGKILL)
        wait_for(pair.poll)
    return pair.summary()


def killed(folder: Path, overrides: list[str], root: Path) -> dict:
    """It goes on from where the signal stopped it, one rank sees groups late, both are killed in the third
    group, and they go on to the end."""
    overrides = [*overrides, f"data.root={root}"]
    pair = Pair(folder, overrides, one_sees_it_late)
    wait_for(lambda: newest_epoch(folder) >= 2 or pair.poll())
    pair.send(signal.SIGKILL)
    wait_for(pair.poll)
    before = pair.summary()
    last = Pair(folder, overrides)
    wait_for(last.poll)
    return last.summary() | {"killed": before}


def newest_epoch(folder: Path) -> int:
    return max(
        (line["epoch"] for line in read_metrics(folder / "metrics.jsonl", "train")), default=0
    )


def alone(folder: Path, overrides: list[str], root: Path) -> dict:
    run = Pair(folder, [*overrides, f"data.root={root}"], world=1)
    wait_for(run.poll)
    return run.summary()


def main() -> None:
    assert torch.get_num_threads() and train.main  # imported here, so that no fork has to
    peak_flops(torch.device("cpu"))  # measured once, for all forks
    folder = Path(sys.argv[1])
    overrides = sys.argv[2:]
    results = {
        "one": alone(folder / "one", overrides, folder / "text-one"),
        "waiting alone": waiting(folder / "waiting-alone", overrides, folder / "text-alone", 1),
        "waiting": waiting(folder / "two", overrides, folder / "text-two", 2),
        "killed": killed(folder / "two", overrides, folder / "text-two"),
        "dying": dying(folder / "dying", overrides, folder / "text-dying"),
    }
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
