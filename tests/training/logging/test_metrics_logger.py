"""Metrics of steps whose results are read with a delay, as on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from errors import INTERRUPTED, TrainingError
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from training.logging.console import Console
from training.logging.metrics_file import read_metrics
from training.logging.metrics_logger import MetricsLogger
from training.logging.step_metrics import StepResult
from training.stages import stages_of

PEAK = 1e9
COSTS = {6: 1e3, 24: 5e3}  # FLOPs of a token by the length of its window
# 4 steps of 8 × 6 tokens, then 4 of 4 × 24.
WORDS = [
    *(
        "train_length=24",
        "training.batch_size=4",
        "training.tokens=576",
        "training.validation.targets=8",
    ),
    "training.stages=[{length: 6, duration: 4, batch_size: 8}, {length: 24}]",
]


BATCH = SimpleNamespace(n_targets=24, passes={}, epoch=0, hash="")


@pytest.fixture(autouse=True)
def _peak(monkeypatch):
    monkeypatch.setattr("training.logging.metrics_logger.peak_flops", lambda device: PEAK)


def run_of(folder, settings, main=True, console=None):
    """What the logger uses of a run."""
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    return SimpleNamespace(
        folder=folder,
        settings=settings,
        console=console or Console(quiet=True),
        device=torch.device("cpu"),
        parallel=SimpleNamespace(main=main, world=1),
        model=SimpleNamespace(flops_per_token=lambda length: COSTS.get(length, 1e3)),
    )


def recorded(folder, log_interval: int, leave: int) -> list[dict]:
    settings = load_settings(RunSettings, [*WORDS, f"training.log_interval={log_interval}"])
    first, second = stages_of(settings)
    assert (settings.steps, second.start) == (8, 4)
    assert (first.length, second.length) == (6, 24)
    with MetricsLogger(run_of(folder, settings), 0) as recorder:
        for step in range(8):
            if step == second.start:
                recorder.change(second)
            outcome = StepResult(
                torch.tensor([float(step), 1.0, 0, 0, 0, 0, 0], dtype=torch.float64), None
            )
            recorder.step(step + 1, outcome, {"lr": 1e-3}, BATCH)
            recorder.read(pending=leave)
        recorder.read()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("lost", ["", "metrics.jsonl", "manifest.json"])
def test_missing_run_files_are_named(tmp_path, lost):
    folder = tmp_path / "run"
    folder.mkdir()
    run = run_of(folder, load_settings(RunSettings, WORDS))
    with (
        pytest.raises(TrainingError, match=str(folder / lost)),
        MetricsLogger(run, 0) as recorder,
    ):
        recorder.check()
        assert recorder.status == 0
        (folder / lost).rename(tmp_path / "moved")
        assert recorder.status == INTERRUPTED
        with nullcontext() if lost else pytest.raises(TrainingError):
            recorder.sync()  # without the folder there is nowhere to save


@pytest.mark.parametrize("leave", [0, 1, 3])
def test_late_step_uses_cost_of_its_stage(tmp_path, leave):
    lines = recorded(tmp_path, 1, leave)
    kinds = [(line["kind"], line["step"]) for line in lines if line["kind"] != "start"]
    assert kinds == [("train", i) for i in range(1, 5)] + [("change", 4)] + [
        ("train", i) for i in range(5, 9)
    ]
    steps = [line for line in lines if line["kind"] == "train"]
    costs = [line["mfu"] * PEAK / line["tokens_per_second"] for line in steps]
    assert costs == pytest.approx([1e3] * 4 + [5e3] * 4)
    assert [line["loss"] for line in steps] == [float(step) for step in range(8)]


def test_throughput_across_stage_boundary_uses_cost_per_stage(tmp_path):
    lines = [line for line in recorded(tmp_path, 3, 1) if "mfu" in line]
    costs = {line["step"]: line["mfu"] * PEAK / line["tokens_per_second"] for line in lines}
    mixed = (48 * 1e3 + 2 * 96 * 5e3) / (48 + 2 * 96)  # steps 4, 5 and 6
    assert costs == pytest.approx({3: 1e3, 6: mixed, 8: 5e3})


def test_only_main_process_has_trackers(tmp_path, monkeypatch):
    settings = load_settings(RunSettings, WORDS)
    asked = []
    monkeypatch.setattr(
        "training.logging.metrics_logger.make_trackers", lambda *given: asked.append(given) or []
    )
    for main, count in ((False, 0), (True, 1)):
        with MetricsLogger(run_of(tmp_path, settings, main), 0):
            assert len(asked) == count
