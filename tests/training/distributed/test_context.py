"""Context parallelism: training curves do not depend on how many processes share a window."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from errors import TrainingError
from model import Transformer
from run_directory.checkpoints import find_checkpoint, save_snapshot
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.training.distributed.curves import Training, shared
from training.checks import check_processes
from training.distributed.launch import check_context

ROOT = Path(__file__).resolve().parents[3]
# Windows of several documents, which begin within and between chunks.
SMALL = [
    *("train_length=24", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("training.batch_size=4", "training.tokens=8k", "training.precision=float64"),
    *("training.validation.targets=8", "data.packing=intra_document"),
]
PLAIN = "data.packing=concat"
SHARDED = "training.parallel.sharding=full"
CONTEXT = "training.parallel.context=2"
RECOMPUTED = "training.parallel.activation_checkpointing=true"
CASES = {
    "rope": ["model.qk_norm=true", "training.micro_batch_size=3", "training.z_loss=1e-3"],
    "fox": ["model.position.name=fox", SHARDED, PLAIN],
    "selective_rope": ["model.position.name=selective_rope", RECOMPUTED],
    "ssmax": [
        "model.position={name: rope, temperature: {name: ssmax}, sink_logit: learned}",
        "training.parallel.activation_checkpointing=selective",
    ],
    "random": ["data.positions={name: random_subset, max_length: 64}", PLAIN],
    "linear": ["model.mixer={name: linear, chunk: 4}"],
}
STEPS = 3
# For the largest pattern, and for factors of 16 pairs of features.
WIDE = ["model.layers=4", "model.dim=128"]
CONFIGS = sorted(
    [*(ROOT / "configs/position").glob("*.yaml"), *(ROOT / "configs/mixer").glob("*.yaml")]
)


def trained(overrides: list[str], prepared, steps: int = 20) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the first steps."""
    return Training(overrides, prepared).steps(0, steps)


def farthest(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    assert len(a) == len(b)
    return float(np.abs(np.subtract(a, b)).max())  # NaN if any is


def one_process(overrides: list[str]) -> list[str]:
    return [one for one in overrides if one != SHARDED]


@pytest.fixture(scope="module")
def halves(prepared, tmp_path_factory):
    """Every case in one group of two processes; a checkpoint of one of them, continued without
    context parallelism."""
    folder = tmp_path_factory.mktemp("context")

    def work() -> dict:
        found = {
            name: trained([*SMALL, *case, CONTEXT], prepared, STEPS) for name, case in CASES.items()
        }
        first = Training([*SMALL, CONTEXT], prepared)
        start = first.steps(0, 2)
        if first.parallel.takes_part:
            save_snapshot(folder, first.state.capture())
        first.parallel.wait()
        second = Training(SMALL, prepared)
        second.state.restore(find_checkpoint(folder))
        return found | {"resumed": [*start, *second.steps(2, 4)]}

    return folder, shared(2, work)


@pytest.mark.parametrize("case", CASES)
def test_curve_equals_that_of_one_process(halves, prepared, case):
    expected = trained([*SMALL, *one_process(CASES[case])], prepared, STEPS)
    assert expected[-1][0] < expected[0][0]
    for found in halves[1]:
        assert farthest(found[case], expected) < 1e-10


def test_checkpoint_continues_with_any_number_of_processes(halves, prepared):
    folder, found = halves
    expected = trained(SMALL, prepared, 4)
    assert all(farthest(rank["resumed"], expected) < 1e-10 for rank in found)
    alone = Training(SMALL, prepared)
    alone.state.restore(find_checkpoint(folder))
    assert farthest(alone.steps(2, 4), expected[2:]) < 1e-10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_every_configuration_equals_one_process(prepared, context, packing):
    cases = {f.stem: [str(f), *SMALL, *WIDE, f"data.packing={packing}"] for f in CONFIGS}
    setting = f"training.parallel.context={context}"

    def work() -> dict:
        return {name: trained([*case, setting], prepared) for name, case in cases.items()}

    ranks = shared(context, work, 1200)
    expected = {name: trained(case, prepared) for name, case in cases.items()}
    far = {
        name: max(farthest(rank[name], curve) for rank in ranks) for name, curve in expected.items()
    }
    assert {name: value for name, value in far.items() if not value < 1e-10} == {}


WINDOW = "model.position={name: rope, window: 5}"
COMPILED = {
    "by block": (True, "eager", [SHARDED, RECOMPUTED]),
    "whole, window": (False, "eager", [WINDOW, PLAIN]),
    "inductor": (True, "inductor", [SHARDED]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_curve_equals_that_of_one_process(prepared, case):
    by_block, backend, overrides = COMPILED[case]

    def work() -> list:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        prepare = partial(
            Transformer.compile, by_block=by_block, dynamic=True, fullgraph=True, backend=backend
        )
        return Training([*SMALL, *overrides, CONTEXT], prepared, prepare).steps(0, STEPS)

    expected = trained([*SMALL, *one_process(overrides)], prepared, STEPS)
    for curve in shared(2, work, 500):
        assert farthest(curve, expected) < 1e-10


@pytest.mark.slow
def test_context_groups_divide_the_batch(prepared):
    """Four processes in two groups, under DDP and FSDP2."""

    def work() -> list:
        return [trained([*SMALL, *more, CONTEXT], prepared) for more in ([], [SHARDED])]

    expected = trained(SMALL, prepared)
    for curves in shared(4, work):
        assert all(farthest(curve, expected) < 1e-10 for curve in curves)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (
            ["train_length=8", "training.parallel.context=8"],
            8,
            "train_length 8 .* to 16 or more, .* to 4 or less",
        ),
        (["training.batch_size=3"], 4, "training.batch_size 3 .* context groups"),
        (
            ["training.stages=[{length: 12, duration: 0.5}, {length: 3}]", "train_length=12"],
            2,
            r"stages\.1: a length of 3",
        ),
    ],
)
def test_shares_that_cannot_be_made_are_refused_with_the_fix(overrides, processes, message):
    settings = load_settings(RunSettings, [*SMALL, CONTEXT, *overrides])
    with pytest.raises(TrainingError, match=message):
        check_processes(settings, processes)


def test_processes_that_cannot_form_groups_are_refused():
    check_context(2, 4)
    with pytest.raises(TrainingError, match=r"context = 4 .* --num_processes 8"):
        check_context(4, 6)
