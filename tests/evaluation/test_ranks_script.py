"""evaluate.py under torchrun: equal files, written once, and exit statuses."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.evaluation.test_evaluate_script import SMALL, call, root  # noqa: F401
from tests.files import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def started(*overrides):
    """evaluate.py by two processes."""
    return subprocess.Popen(
        [sys.executable, *TORCHRUN, ROOT / "evaluate.py", *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_signal_to_launcher_stops_processes_and_keeps_results(root):  # noqa: F811
    run = root / "signal"
    shutil.copytree(root / "run", run, ignore=shutil.ignore_patterns("evaluation"))
    words = ["targets=1", "spans_per_document=16", "device=cpu", "folder=one", "batch=1"]
    process = started(run, SMALL[0], *words)
    cells = run / "evaluation" / "cells"
    end = time.monotonic() + 200
    while not list(cells.glob("*.npz")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode != 0
    assert not subprocess.run(["pgrep", "-f", str(run)], capture_output=True, check=False).stdout
    assert list(cells.glob("*.npz"))
    assert not (run / "evaluation" / "one").exists()
