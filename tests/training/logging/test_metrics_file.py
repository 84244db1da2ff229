"""metrics.jsonl after kills, repeated steps and non-finite numbers."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import TrainingError
from run_directory.metrics_file import MetricsFile, held_lines, read_metrics


def test_records_round_trip(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsFile(file, 0) as log:
        log.write(
            1,
            loss=0.1 + 0.2,
            norm=torch.tensor(1.5),
            tokens=np.int64(7),
            nested={"a": [1, 2.5]},
            text="é",
        )
        log.write(2, loss=math.nan, norm=-math.inf)
        log.write(2, "validation", nll={"256": 3.5})
    lines = read_metrics(file)
    assert [(line["kind"], line["step"], line["attempt"]) for line in lines] == [
        ("start", 0, 1), ("train", 1, 1), ("train", 2, 1), ("validation", 2, 1),
    ]  # fmt: skip
    assert lines[1]["loss"] == 0.1 + 0.2 and lines[1]["norm"] == 1.5 and lines[1]["tokens"] == 7
    assert lines[1]["nested"] == {"a": [1, 2.5]} and lines[1]["text"] == "é"
    assert (lines[2]["loss"], lines[2]["norm"]) == ("nan", "-inf")
    assert [line["nll"] for line in read_metrics(file, "validation")] == [{"256": 3.5}]


@given(st.integers(1, 200))
@settings(max_examples=60)
def test_truncated_file_is_readable_and_appendable(tmp_path_factory, cut):
    file = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsFile(file, 0) as log:
        for step in range(1, 6):
            log.write(step, loss=step / 7)
    whole = file.read_bytes()
    file.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = read_metrics(file, "train")
    assert [line["step"] for line in kept] == list(range(1, len(kept) + 1))
    assert len(kept) >= file.read_bytes().count(b"\n") - 1
    resumed = len(kept)
    with MetricsFile(file, resumed) as log:
        log.write(resumed + 1, loss=9.0)
    assert [line["step"] for line in read_metrics(file, "train")] == list(range(1, resumed + 2))
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_corrupted_line_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsFile(file, 0) as log:
        log.write(1)
    file.write_bytes(b"{oops\n" + file.read_bytes())
    with pytest.raises(TrainingError, match=r"metrics.jsonl:1: not a line of metrics"):
        read_metrics(file)


def test_records_survive_sigkill(tmp_path):
    file = tmp_path / "metrics.jsonl"
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom run_directory.metrics_file import "
        "MetricsFile\nlog = MetricsFile(Path(sys.argv[1]), 0)\nfor step in range(1, 301): "
        "log.write(step, loss=step / 3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=os.getcwd())
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(file, "train")] == list(range(1, 301))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    log = MetricsFile(tmp_path / "metrics.jsonl", 0)
    log.close()
    monkeypatch.setattr(log, "_stream", Path("/dev/full").open("a"))  # noqa: SIM115
    with pytest.raises(TrainingError, match=r"step 4 cannot be written: No space left"):
        log.write(4)
    with pytest.raises(OSError):
        log.close()


def test_start_supersedes_later_steps_of_all_earlier_attempts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for start, stop in ((0, 9), (6, 12), (3, 5)):
        with MetricsFile(file, start) as log:
            for step in range(start + 1, stop + 1):
                log.write(step)
    held = [(line["step"], line["attempt"]) for line in held_lines(file) if line["kind"] == "train"]
    assert held == [(1, 1), (2, 1), (3, 1), (4, 3), (5, 3)]
    file.write_bytes(b'{"kind": "train", "step": "1", "attempt": 1}\n')
    with pytest.raises(TrainingError, match=r"metrics.jsonl:1"):
        read_metrics(file)
