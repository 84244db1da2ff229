"""Recorded exposure against loops over every pair in the batches of the loader."""

import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import BatchSampler, DataError, TokenStore
from data.sampling import exposure as module
from data.sampling.exposure import (
    Exposure,
    ExposureLedger,
    ExposureRule,
    read_exposure,
    write_exposure,
)
from data.sampling.random_positions import (
    CapePositions,
    OffsetPositions,
    PlainPositions,
    PosePositions,
    SubsetPositions,
)
from data.sampling.segments import Segment
from data.store import EncodedDocument, write_manifest, write_shard

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
    ExposureRule(1, 40),
    ExposureRule(50, 2),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    return stored([1, 3, 17, 2, 40, 8, 5, 11, 1, 23], tmp_path_factory.mktemp("store"))


def stored(lengths: list[int], folder: Path) -> TokenStore:
    documents = (EncodedDocument(f"d{d}", None, np.arange(n), n, d) for d, n in enumerate(lengths))
    entry = write_shard(folder, "00000", np.dtype("<u2"), documents)
    write_manifest(
        folder,
        np.dtype("<u2"),
        [entry],
        tokenizer="t",
        has_bos=False,
        has_eos=False,
        source={"name": "test"},
    )
    return TokenStore(folder)


def batches_of(
    store: TokenStore, packing: str, positions, *, length=13, batch=3, seed=4
) -> BatchSampler:
    return BatchSampler(
        store, [Segment(length, batch)], packing=packing, seed=seed, positions=positions
    )


def by_loops(
    batches: BatchSampler, steps: range, rule: ExposureRule
) -> tuple[Counter, Counter, int]:
    """Positions, distances and tokens counted one by one from batches as training gets them."""
    positions = Counter()
    distances = Counter()
    tokens = 0
    for step in steps:
        batch = batches.batch(step)
        rows, length = batch.tokens.shape
        order, position, document = (
            x.expand(rows, -1).tolist() for x in (batch.order, batch.position, batch.document)
        )
        tokens += rows * length
        for r in range(rows):
            for i in range(length):
                positions[round(position[r][i])] += 1
                for j in range(i + 1):
                    near = rule.window is None or order[r][i] - order[r][j] < rule.window
                    if document[r][i] == document[r][j] and (near or order[r][j] < rule.sinks):
                        distances[round(position[r][i] - position[r][j])] += 1
    return positions, distances, tokens


def as_counters(exposure: Exposure) -> tuple[Counter, Counter, int]:
    positions = {exposure.first + p: int(n) for p, n in enumerate(exposure.positions) if n}
    distances = {d: int(n) for d, n in enumerate(exposure.distances) if n}
    return Counter(positions), Counter(distances), exposure.tokens


def cases():
    """Every sampler with both packings and one rule; with the other rules in the slow suite."""
    for i, (name, packing) in enumerate(product(SAMPLERS, ["concat", "intra_document"])):
        for j, rule in enumerate(RULES):
            marks = [] if j == i % len(RULES) else [pytest.mark.slow]
            yield pytest.param(packing, name, rule, marks=marks, id=f"{packing}-{name}-{j}")


@pytest.mark.parametrize(("packing", "name", "rule"), list(cases()))
def test_counts_match_loops_over_batches(store, packing, name, rule):
    batches = batches_of(store, packing, SAMPLERS[name])
    ledger = ExposureLedger(batches, 9, lambda step: rule)
    assert batches.windows_per_epoch(13) == 8  # so that steps span two epochs
    for step in (4, 9):  # in two parts, as checkpoints ask
        found = ledger.upto(step)
        assert as_counters(found) == by_loops(batches, range(step), rule)
        assert (found.steps, found.counted) == (step, step)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda x: sum(x) > 20),
    length=st.integers(2, 19),
    batch=st.integers(1, 4),
    steps=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_packed_documents_of_any_lengths(lengths, length, batch, steps, seed):
    with tempfile.TemporaryDirectory() as folder:
        store = stored(lengths, Path(folder))
        batches = batches_of(
            store, "intra_document", PlainPositions(), length=length, batch=batch, seed=seed
        )
        found = ExposureLedger(batches, steps).upto(steps)
        assert as_counters(found) == by_loops(batches, range(steps), ExposureRule())


def test_single_window(store):
    """Three windows of 5 tokens a step, 2 steps; each token sees itself, the one before, and the first."""
    batches = batches_of(store, "concat", PlainPositions(), length=5)
    found = ExposureLedger(batches, 2, lambda step: ExposureRule(2, 1)).upto(2)
    assert found.positions.tolist() == [6] * 5
    assert found.distances.tolist() == [30, 24, 6, 6, 6]


