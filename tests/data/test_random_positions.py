"""Position samplers: their distributions, reproducibility, and unchanged order."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from data import BatchSampler, DataError
from data.sampling.packing import PACKINGS
from data.sampling.random_positions import PositionsSettings, place
from data.sampling.segments import Segment
from tests.data.test_batches import make_store, stores

EVERY = {
    "random_offset": {"max_offset": 40},
    "random_subset": {"max_length": 97},
    "random_subset-batch": {"max_length": 97, "per": "batch"},
    "cape": {"global_shift": 7.5, "local_shift": 0.49, "scale": 1.5},
    "cape-center": {"center": True},
    "pose": {"target": 71},
}
names = st.sampled_from([*EVERY, "plain"])
packings = st.sampled_from(["concat", "intra_document"])


@pytest.fixture(scope="module", autouse=True)
def _root(tmp_path_factory):
    make_store.root = tmp_path_factory.mktemp("stores")


def chosen(name: str, **keys):
    """Settings of a sampler; those of EVERY where no keys are given."""
    keys = keys or EVERY.get(name, {})
    return TypeAdapter(PositionsSettings).validate_python({"name": name.split("-")[0], **keys})


def windows(rows: int, length: int, seed: int = 0, share: float = 0.15) -> np.ndarray:
    """(rows, length) bool: places where documents begin."""
    return np.random.default_rng(seed).random((rows, length)) < share


def draw(name: str, packing: str = "concat", *, begins=None, rows=None, step=0, seed=0, **keys):
    begins = windows(6, 19) if begins is None else begins
    rows = np.arange(len(begins)) if rows is None else rows
    return place(packing, chosen(name, **keys), begins, seed=seed, step=step, rows=rows)


def texts(placed) -> list[np.ndarray]:
    """The positions of each text, found by walking over the tokens one by one."""
    shape = np.broadcast_shapes(placed.position.shape, placed.order.shape)
    order, position, document = (
        np.broadcast_to(x, shape) for x in (placed.order, placed.position, placed.document)
    )
    found = []
    for r in range(shape[0]):
        for t in range(shape[1]):
            if t == 0 or document[r, t] != document[r, t - 1]:
                assert order[r, t] == 0
                found.append([])
            found[-1].append(position[r, t])
    return [np.array(one) for one in found]


masks = st.tuples(
    st.integers(1, 5), st.integers(1, 31), st.integers(0, 99), st.sampled_from([0.0, 0.2, 0.9])
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(masks, names, packings, st.integers(0, 2**62), st.integers(0, 10**9))
def test_order_document_and_layout_follow_packing(mask, name, packing, seed, step):
    rows, length, draw_seed, share = mask
    begins = windows(rows, length, draw_seed, share)
    placed = draw(name, packing, begins=begins, seed=seed, step=step)
    bare = PACKINGS[packing](begins)
    assert np.array_equal(placed.order, bare.order) and np.array_equal(
        placed.document, bare.document
    )
    assert placed.layout == bare.layout
    assert placed.position.shape in ((1, length), (rows, length))
    assert placed.position.dtype == (np.float64 if name.startswith("cape") else np.int64)
    for text in texts(placed):
        assert (np.diff(text) > 0).all()
        if placed.unit_steps:
            assert (np.diff(text) == 1).all()


@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_default_positions_equal_order(packing):
    placed = draw("plain", packing)
    assert placed.position is placed.order and placed.unit_steps


@pytest.mark.parametrize("name", EVERY)
def test_only_offset_has_unit_steps(name):
    for packing in ("concat", "intra_document"):
        assert draw(name, packing).unit_steps == (name == "random_offset")


def near(count: int, n: int, p: float) -> bool:
    """Whether a count lies within 5 standard deviations of what chance p gives in n draws."""
    return abs(count - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def test_offsets_are_uniform_and_per_document():
    begins = windows(400, 9)
    found = []
    for step in range(10):
        for text in texts(
            draw("random_offset", "intra_document", begins=begins, step=step, max_offset=4)
        ):
            assert (np.diff(text) == 1).all()
            found.append(text[0])
    assert set(found) == set(range(5))
    assert all(near(found.count(k), len(found), 1 / 5) for k in range(5))


def test_samples_of_adjacent_rows_are_independent():
    """Rows, documents, steps and seeds one apart agree as often as chance has it."""
    begins = np.ones((300, 8), dtype=bool)  # eight texts of one token a row

    def drawn(seed: int, step: int) -> np.ndarray:
        keys = {"begins": begins, "seed": seed, "step": step, "max_offset": 9}
        return draw("random_offset", "intra_document", **keys).position

    by = np.array(
        [[drawn(seed, step) for step in range(3)] for seed in range(3)]
    )  # seed, step, row, document
    for axis in range(4):
        same = np.diff(by, axis=axis) == 0
        assert near(int(same.sum()), same.size, 1 / 10), axis


def test_subsets_are_uniform():
    """Of the ten subsets of two out of five, each comes one time in ten."""
    begins = np.zeros((3000, 2), dtype=bool)
    found = [
        tuple(map(int, text)) for text in texts(draw("random_subset", begins=begins, max_length=5))
    ]
    assert set(found) == set(itertools.combinations(range(5), 2))
    assert all(near(found.count(pair), len(found), 1 / 10) for pair in set(found))


def test_order_statistics_of_a_large_subset():
    """The i-th of n out of M is (i+1)(M+1)/(n+1) − 1 on average."""
    n = 19
    limit = 1000
    position = draw("random_subset", begins=windows(2000, n), max_length=limit).position
    assert position.min() >= 0 and position.max() < limit
    expected = (np.arange(n) + 1) * (limit + 1) / (n + 1) - 1
    error = position.std(axis=0) / len(position) ** 0.5
    assert (np.abs(position.mean(axis=0) - expected) < 5 * error).all()


def test_full_subset_is_identity():
    position = draw("random_subset", begins=windows(3, 19), max_length=19).position
    assert np.array_equal(position, np.broadcast_to(np.arange(19), (3, 19)))


def test_subset_per_batch_or_per_document():
    begins = np.zeros((4, 12), dtype=bool)
    begins[:, 6] = True
    for packing, each in (("concat", 4), ("intra_document", 8)):
        per_row = texts(draw("random_subset", packing, begins=begins))
        assert len({tuple(text) for text in per_row}) == each
        per_batch = texts(draw("random_subset-batch", packing, begins=begins))
        assert len({tuple(text) for text in per_batch}) == 1
        again = texts(draw("random_subset-batch", packing, begins=begins, step=1))
        assert tuple(again[0]) != tuple(per_batch[0])


@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_pose_skip_is_single_and_bounded(packing):
    target = 71
    found = texts(draw("pose", packing, begins=windows(500, 19), target=target))
    for text in found:
        n = len(text)
        steps = np.diff(text)
        assert text[0] == 0 and text[-1] < target
        leaps = np.flatnonzero(steps != 1)
        assert len(leaps) <= 1
        if len(leaps):
            assert 1 <= leaps[0] + 1 <= (n + 1) // 2
            assert 1 <= steps[leaps[0]] - 1 <= target - n


def test_pose_cuts_and_skips_are_uniform():
    # cuts 1 ... 3, leaps 0 ... 2
    n = 5
    target = 7
    found = texts(draw("pose", begins=np.zeros((4000, n), dtype=bool), target=target))
    leaps = [int(text[-1]) - (n - 1) for text in found]
    assert all(near(leaps.count(k), 4000, 1 / 3) for k in range(3)) and len(set(leaps)) == 3
    cuts = [int(np.argmax(np.diff(text) > 1)) + 1 for text in found if text[-1] > n - 1]
    assert all(near(cuts.count(k), len(cuts), 1 / 3) for k in (1, 2, 3)) and len(set(cuts)) == 3


def test_cape_jitter_is_bounded_and_keeps_order():
    jitter = 0.49
    placed = draw("cape", begins=windows(500, 19), global_shift=0, local_shift=jitter, scale=1)
    off = placed.position - np.arange(19)
    assert np.abs(off).max() <= jitter and off.min() < -0.98 * jitter and off.max() > 0.98 * jitter
    assert abs(off.mean()) < 5 * jitter / 3**0.5 / off.size**0.5
    assert (np.diff(placed.position, axis=1) > 0).all()
    corner = np.corrcoef(off[:, :-1].ravel(), off[:, 1:].ravel())[0, 1]
    assert abs(corner) < 5 / off.size**0.5  # one draw for each token


def test_cape_shift_is_uniform_and_per_document():
    for packing in ("concat", "intra_document"):
        found = texts(
            draw("cape", packing, begins=windows(800, 19), global_shift=7.5, local_shift=0, scale=1)
        )
        shifts = []
        for text in found:
            assert np.ptp(text - np.arange(len(text))) < 1e-12
            shifts.append(text[0])
        assert max(np.abs(shifts)) <= 7.5 and min(shifts) < -7.4 and max(shifts) > 7.4
        assert abs(np.std(shifts) - 7.5 / 3**0.5) < 0.3  # of an even distribution


def test_cape_scale_is_log_uniform_and_applied_last():
    position = draw(
        "cape", begins=windows(800, 19), global_shift=0, local_shift=0, scale=3
    ).position
    factors = position[:, 1]
    assert np.allclose(position, factors[:, None] * np.arange(19), rtol=1e-14, atol=0)
    logs = np.log(factors) / np.log(3)
    assert np.abs(logs).max() <= 1 and logs.min() < -0.98 and logs.max() > 0.98
    assert abs(logs.mean()) < 5 / 3**0.5 / 800**0.5 and abs(logs.std() - 1 / 3**0.5) < 0.05
    both = draw("cape", begins=windows(800, 19), global_shift=7.5, local_shift=0, scale=3).position
    assert np.abs(both[:, 0]).max() > 7.5 * 1.5  # the shift is scaled as well


def test_cape_centers_each_document_before_shift():
    found = texts(
        draw("cape", "intra_document", global_shift=0, local_shift=0, scale=2, center=True)
    )
    assert len({len(text) for text in found}) > 3
    assert all(abs(text.mean()) < 1e-12 for text in found)
    shifted = texts(
        draw("cape", "intra_document", global_shift=5, local_shift=0, scale=1, center=True)
    )
    assert max(abs(text.mean()) for text in shifted) > 2


@hypothesis_settings(max_examples=40, deadline=None)
@given(names, packings, st.integers(0, 50), st.permutations(range(6)), st.integers(1, 6))
def test_row_is_deterministic(name, packing, step, rows, share):
    begins = windows(6, 19)
    some = np.array(rows[:share])
    whole = draw(name, packing, begins=begins, step=step).position
    part = draw(name, packing, begins=begins[some], rows=some, step=step).position
    assert np.array_equal(np.broadcast_to(part, (share, 19)), np.broadcast_to(whole, (6, 19))[some])


@hypothesis_settings(max_examples=25, deadline=None)
@given(stores, st.integers(2, 13), st.integers(0, 30), names, packings)
def test_positions_are_independent_of_ranks_micro_batches_and_resume(
    lengths, train_length, step, name, packing
):
    store = make_store(lengths)

    def fresh(sampler: str = name) -> BatchSampler:
        plan = [Segment(train_length, 6)]
        return BatchSampler(store, plan, packing=packing, seed=11, positions=chosen(sampler))

    def rows(batch) -> torch.Tensor:
        return batch.position.expand(batch.tokens.shape)

    running = fresh()
    for earlier in range(max(0, step - 2), step):
        running.batch(earlier)
    whole = running.batch(step)
    bare = fresh("plain").batch(step)
    for other in ("tokens", "targets", "order", "document"):
        assert torch.equal(getattr(whole, other), getattr(bare, other))
    assert (whole.n_targets, whole.hash, whole.layout) == (bare.n_targets, bare.hash, bare.layout)
    if packing == "concat":  # where the text does not matter
        here = draw(
            name, begins=np.zeros((6, train_length), dtype=bool), seed=11, step=step
        ).position
        assert np.array_equal(rows(whole), np.broadcast_to(here, whole.tokens.shape))
    for world in (2, 3):
        parts = [fresh().batch(step, rank, world) for rank in range(world)]  # as after a resume
        assert torch.equal(torch.cat([rows(part) for part in parts]), rows(whole))
        for part in [*parts, whole]:
            top = float(part.position.max())
            assert part.position_end - 1 >= top and (
                part.position_end - 2 < top or part.position_end == 1
            )
            assert part.position_end <= chosen(name).position_end(train_length)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("random_offset", "bdb43a5c"),
        ("random_subset", "42a3bb06"),
        ("random_subset-batch", "d9e9e6d8"),
        ("cape", "08b1a972"),
        ("pose", "e097214a"),
    ],
)
def test_golden_samples(name, expected):
    """Runs are resumed over years. Reals are compared to nine digits: exp may differ in the last one."""
    begins = np.arange(6 * 19).reshape(6, 19) % 7 == 3
    position = draw(name, "intra_document", begins=begins, seed=3, step=5).position
    text = " ".join(f"{p:.9g}" for p in position.ravel())
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == expected


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "random_subset",
            {"max_length": 8},
            r"data.positions.max_length = 8 .* train_length = 9.* at least 9",
        ),
        ("pose", {"target": 8}, r"data.positions.target = 8 .* train_length = 9"),
    ],
)
def test_range_shorter_than_window_is_rejected(name, keys, message):
    with pytest.raises(DataError, match=message):
        BatchSampler(
            make_store([40]),
            [Segment(9, 1)],
            packing="concat",
            seed=0,
            positions=chosen(name, **keys),
        )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("cape", {"local_shift": 0.5}),
        ("cape", {"scale": 0.99}),
        ("cape", {"global_shift": -1}),
        ("random_offset", {"max_offset": 0}),
        ("random_subset", {"per": "token"}),
        ("shape", {"max_offset": 3}),
    ],
)
def test_invalid_settings_are_rejected(name, keys):
    with pytest.raises(ValidationError):
        chosen(name, **keys)
