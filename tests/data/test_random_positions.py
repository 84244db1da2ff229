"""Position samplers: their distributions, reproducibility, and unchanged order."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from data.sampling.packing import IGNORED
from data.sampling.position_samplers import PositionsSettings
from tests.data.stores import check_ranks, make_store, packings, place, sampler, stores
from tests.files import table

TABLE = table("data/position_samplers.yaml")
EVERY = TABLE["every"]
REAL = ("cape", "random_float")
names = st.sampled_from(list(EVERY))


def chosen(name: str, **keys):
    """Settings of a sampler; those of EVERY where no keys are given."""
    keys = keys or EVERY.get(name, {})
    return TypeAdapter(PositionsSettings).validate_python({"name": name.split("-")[0], **keys})


def windows(rows: int, length: int, seed: int = 0, share: float = 0.15) -> np.ndarray:
    """(rows, length) bool: places where documents begin."""
    return np.random.default_rng(seed).random((rows, length)) < share


def draw(name: str, packing: str = "concat", *, begins=None, step=0, seed=0, **keys):
    begins = windows(6, 19) if begins is None else begins
    rows = np.arange(len(begins))
    return place(
        packing,
        chosen(name, **keys),
        begins,
        seed=seed,
        step=step,
        rows=rows,
    )


def texts(placed) -> list[np.ndarray]:
    """The positions of each text."""
    position, document = np.broadcast_arrays(placed.position, placed.document)
    cuts = [np.flatnonzero(np.diff(row)) + 1 for row in document]
    return [part for row, at in zip(position, cuts, strict=True) for part in np.split(row, at)]


def is_uniform(values: list, choices) -> bool:
    """Whether all choices occur, each within 5 standard deviations of its expected count."""
    p = 1 / len(choices)
    margin = 5 * (len(values) * p * (1 - p)) ** 0.5
    counts = [values.count(choice) for choice in choices]
    return sum(counts) == len(values) and max(abs(n - p * len(values)) for n in counts) < margin


def test_offsets_and_subsets_are_uniform():
    placed = draw("random_offset", "intra_document", begins=windows(4000, 9), max_offset=4)
    assert is_uniform([int(text[0]) for text in texts(placed)], range(5))
    pairs = texts(draw("random_subset", begins=np.zeros((3000, 2), dtype=bool), max_length=5))
    every = [*itertools.combinations(range(5), 2)]
    assert is_uniform([tuple(pair.tolist()) for pair in pairs], every)
    whole = draw("random_subset", begins=windows(3, 19), max_length=19).position
    assert (whole == np.arange(19)).all()


def test_multiples_are_uniform_subsets_with_both_ends():
    placed = texts(draw("random_multiple", begins=np.zeros((6000, 4), dtype=bool), max_factor=2))
    ends = [int(text[-1]) for text in placed]
    assert all(text[0] == 0 for text in placed)
    assert is_uniform(ends, [3, 7])
    longer = [tuple(text[1:-1].tolist()) for text in placed if text[-1] == 7]
    assert is_uniform(longer, [*itertools.combinations(range(1, 7), 2)])
    for text in texts(draw("random_multiple", "intra_document", max_factor=3)):
        assert text[0] == 0
        assert (np.diff(text) > 0).all()
        assert len(text) == 1 or (text[-1] + 1) % len(text) == 0


def test_pose_cuts_and_skips_are_uniform():
    n, target = 5, 7  # cuts 1 ... 3, leaps 0 ... 2
    drawn = texts(draw("pose", begins=np.zeros((4000, n), dtype=bool), target=target))
    leaps = []
    cuts = []
    for text in drawn:
        assert text[0] == 0
        places = np.flatnonzero(np.diff(text) > 1)
        assert len(places) <= 1
        leaps.append(int(text[-1]) - (n - 1))
        cuts += [int(place) + 1 for place in places]
    assert is_uniform(leaps, range(3))
    assert is_uniform(cuts, (1, 2, 3))


def test_cape_shifts_and_jitters_each_document():
    jitter = 0.49
    placed = draw(
        "cape",
        begins=windows(500, 19),
        global_shift=0,
        local_shift=jitter,
        scale=1,
    )
    off = (placed.position - np.arange(19)) / jitter
    assert -1 <= off.min() < -0.98
    assert 0.98 < off.max() <= 1
    assert abs(off.mean()) < 5 / (3 * off.size) ** 0.5
    before = off[:, :-1].ravel()
    after = off[:, 1:].ravel()
    correlation = np.corrcoef(before, after)[0, 1]
    assert abs(correlation) < 5 / off.size**0.5  # one draw for each token
    keys = {"local_shift": 0, "center": True}
    centered = texts(draw("cape", "intra_document", global_shift=0, scale=2, **keys))
    assert max(abs(text.mean()) for text in centered) < 1e-12
    shifted = texts(draw("cape", "intra_document", global_shift=5, scale=1, **keys))
    assert max(abs(text.mean()) for text in shifted) > 2


@hypothesis_settings(max_examples=25)
@given(stores, st.integers(2, 13), st.integers(0, 40), names, packings)
def test_ranks_split_the_same_step(lengths, length, step, name, packing):
    """As samplers of other processes compute it, in any order, as after a resume."""
    store = make_store(lengths)

    def batch(rank: int = 0, world: int = 1, own: str = name):
        positions = chosen(own)
        batches = sampler(
            store,
            (length, 6),
            packing=packing,
            seed=11,
            positions=positions,
        )
        return batches.batch(step, rank, world)

    whole = batch()
    bare = batch(own="plain")
    placed = whole.positions
    assert np.array_equal(whole.tokens, bare.tokens)
    assert np.array_equal(whole.targets, bare.targets)
    assert np.array_equal(placed.order, bare.positions.order)
    assert np.array_equal(placed.document, bare.positions.document)
    assert placed.layout == bare.positions.layout
    assert (whole.n_targets, whole.hash) == (bare.n_targets, bare.hash)
    assert whole.n_targets == int((whole.targets != IGNORED).sum())
    assert placed.position.dtype == (np.float64 if name.startswith(REAL) else np.int64)
    assert placed.unit_steps == (name in ("plain", "random_offset"))
    for text in texts(placed):
        steps = np.diff(text)
        assert (steps == 1).all() if placed.unit_steps else (steps > 0).all()
    end = max(1, 1 + int(np.ceil(float(placed.position.max()))))
    assert placed.position_end == end <= chosen(name).position_end(length)
    check_ranks(batch, whole, worlds=(2, 3, 6))


@pytest.mark.parametrize(("name", "expected"), TABLE["golden"])
def test_golden_samples(name, expected):
    """Runs are resumed over years. Reals to nine digits: exp may differ in the last one."""
    begins = np.arange(6 * 19).reshape(6, 19) % 7 == 3
    position = draw(name, "intra_document", begins=begins, seed=3, step=5).position
    text = " ".join(f"{p:.9g}" for p in position.ravel())
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == expected


@pytest.mark.parametrize(("name", "setting"), [("random_subset", "max_length"), ("pose", "target")])
def test_range_shorter_than_window_is_rejected(name, setting):
    with pytest.raises(ValueError, match=f"data.positions.{setting} = 8 .* 9 tokens"):
        chosen(name, **{setting: 8}).check(9)