def test_sampler_may_change_during_training(store):
    for packing, positions in (("intra_document", SAMPLERS["plain"]), ("concat", SAMPLERS["pose"])):
        batches = batches_of(store, packing, positions)
        found = ExposureLedger(batches, 7, lambda step: RULES[0] if step < 3 else RULES[2]).upto(7)
        first = by_loops(batches, range(3), RULES[0])
        second = by_loops(batches, range(3, 7), RULES[2])
        assert as_counters(found) == tuple(a + b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["plain", "offset", "subset"])
@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_lengths_may_change_during_training(store, packing, name):
    plan = [Segment(5, 4, 3), Segment(13, 2, 2), Segment(5, 3, 9)]
    batches = BatchSampler(store, plan, packing=packing, seed=4, positions=SAMPLERS[name])
    ledger = ExposureLedger(batches, 14, lambda step: RULES[0] if step < 4 else RULES[2])
    whole = by_loops(batches, range(4), RULES[0])
    assert as_counters(ledger.upto(4)) == whole
    rest = by_loops(batches, range(4, 14), RULES[2])
    assert as_counters(ledger.upto(14)) == tuple(a + b for a, b in zip(whole, rest, strict=True))


@pytest.mark.parametrize(("name", "stride"), [("plain", 1), ("offset", 3), ("subset", 9)])
def test_fraction_of_steps(store, name, stride, monkeypatch):
    """2 steps of 3 windows of 5 tokens: 30 positions where steps are of one, else 15 pairs a window."""
    monkeypatch.setattr(module, "COUNTED", 10)
    assert (
        ExposureLedger(batches_of(store, "concat", SAMPLERS[name], length=5, batch=3), 2).stride
        == stride
    )


@pytest.mark.parametrize(
    "name", ["pose", *(pytest.param(name, marks=pytest.mark.slow) for name in ("offset", "subset"))]
)
def test_long_runs_are_estimated_from_sampled_steps(store, name, monkeypatch):
    batches = batches_of(store, "concat", SAMPLERS[name])
    steps = 600
    whole = ExposureLedger(batches, steps).upto(steps)
    monkeypatch.setattr(module, "COUNTED", 4000)
    ledger = ExposureLedger(batches, steps)
    in_parts = [ledger.upto(step) for step in (1, 2, 250, steps)]
    assert in_parts[0].counted == 1
    found = ExposureLedger(batches, steps).upto(steps)
    assert found.counted < steps / 3 and found.steps == steps and found.tokens == whole.tokens
    assert vars(in_parts[-1]).keys() == vars(found).keys()
    for key, value in vars(found).items():  # asked at checkpoints or at the end alone: the same
        assert np.array_equal(value, vars(in_parts[-1])[key])
    # 4 tokens or more at each of 30 positions a step: what is scaled up is off by less than five sigma.
    sigma = np.sqrt(whole.positions * steps / found.counted)
    assert (np.abs(found.positions - whole.positions) < 5 * sigma + 1).all()
    assert abs(found.positions.sum() / whole.positions.sum() - 1) < 0.01
    assert np.abs(found.distances - whole.distances).max() < 0.2 * whole.distances.max()
    with pytest.raises(ValueError, match="at step 600 already"):
        ledger.upto(3)


def test_consecutive_trainings(store):
    first = ExposureLedger(batches_of(store, "concat", SAMPLERS["cape"]), 3).upto(3)
    second = ExposureLedger(
        batches_of(store, "intra_document", PlainPositions(), length=20), 2
    ).upto(2)
    assert first.first < 0
    both = as_counters(first + second)
    assert both == tuple(
        a + b for a, b in zip(as_counters(first), as_counters(second), strict=True)
    )
    assert as_counters(second + first) == both and (first + second).steps == 5


def test_counts_are_cached(store, tmp_path):
    assert read_exposure(tmp_path) is None
    exposure = ExposureLedger(batches_of(store, "concat", SAMPLERS["cape"]), 3).upto(3)
    write_exposure(tmp_path, exposure)
    found = read_exposure(tmp_path)
    assert as_counters(found) == as_counters(exposure)
    assert (found.first, found.steps, found.counted) == (exposure.first, 3, 3)
    (tmp_path / "exposure.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="is damaged; delete it"):
        read_exposure(tmp_path)
