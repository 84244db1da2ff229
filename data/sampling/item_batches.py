"""Batches of task items, generated as they are needed: a pure function of (seed, step)."""

from collections.abc import Sequence

import numpy as np

from data.sampling.batches import Batch, BatchSampler, content_hash, make_batch, rows_of_rank
from data.sampling.items import ItemRows, SymbolItems, place_items
from data.sampling.positions import IGNORED, PLAIN, PlainPositions, PositionedTokens
from data.sampling.segments import Segment, SegmentPlan
from errors import DataError


class ItemSampler:
    """Computes the batch of each step of a run on task items, as `BatchSampler` does for text.

    Args:
        items: those of training.
        plan: the segments of the run.
        seed: seed of random positions.
        positions: settings of the positional sampler.
    """

    def __init__(
        self,
        items: SymbolItems,
        plan: Sequence[Segment],
        *,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        self.items = items
        self.plan = SegmentPlan(plan)
        self.seed = seed
        self.positions = positions
        if min(self.plan.lengths) < self.items.width or len(self.plan.lengths) > 1:
            raise DataError(
                f"training.stages: every window must have train_length tokens, as items of the "
                f"task {items.task.name} do; remove the lengths of the stages"
            )

    def passes(self, done: int) -> dict[str, float]:
        """No text is repeated."""
        return {}

    @property
    def has_plain_positions(self) -> bool:
        """Whether positions are 0, 1, 2, ... in every item."""
        return self.positions.name == "plain" and not self.items.task.has_positions

    def text_lengths(self, start: int, stop: int) -> np.ndarray:
        """The number of items with each number of inputs in steps `start` ... `stop` − 1 of one
        segment: (T + 1,) int64."""
        counts = self.items.count(self._index(start, stop))
        return np.bincount(counts, minlength=self.plan.at(start).length + 1)

    def _index(self, start: int, stop: int) -> np.ndarray:
        parts = self.plan.shares(start, stop)
        return np.concatenate([np.arange(part.first, part.stop) for part in parts])

    def positioned(self, step: int) -> PositionedTokens:
        """Order, position and document of the inputs of a step, for all ranks."""
        index = self._index(step, step + 1)
        rows = self.items.rows(index, self.plan.at(step).length)
        return place_items(rows, self.positions, self.seed, step, np.arange(len(index)))

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        mine = rows_of_rank(self.plan.at(step).batch_size, rank, world)
        index = self._index(step, step + 1)
        # All ranks generate all items, as the loss is normalized by their number of targets.
        rows = self.items.rows(index, self.plan.at(step).length)
        own = ItemRows(*(None if x is None else x[mine] for x in rows))
        number = np.arange(len(index))[mine]
        return make_batch(
            own.inputs,
            own.targets,
            place_items(own, self.positions, self.seed, step, number),
            n_targets=int((rows.targets != IGNORED).sum()),
            hash=content_hash(rows.inputs, rows.targets) if rank == 0 else "",
        )


RunSampler = BatchSampler | ItemSampler
