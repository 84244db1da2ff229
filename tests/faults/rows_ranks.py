"""Evaluations that lose a process of a context group."""

import signal
from functools import partial
from pathlib import Path

from tests.faults.fault import Fault, Result, call
from tests.processes import ScriptProcess, free_port

TIMEOUT = 10.0  # of a gather; a busy rank must not take longer to reach one
BUSY = 60.0  # what a busy machine may take to start and to leave


def loses_a_rank(number: signal.Signals, folder: Path, overrides: list[str]) -> Result:
    """Rank 1 gets the signal in a gather; the result of rank 0. One process continues the
    evaluation."""
    assert call("train.py", *overrides, "--run-dir=run", cwd=folder).status == 0
    words = [str(int(number)), str(TIMEOUT), "run", "targets=8", "lengths=[24,48]", "context=2"]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launch |= {"MASTER_PORT": str(free_port())}
    ranks = [
        ScriptProcess(
            "tests/faults/lost_in_evaluation.py",
            words,
            folder,
            *(folder / f"{stream}{rank}" for stream in ("out", "err")),
            launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        status = ranks[0].wait(TIMEOUT + BUSY)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].poll() == -signal.SIGKILL
    assert call("evaluate.py", "run", "targets=8", "lengths=[24,48]", cwd=folder).status == 0
    return Result(status, *((folder / f"{stream}0").read_text() for stream in ("out", "err")))


FAULTS = [
    Fault(
        "evaluation: rank killed in a gather",
        partial(loses_a_rank, signal.SIGKILL),
        names=("another process of this evaluation has ended",),
        is_slow=True,
    ),
    Fault(
        "evaluation: rank stopped in a gather",
        partial(loses_a_rank, signal.SIGSTOP),
        names=("another process of this evaluation has not answered within 10 s",),
        is_slow=True,
    ),
]
