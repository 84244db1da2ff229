"""Token stores whose tokens tell where they came from."""

import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from data import TokenStore
from data.sampling.batches import PLAIN, Batch, BatchSampler
from data.sampling.packing import PACKINGS, PositionedTokens
from data.sampling.position_samplers import PlainPositions, PositionDraws
from data.sampling.window_order import StepRange
from data.store import EncodedDocument, write_manifest, write_shard

DTYPE = np.dtype("<u4")

stores = st.lists(st.integers(1, 40), min_size=2, max_size=9).filter(
    lambda lengths: sum(lengths) > 30
)
packings = st.sampled_from(["concat", "intra_document"])


def write_store(folder: Path, documents: list, shards: list[int], dtype=DTYPE) -> TokenStore:
    """Documents of these ids, in shards of these sizes, every second one of the cluster A."""
    entries = []
    number = 0
    for shard, size in enumerate(shards):
        encoded = [
            EncodedDocument(f"d{k}", "A" if k % 2 else None, np.array(documents[k]), 3 * k, k + 5)
            for k in range(number, number + size)
        ]
        entry = write_shard(folder, f"{shard:05d}", dtype, iter(encoded))
        assert (entry is None) == (size == 0)
        entries += [entry] if entry else []
        number += size
    facts = {"tokenizer": "abc", "has_bos": True, "has_eos": False}
    write_manifest(folder, dtype, entries, source={"path": str(folder)}, **facts)
    return TokenStore(folder)


def make_store(lengths: list[int], shards: int = 3) -> TokenStore:
    """Token t of document d is 1000 * (d + 1) + t."""
    documents = [1000 * (d + 1) + np.arange(n) for d, n in enumerate(lengths)]
    sizes = [len(part) for part in np.array_split(np.arange(len(lengths)), shards)]
    folder = tempfile.TemporaryDirectory(prefix="store-")
    store = write_store(Path(folder.name), documents, sizes)
    weakref.finalize(store, folder.cleanup)
    return store


def sampler(
    store, *step_ranges: tuple, packing="concat", seed=0, positions=PLAIN, is_carried=False
) -> BatchSampler:
    """Batches of step ranges (length, batch size, steps)."""
    plan = [StepRange(*step_range) for step_range in step_ranges]
    return BatchSampler(
        store, plan, packing=packing, seed=seed, positions=positions, is_carried=is_carried
    )


def check_ranks(batch_of: Callable[[int, int], Batch], whole: Batch, worlds: Sequence[int]) -> None:
    """The rows of all ranks, batch_of(rank, world), are those of the whole batch; rank 0 hashes
    it."""
    for world in worlds:
        parts = [batch_of(rank, world) for rank in range(world)]
        arrays = []
        for batch in (*parts, whole):
            placed = batch.positions
            own = (batch.tokens, batch.targets, placed.order, placed.position, placed.document)
            arrays.append([np.broadcast_to(array, batch.tokens.shape) for array in own])
        for *own, expected in zip(*arrays, strict=True):
            assert np.array_equal(np.concatenate(own), expected)
        assert {(part.n_targets, part.epoch) for part in parts} == {(whole.n_targets, whole.epoch)}
        assert [part.hash for part in parts] == [whole.hash] + [""] * (world - 1)


def place(
    packing: str,
    positions: PlainPositions,
    begins: np.ndarray,
    *,
    seed: int,
    step: int,
    rows: np.ndarray,
) -> PositionedTokens:
    """Windows in which documents begin where `begins` (b, T) is true, placed by a sampler."""
    placed = PACKINGS[packing](begins)
    return positions.apply(placed, PositionDraws(seed, step, rows[:, None], placed.document))
