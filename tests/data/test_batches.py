"""Batches: a pure function of (seed, step), each window once per epoch, documents kept apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import DataError
from data.random_draws import permuted
from data.sampling.batches import IGNORED
from tests.data.stores import check_ranks, make_store, packings, sampler, stores


def stream_of(batches, epoch: int) -> np.ndarray:
    """The documents of an epoch end to end."""
    return batches._stream(0, epoch).read(0, batches.texts[0].store.n_tokens)


@hypothesis_settings(max_examples=15)
@given(stores, st.integers(1, 13), st.integers(1, 5), st.integers(0, 99), packings)
def test_windows_cover_each_epoch_once(lengths, length, batch_size, seed, packing):
    batches = sampler(make_store(lengths), (length, batch_size), packing=packing, seed=seed)
    n = (sum(lengths) - 1) // length
    rows = []
    for step in range(-(-2 * n // batch_size)):
        rows += batches.batch(step).tokens.tolist()
    every = [1000 * (d + 1) + t for d, m in enumerate(lengths) for t in range(m)]
    for epoch in (0, 1):
        stream = stream_of(batches, epoch)
        assert sorted(stream) == every
        expected = stream[: n * length].reshape(n, length).tolist()
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == sorted(expected)


@hypothesis_settings(max_examples=15)
@given(stores, st.integers(2, 5), st.integers(1, 4))
def test_carried_rows_read_their_part_of_the_stream(lengths, length, rows):
    """Window after window, in each epoch; order and document are those of the stream, and no
    document of another epoch or part is continued."""
    store = make_store(lengths)
    keys = {"packing": "intra_document", "is_carried": True, "seed": 3}
    batches = sampler(store, (length, rows), **keys)
    per_row = (sum(lengths) - 1) // length // rows
    for epoch in (0, 1):
        steps = [batches.batch(epoch * per_row + step) for step in range(per_row)]
        stream = stream_of(batches, epoch)[: rows * per_row * length].reshape(rows, -1)
        tokens, order, document = (
            np.concatenate([(batch.tokens, *batch.positions[:3])[i] for batch in steps], axis=1)
            for i in (0, 1, 3)
        )
        assert tokens.tolist() == stream.tolist()
        assert np.array_equal(order, tokens % 1000)
        owner = tokens // 1000
        assert np.array_equal(np.diff(document) != 0, np.diff(owner) != 0)
        assert (document // len(lengths) == epoch).all()

    def second(*ranks: int):
        return sampler(store, (length, 2 * rows), **keys).batch(1, *ranks)

    check_ranks(second, second(), worlds=[2])


@hypothesis_settings(max_examples=15)
@given(stores, st.integers(2, 13), st.integers(0, 20))
def test_packed_documents_have_separate_ids(lengths, length, step):
    batches = sampler(make_store(lengths), (length, 3), packing="intra_document", seed=2)
    batch = batches.batch(step)
    placed = batch.positions
    assert placed.layout == "packed"
    assert placed.unit_steps
    assert placed.position_end == 1 + int(placed.position.max())
    assert np.array_equal(placed.order, placed.position)
    arrays = (batch.tokens, placed.order, placed.document, batch.targets)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    for tokens, order, document, targets in rows:
        begins = [i for i in range(length) if i == 0 or tokens[i] != tokens[i - 1] + 1]
        starts = [max(begin for begin in begins if begin <= i) for i in range(length)]
        assert order == [i - start for i, start in enumerate(starts)]
        assert document == [begins.index(start) for start in starts]
        # A target is left out exactly where the document ends.
        is_end = [token % 1000 == lengths[token // 1000 - 1] - 1 for token in tokens]
        expected = zip(tokens, is_end, strict=True)
        assert targets == [IGNORED if end else token + 1 for token, end in expected]


def test_golden_order():
    """Runs are resumed over years: the order may not change with a library or by accident."""
    assert permuted(np.arange(10), 10, 3, 0, "windows").tolist() == [5, 9, 3, 6, 8, 0, 1, 4, 7, 2]
    batches = sampler(make_store([5, 7, 11, 3]), (6, 2), packing="intra_document", seed=4)
    assert batches.batch(1).hash == "41888da50c236c72"


def test_invalid_requests():
    store = make_store([5, 7])
    with pytest.raises(DataError, match=r"has 12 tokens, .* requires 13"):
        sampler(store, (4, 2, 3), (12, 1))
    keys = {"packing": "intra_document", "is_carried": True}
    with pytest.raises(DataError, match="requires 28"):
        sampler(make_store([10, 10]), (9, 3), **keys)
    with pytest.raises(DataError, match="batch size 6 is not a multiple of the 4"):
        sampler(store, (5, 6)).batch(0, 0, 4)


def test_truncated_shards_are_named_when_the_next_epoch_reads_them():
    """Reading the map of a truncated file would end the process."""
    store = make_store([9, 8, 7, 6, 5, 4], shards=1)
    batches = sampler(store, (5, 2))
    batches.batch(0)
    path = store.folder / "00000.tokens"
    good = path.read_bytes()
    path.write_bytes(good[:-4])
    with pytest.raises(DataError, match=f"{path} .*{len(good)}"):
        batches.batch((store.n_tokens - 1) // 5 // 2)
