"""Recorded exposure against loops over every pair in the batches of the loader."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from data import DataError, TokenStore
from data.sampling import exposure as module
from data.sampling.exposure import (
    Exposure,
    ExposureLedger,
    ExposureRule,
    read_exposure,
    write_exposure,
)
from data.sampling.positions import (
    CapePositions,
    OffsetPositions,
    PlainPositions,
    PosePositions,
    SubsetPositions,
)
from tests.data.stores import make_store, sampler

SAMPLERS = {
    "plain": PlainPositions(),
    "offset": OffsetPositions(max_offset=9),
    "subset": SubsetPositions(max_length=31),
    "subset of the batch": SubsetPositions(max_length=31, per="batch"),
    "cape": CapePositions(global_shift=4, local_shift=0.4, scale=1.5, center=True),
    "pose": PosePositions(target=29),
}
RULES = [
    ExposureRule(),
    ExposureRule(3),
    ExposureRule(3, 2),
    ExposureRule(50, 2),
]


@pytest.fixture(scope="module")
def store() -> TokenStore:
    return make_store([1, 3, 17, 2, 40, 8, 5, 11, 1, 23])


def batches_of(store, packing: str, name: str, *, length=13, batch=3, seed=4):
    positions = SAMPLERS[name]
    return sampler(store, (length, batch), packing=packing, seed=seed, positions=positions)


def by_loops(batches, steps: range, rule=lambda step: ExposureRule()) -> tuple:
    """Positions, distances and tokens counted one by one from batches as training gets them."""
    positions = Counter()
    distances = Counter()
    tokens = 0
    for step in steps:
        batch = batches.batch(step)
        window, sinks = rule(step)
        tokens += batch.tokens.numel()
        arrays = [getattr(batch, name) for name in ("order", "position", "document")]
        rows = zip(*(array.expand(batch.tokens.shape).tolist() for array in arrays), strict=True)
        for order, position, document in rows:
            text = [i for i in range(len(order)) if document[i] >= 0]  # without padding
            positions.update(round(position[i]) for i in text)
            for i, j in product(text, repeat=2):
                near = window is None or order[i] - order[j] < window or order[j] < sinks
                if j <= i and document[i] == document[j] and near:
                    distances[round(abs(position[i] - position[j]))] += 1
    return positions, distances, tokens


def as_counters(exposure: Exposure) -> tuple[Counter, Counter, int]:
    positions = {exposure.first + p: int(n) for p, n in enumerate(exposure.positions) if n}
    distances = {d: int(n) for d, n in enumerate(exposure.distances) if n}
    return Counter(positions), Counter(distances), exposure.tokens


CASES = [
    (packing, name, RULES[i % len(RULES)])
    for i, (name, packing) in enumerate(product(SAMPLERS, ["concat", "intra_document"]))
]


@pytest.mark.parametrize(("packing", "name", "rule"), CASES)
def test_counts_match_loops_over_batches(store, packing, name, rule):
    """Windows of several lengths, and an attention range that changes during training."""
    plan = [(5, 4, 3), (13, 2, 2), (5, 3, 9)]
    batches = sampler(
        store,
        *plan,
        packing=packing,
        seed=4,
        positions=SAMPLERS[name],
    )

    def rule_at(step: int) -> ExposureRule:
        return rule if step < 7 else ExposureRule()

    ledger = ExposureLedger(batches, 14, rule_at)
    for step in (4, 14):  # in two parts, as checkpoints do
        exposure = ledger.upto(step)
        assert as_counters(exposure) == by_loops(batches, range(step), rule_at)
        assert (exposure.steps, exposure.counted) == (step, step)


def test_long_runs_are_estimated_from_sampled_steps(store, monkeypatch):
    batches = batches_of(store, "concat", "pose")
    steps = 600
    whole = ExposureLedger(batches, steps).upto(steps)
    monkeypatch.setattr(module, "COUNTED", 4000)
    ledger = ExposureLedger(batches, steps)
    in_parts = [ledger.upto(step) for step in (1, 2, 250, steps)]
    assert in_parts[0].counted == 1
    sampled = ExposureLedger(batches, steps).upto(steps)
    # 3 windows of 13 tokens are 273 pairs, and 600 steps 41 times what is counted
    assert ExposureLedger(batches, steps).upto(14 * 41).counted == 14
    assert sampled.counted < steps / 3
    assert (sampled.steps, sampled.tokens) == (steps, whole.tokens)
    for key, value in vars(sampled).items():  # at checkpoints or at the end alone: the same
        assert np.array_equal(value, vars(in_parts[-1])[key])
    sigma = np.sqrt(whole.positions * steps / sampled.counted)
    assert (np.abs(sampled.positions - whole.positions) < 5 * sigma + 1).all()
    assert np.abs(sampled.distances - whole.distances).max() < 0.2 * whole.distances.max()


def test_counts_are_stored(store, tmp_path):
    assert read_exposure(tmp_path) is None
    exposure = ExposureLedger(batches_of(store, "concat", "cape"), 3).upto(3)
    other = ExposureLedger(batches_of(store, "intra_document", "plain", length=20), 2).upto(2)
    both = zip(as_counters(exposure), as_counters(other), strict=True)
    assert as_counters(exposure + other) == tuple(a + b for a, b in both)  # of a run and its parent
    write_exposure(tmp_path, exposure)
    stored = read_exposure(tmp_path)
    assert as_counters(stored) == as_counters(exposure)
    assert (stored.steps, stored.counted) == (3, 3)
    (tmp_path / "exposure.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"exposure\.npz"):
        read_exposure(tmp_path)
