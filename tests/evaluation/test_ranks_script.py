"""evaluate.py under torchrun: equal files, written once, and exit statuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.evaluation.test_evaluate_script import SMALL, call, root  # noqa: F401
from tests.files import ROOT, results_of

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


def results(run):
    """What an evaluation left, but for what differs between any two calls."""
    record = results_of(run / "evaluation" / "one")
    text = json.dumps({k: v for k, v in record.items() if k not in ("command", "finished")})
    table = (run / "evaluation" / "one" / "results.csv").read_text()
    cells = {
        path.name: np.load(path)["nll"] for path in (run / "evaluation" / "cells").glob("*.npz")
    }
    return text.replace(str(run), "RUN"), table.replace(str(run), "RUN"), cells


@pytest.mark.slow  # tests/evaluation/test_ranks.py has processes without a launcher
def test_launched_processes_write_same_files_as_one(root, capsys):  # noqa: F811
    overrides = [*SMALL, "folder=one", "batch=2", "methods=[trained,window]"]
    alone = root / "alone"
    shared = root / "shared"
    for copy in (alone, shared):
        shutil.copytree(root / "run", copy, ignore=shutil.ignore_patterns("evaluation"))
    call(alone, *overrides)
    printed = capsys.readouterr()
    process = started(shared, *overrides)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    *texts, cells = results(shared)
    *expected, expected_cells = results(alone)
    assert texts == expected
    assert cells.keys() == expected_cells.keys()
    assert len(cells) == 5  # both methods are the same at the trained length
    for name, nll in cells.items():
        assert (nll == expected_cells[name]).all()
    # One process speaks: the same lines as that of one.
    assert out == printed.out.replace(str(alone), str(shared))
    assert errors.count("forecast:") == 1
    assert errors.count("evaluating: done") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_launcher_stops_processes_and_keeps_results(root, number):  # noqa: F811
    run = root / f"signal-{number}"
    shutil.copytree(root / "run", run, ignore=shutil.ignore_patterns("evaluation"))
    words = ["targets=1", "spans_per_document=16", "device=cpu", "folder=one", "batch=1"]
    process = started(run, SMALL[0], *words)
    cells = run / "evaluation" / "cells"
    end = time.monotonic() + 200
    while not list(cells.glob("*.npz")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert not subprocess.run(["pgrep", "-f", str(run)], capture_output=True, check=False).stdout
    assert list(cells.glob("*.npz"))
    assert not (run / "evaluation" / "one").exists()
