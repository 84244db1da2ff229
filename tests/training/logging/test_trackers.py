"""Trackers receive what metrics.jsonl contains; a failing tracker does not stop a run."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from errors import TrainingError
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from training.trackers import check_trackers, make_trackers

LINES = (
    {"kind": "start", "step": 0, "attempt": 1},
    {"kind": "train", "step": 1, "attempt": 1, "loss": 2.0},
    {"kind": "validation", "step": 1, "attempt": 1, "nll": {"256": 3.0, "512": "nan"}},
    {"kind": "train", "step": 2, "attempt": 1, "loss": 1.0},
    {"kind": "train", "step": 3, "attempt": 1, "loss": 1.0},
)


class RecordingConsole:
    def __init__(self):
        self.lines = []

    def warn(self, text):
        self.lines.append(text)


def mirrors(folder, console, *overrides, step=0):
    return make_trackers(
        load_settings(RunSettings, [f"training.{word}" for word in overrides]),
        folder,
        step,
        console,
    )


def test_trackers_are_imported_on_request_only(tmp_path, monkeypatch):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it would now raise
    console = RecordingConsole()
    assert mirrors(tmp_path, console) == [] and console.lines == []
    found = mirrors(tmp_path, console, "wandb.mode=offline", "tensorboard=true")
    assert [line.split()[0] for line in console.lines] == ["wandb", "tensorboard"]
    assert all("training continues" in line for line in console.lines)
    for mirror in found:  # they receive nothing any more
        mirror.write(LINES[1])
        mirror.close()
    assert len(console.lines) == 2


def test_wandb_logs_steps_and_is_disabled_after_error(tmp_path, monkeypatch):
    sent = []
    metrics = []
    calls = {}

    def log(values):
        if len(sent) == 2:
            raise ConnectionError("no route\nmore")
        sent.append(values)

    run = SimpleNamespace(
        log=log, define_metric=lambda *a, **k: metrics.append((a, k)), finish=lambda: None
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **k: calls.update(k) or run)
    )
    console = RecordingConsole()
    (mirror,) = mirrors(tmp_path / "run-1", console, "wandb.mode=offline", "wandb.project=p")
    for line in LINES:
        mirror.write(line)
    mirror.close()
    assert sent == [
        {"train/loss": 2.0, "step": 1, "attempt": 1},
        {"validation/nll/256": 3.0, "validation/nll/512": "nan", "step": 1, "attempt": 1},
    ]
    assert metrics == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert (calls["project"], calls["mode"], calls["name"]) == ("p", "offline", "run-1")
    # schedulers kill what has not ended by then
    assert 0 < calls["settings"]["finish_timeout"] < 30
    assert calls["settings"]["finish_timeout_raises"] is True
    assert console.lines == ["wandb is disabled; training continues: no route"]


def test_tensorboard_purges_steps_repeated_on_resume(tmp_path, monkeypatch):
    sent = []
    calls = {}

    def writer(**given):
        calls.update(given)
        return SimpleNamespace(
            add_scalar=lambda *a: sent.append(a), close=lambda: sent.append("closed")
        )

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer)
    )
    (mirror,) = mirrors(tmp_path, RecordingConsole(), "tensorboard=true", step=7)
    for line in LINES[:3]:
        mirror.write(line)
    mirror.close()
    assert calls == {"log_dir": str(tmp_path / "tensorboard"), "purge_step": 8}
    assert sent == [("train/loss", 2.0, 1), ("validation/nll/256", 3.0, 1), "closed"]


def test_missing_tracker_package_is_rejected(monkeypatch):
    check_trackers(load_settings(RunSettings, []).training)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrainingError, match="requires tensorboard: pip install -c constraints"):
        check_trackers(load_settings(RunSettings, ["training.tensorboard=true"]).training)
