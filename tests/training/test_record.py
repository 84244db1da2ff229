"""What the recorder tells of steps whose outcomes it reads late, as on a GPU."""

import pytest
import torch

from training.config import load_settings
from training.console import Console
from training.log import read_metrics
from training.loop import Outcome
from training.record import Recorder
from training.settings import RunSettings
from training.stages import stages_of

PEAK = 1e9
COSTS = {6: 1e3, 24: 5e3}  # FLOPs of a token by the length of its window
# 4 steps of 8 × 6 tokens, then 4 of 4 × 24.
WORDS = [
    *("train_length=24", "training.batch_size=4", "training.tokens=576", "training.validation.targets=8"),
    "training.stages=[{length: 6, lasts: 4, batch_size: 8}, {length: 24}]",
]


def recorded(folder, log_every: int, leave: int) -> list[dict]:
    settings = load_settings(RunSettings, [*WORDS, f"training.log_every={log_every}"])
    first, second = stages_of(settings)
    assert (settings.steps, second.start) == (8, 4)
    told = {"flops_per_token": COSTS[first.length], "peak": PEAK, "memory": lambda: 0}
    with Recorder(folder, settings, 0, main=True, console=Console(quiet=True), **told) as recorder:
        for step in range(8):
            if step == second.start:
                recorder.change(second, COSTS[second.length])
            outcome = Outcome(torch.tensor([float(step), 1.0, 0, 0, 0, 0, 0], dtype=torch.float64), None)
            recorder.step(step + 1, outcome, {"lr": 1e-3})
            recorder.read(leave=leave)
        recorder.read()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("leave", [0, 1, 3])
def test_a_step_that_is_read_late_has_the_cost_of_its_own_stage(tmp_path, leave):
    lines = recorded(tmp_path, 1, leave)
    kinds = [(line["kind"], line["step"]) for line in lines if line["kind"] != "start"]
    assert kinds == [("train", i) for i in range(1, 5)] + [("change", 4)] + [
        ("train", i) for i in range(5, 9)
    ]
    steps = [line for line in lines if line["kind"] == "train"]
    costs = [line["mfu"] * PEAK / line["tokens_per_second"] for line in steps]
    assert costs == pytest.approx([1e3] * 4 + [5e3] * 4)
    assert [line["loss"] for line in steps] == [float(step) for step in range(8)]


def test_over_an_edge_every_token_counts_with_its_own_cost(tmp_path):
    lines = [line for line in recorded(tmp_path, 3, 1) if "mfu" in line]
    costs = {line["step"]: line["mfu"] * PEAK / line["tokens_per_second"] for line in lines}
    mixed = (48 * 1e3 + 2 * 96 * 5e3) / (48 + 2 * 96)  # steps 4, 5 and 6
    assert costs == pytest.approx({3: 1e3, 6: mixed, 8: 5e3})
