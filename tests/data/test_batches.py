"""Batches: a pure function of (seed, step), each window once per epoch, documents kept apart."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import BatchSampler, DataError, TokenStore
from data.sampling.batches import IGNORED, permuted
from data.sampling.segments import Segment
from data.store import EncodedDocument, write_manifest, write_shard

DTYPE = np.dtype("<u4")


def make_store(lengths: list[int], shards: int = 3) -> TokenStore:
    """A store whose token t of document d is 1000 * (d + 1) + t: every token tells where it came from."""
    folder = Path(tempfile.mkdtemp(dir=make_store.root))
    entries = []
    for shard, group in enumerate(np.array_split(np.arange(len(lengths)), shards)):
        documents = (
            EncodedDocument(
                f"doc{d}", None, 1000 * (d + 1) + np.arange(lengths[d]), 2 * lengths[d], int(d)
            )
            for d in group
        )
        entry = write_shard(folder, f"{shard:05d}", DTYPE, documents)
        entries += [entry] if entry else []
    write_manifest(
        folder, DTYPE, entries, tokenizer="t", has_bos=False, has_eos=False, source={"name": "test"}
    )
    return TokenStore(folder)


@pytest.fixture(scope="module", autouse=True)
def _root(tmp_path_factory):
    make_store.root = tmp_path_factory.mktemp("stores")


def line_of(batches: BatchSampler, epoch: int) -> np.ndarray:
    """The documents of an epoch end to end, read in one go."""
    return batches._stream(0, epoch).read(0, batches.texts[0].store.n_tokens)


stores = st.lists(st.integers(1, 40), min_size=2, max_size=9).filter(
    lambda lengths: sum(lengths) > 30
)


@hypothesis_settings(max_examples=15, deadline=None)
@given(
    stores,
    st.integers(1, 13),
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from(["concat", "intra_document"]),
)
def test_windows_cover_each_epoch_once(lengths, train_length, batch_size, seed, packing):
    batches = BatchSampler(
        make_store(lengths), [Segment(train_length, batch_size)], packing=packing, seed=seed
    )
    n = (sum(lengths) - 1) // train_length
    assert batches.windows_per_epoch(train_length) == n
    rows = []
    for step in range(-(-2 * n // batch_size)):
        rows += batches.batch(step).tokens.tolist()
    for epoch in (0, 1):
        line = line_of(batches, epoch)
        assert sorted(line) == sorted(
            1000 * (d + 1) + t for d, m in enumerate(lengths) for t in range(m)
        )
        expected = [line[w * train_length : (w + 1) * train_length].tolist() for w in range(n)]
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == sorted(expected)


@hypothesis_settings(max_examples=15, deadline=None)
@given(
    stores, st.integers(2, 13), st.integers(0, 40), st.sampled_from(["concat", "intra_document"])
)
def test_ranks_split_the_same_step(lengths, train_length, step, packing):
    store = make_store(lengths)

    def fresh() -> BatchSampler:
        return BatchSampler(store, [Segment(train_length, 6)], packing=packing, seed=11)

    whole = fresh().batch(step)
    for world in (2, 3, 6):
        # Other objects, asked in another order, as after a resume on another machine.
        parts = [fresh().batch(step, rank, world) for rank in reversed(range(world))][::-1]
        for name in ("tokens", "targets"):
            assert torch.equal(
                torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)
            )
        if packing == "intra_document":
            assert torch.equal(torch.cat([part.document for part in parts]), whole.document)
        assert {part.n_targets for part in parts} == {whole.n_targets}
        assert [part.hash for part in parts] == [whole.hash] + [""] * (world - 1)
        assert {part.epoch for part in parts} == {whole.epoch}
    assert whole.n_targets == int((whole.targets != IGNORED).sum())


@hypothesis_settings(max_examples=15, deadline=None)
@given(stores, st.integers(2, 13), st.integers(0, 20))
def test_packed_documents_have_separate_ids(lengths, train_length, step):
    batch = BatchSampler(
        make_store(lengths), [Segment(train_length, 3)], packing="intra_document", seed=2
    ).batch(step)
    assert batch.layout == "packed" and batch.unit_steps
    assert batch.position_end == 1 + int(batch.position.max())
    for tokens, targets, order, position, document in zip(
        batch.tokens, batch.targets, batch.order, batch.position, batch.document, strict=True
    ):
        assert torch.equal(order, position) and order[0] == 0 and document[0] == 0
        owner = tokens // 1000
        for t in range(train_length):
            if t:
                same = owner[t] == owner[t - 1] and tokens[t] == tokens[t - 1] + 1
                assert document[t] == document[t - 1] + (not same)
                assert order[t] == (order[t - 1] + 1 if same else 0)
            assert targets[t] in (tokens[t] + 1, IGNORED)
            # A target is left out exactly where the document ends.
            ends = int(tokens[t]) % 1000 == lengths[int(owner[t]) - 1] - 1
            assert (targets[t] == IGNORED) == ends


def test_concat_window_is_one_document():
    batch = BatchSampler(make_store([5, 7, 11]), [Segment(6, 2)], packing="concat", seed=0).batch(0)
    assert batch.layout == "plain" and batch.position_end == 6 and batch.n_targets == 12
    assert batch.order.tolist() == batch.position.tolist() == [list(range(6))]
    assert batch.document.tolist() == [[0] * 6]
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_seeds_and_epochs_differ():
    store = make_store([9, 8, 7, 6, 5, 4, 3, 2] * 4)

    def order(seed: int, steps: range) -> list:
        batches = BatchSampler(store, [Segment(5, 4)], packing="concat", seed=seed)
        return [batches.batch(step).hash for step in steps]

    epoch = -(
        -BatchSampler(store, [Segment(5, 4)], packing="concat", seed=1).windows_per_epoch(5) // 4
    )
    whole = BatchSampler(store, [Segment(5, 4)], packing="concat", seed=1)
    # documents stand in another order too
    assert line_of(whole, 0).tolist() != line_of(whole, 1).tolist()
    assert order(1, range(epoch)) == order(1, range(epoch))
    assert order(1, range(epoch)) != order(2, range(epoch))
    assert not set(order(1, range(epoch - 1))) & set(order(1, range(epoch, 2 * epoch - 1)))


def test_golden_order():
    """Runs are resumed over years: the order may not change with a library or by accident."""
    assert permuted(np.arange(10), 10, 3, 0, "windows").tolist() == [5, 9, 3, 6, 8, 0, 1, 4, 7, 2]
    batch = BatchSampler(
        make_store([5, 7, 11, 3]), [Segment(6, 2)], packing="intra_document", seed=4
    ).batch(1)
    assert batch.hash == "41888da50c236c72"


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 10**9))
def test_permuted_is_a_permutation(n, key):
    image = permuted(np.arange(n), n, key)
    assert sorted(image.tolist()) == list(range(n))
    some = np.array([n - 1, 0, n // 2])
    assert permuted(some, n, key).tolist() == image[some].tolist()


def test_permutation_is_uniform():
    """Neighbors end up far apart, and every place is reached alike over many keys."""
    n = 50
    images = np.array([permuted(np.arange(n), n, key) for key in range(1000)])
    counts = np.array([np.bincount(images[:, i], minlength=n) for i in range(n)])
    chi2 = ((counts - 20) ** 2 / 20).sum(axis=1)  # 49 degrees of freedom: mean 49, sd 9.9
    assert chi2.max() < 49 + 6 * 9.9
    steps = np.abs(np.diff(images, axis=1)).mean()
    assert abs(steps - (n + 1) / 3) < 0.5  # mean distance of two places drawn at random


def test_fraction_of_truncated_documents():
    batches = BatchSampler(make_store([4, 4, 4, 4]), [Segment(8, 1)], packing="concat", seed=0)
    assert batches.cut_share(8) == 0
    batches = BatchSampler(make_store([4, 4, 4, 4]), [Segment(3, 1)], packing="concat", seed=0)
    assert batches.cut_share(3) == 1
    # By hand, in slots of 8, two windows of 3 and a rest: 0-2 and 3-5 are whole, 6-8 and 9-11 are cut.
    staged = BatchSampler(
        make_store([3] * 4), [Segment(8, 1, 1), Segment(3, 1)], packing="concat", seed=0
    )
    assert staged.cut_share(3) == 0.5


def test_invalid_requests():
    store = make_store([5, 7])
    with pytest.raises(DataError, match="has 12 tokens, fewer than the 13"):
        BatchSampler(store, [Segment(4, 2, 3), Segment(12, 1)], packing="concat", seed=0)
    with pytest.raises(DataError, match="batch size 6 is not a multiple of the 4"):
        BatchSampler(store, [Segment(5, 6)], packing="concat", seed=0).batch(0, 0, 4)
    with pytest.raises(DataError, match="packing='loose' is unknown"):
        BatchSampler(store, [Segment(5, 6)], packing="loose", seed=0)


plans = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7)), min_size=2, max_size=5
)


@hypothesis_settings(max_examples=25, deadline=None)
@given(stores, plans, st.integers(0, 99))
def test_tokens_are_unique_within_an_epoch(lengths, plan, seed):
    batches = BatchSampler(
        make_store(lengths), [Segment(*p) for p in plan], packing="concat", seed=seed
    )
    steps = sum(p[2] for p in plan)
    seen = {}
    for step in range(steps + 3):  # the last portion goes on
        expected = next(
            (p for i, p in enumerate(plan) if step < sum(q[2] for q in plan[: i + 1])), plan[-1]
        )
        (windows,) = batches.windows(step, step + 1)
        tokens = batches.batch(step).tokens
        assert tokens.shape == (expected[1], expected[0])
        for row, epoch in zip(tokens.tolist(), windows.epoch.tolist(), strict=True):
            seen.setdefault(epoch, []).extend(row)
    epochs = sorted(seen)
    assert epochs == list(range(len(epochs)))
    for epoch in epochs:
        assert len(set(seen[epoch])) == len(seen[epoch])
    slot = max(p[0] for p in plan)  # of so short a line
    rest = max(slot % p[0] for p in plan)
    n_slots = (sum(lengths) - 1) // slot
    # whole ones: ends of the line, of slots, and of what edges of portions cut
    for epoch in epochs[:-2]:
        assert sum(lengths) - len(seen[epoch]) <= slot + n_slots * rest + (len(plan) - 1) * slot
    whole = sum(len(rows) for rows in seen.values())
    assert batches.passes(steps + 3) == [whole / (sum(lengths) - 1)]


def test_stages_keep_order_before_boundary_with_random_access():
    """Stage by stage by hand, in slots of 10: 6 windows of 4 in three slots, 3 of 10, windows of 4 again."""
    store = make_store([9, 8, 7, 6, 5, 4, 3, 2] * 2)
    plan = [Segment(4, 2, 3), Segment(10, 1, 3), Segment(4, 3, 2)]
    staged = BatchSampler(store, plan, packing="intra_document", seed=5)
    starts = [(w.epoch.tolist(), w.start.tolist()) for w in staged.windows(0, 8)]
    slots = (10 * permuted(np.arange(8), 8, 5, 0, "windows")).tolist()
    assert sorted(slots) == list(range(0, 80, 10)) != slots
    assert starts[0][0] == [0] * 6 and sorted(starts[0][1]) == sorted(
        s + part for s in slots[:3] for part in (0, 4)
    )
    assert starts[1] == ([0] * 3, slots[3:6])
    epochs, first = starts[2]
    assert epochs == [0] * 4 + [1] * 2 and sorted(first[:4]) == sorted(
        s + part for s in slots[6:] for part in (0, 4)
    )
    hashes = [staged.batch(step).hash for step in range(10)]
    for step in (9, 3, 2, 6, 0):
        fresh = BatchSampler(store, plan, packing="intra_document", seed=5)
        assert fresh.batch(step).hash == hashes[step]
        if staged.plan.at(step).batch_size == 3:
            parts = [fresh.batch(step, rank, 3) for rank in range(3)]
            assert torch.equal(
                torch.cat([part.tokens for part in parts]), staged.batch(step).tokens
            )
    assert hashes[6:8] != [
        BatchSampler(store, plan, packing="intra_document", seed=6).batch(s).hash for s in (6, 7)
    ]


def test_third_stage_continues_after_second():
    """In slots of 7: four windows of 5, two of 7, then windows of 3, two of a slot, all of one line."""
    batches = BatchSampler(
        make_store([50, 31]),
        [Segment(5, 4, 1), Segment(7, 2, 1), Segment(3, 5)],
        packing="concat",
        seed=1,
    )
    starts = [windows.start.tolist() for windows in batches.windows(0, 4)]
    slots = (7 * permuted(np.arange(11), 11, 1, 0, "windows")).tolist()
    assert starts[:2] == [slots[:4], slots[4:6]]
    assert sorted(starts[2]) == sorted(s + part for s in slots[6:] for part in (0, 3)) != starts[2]
