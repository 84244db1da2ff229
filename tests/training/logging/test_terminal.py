"""Terminal output and profiler traces of a run."""

import fcntl
import json
import os
import re
import signal
import struct
import termios
from contextlib import suppress

from tests.processes import ScriptProcess
from tests.training.conftest import environment
from tests.training.test_train import here, lines, weights


def test_profiling_does_not_change_losses(overrides, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    folder = tmp_path / "traced"
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    traced = ["training.profile.start=2", "training.profile.steps=3"]
    assert here(monkeypatch, *overrides, *traced, "--run-dir", str(folder)) == 0
    assert lines(folder) == lines(whole) and weights(folder).keys() == weights(whole).keys()
    assert all(value.equal(weights(whole)[name]) for name, value in weights(folder).items())
    assert [file.name for file in (folder / "profile").iterdir()] == ["steps-3-5-rank0.json"]
    events = json.loads((folder / "profile" / "steps-3-5-rank0.json").read_text())["traceEvents"]
    assert sum("Optimizer.step" in event.get("name", "") for event in events) == 3


def test_terminal_is_restored_after_run(overrides, tmp_path):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    long = [*overrides, "training.tokens=1M", "--run-dir", str(tmp_path / "run")]
    terminal = os.ttyname(theirs)
    process = ScriptProcess(
        "train.py", long, tmp_path, terminal, terminal, environment(TERM="xterm")
    )
    text = ""
    while "step 8, 32 targets" not in text:
        text += os.read(ours, 1 << 16).decode(errors="replace")
    os.close(theirs)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the other side has closed
        while more := os.read(ours, 1 << 16):
            text += more.decode(errors="replace")
    os.close(ours)
    assert process.wait(60) == 128 + signal.SIGINT, text[-2000:]
    assert "stopped by SIGINT after step" in text and "to resume" in text
    assert all(word in text for word in ("context", "NLL", "change", "tokens/s  MFU", "gradient"))
    assert not re.search(r"step +\d+/\d+  loss", text)  # the lines of a log file
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
