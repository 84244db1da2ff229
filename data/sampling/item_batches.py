"""Batches of task items, generated as they are needed: a pure function of (seed, step).

A row is one item: inputs from the left, then padding, which is never a target. Padding follows the
item, so that no token of the item attends to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.sampling.batches import Batch, BatchSampler, content_hash, make_batch, rows_of_rank
from data.sampling.positions import IGNORED, PLAIN, PlainPositions, PositionDraws, PositionedTokens
from data.sampling.random_draws import NamedDraws, below, bits, key_of
from data.sampling.segments import Segment, SegmentPlan
from data.tasks import SymbolItem, SymbolTask
from data.tokenizers.tokenizer import BEGIN, SymbolTokenizer
from errors import DataError


class ItemRows(NamedTuple):
    """Items as rows of T inputs, int64."""

    inputs: np.ndarray  # (b, T)
    targets: np.ndarray  # (b, T), IGNORED where the next symbol is not to be predicted
    position: np.ndarray | None  # (b, T), of tasks that give positions
    count: np.ndarray  # (b,) inputs of each item


class SymbolItems:
    """The items of a task.

    Args:
        lengths: minimum and maximum of the problems, drawn uniformly.
        purpose: "training", "validation" or "evaluation", which have different items.
        seed: of the items.
        bos: begin each item with `<begin>`.
    """

    def __init__(
        self,
        task: SymbolTask,
        lengths: tuple[int, int],
        *,
        purpose: str,
        seed: int,
        bos: bool,
    ):
        task.check(lengths)
        self.task = task
        self.lengths = lengths
        self.key = ("items", purpose, seed, task.name)
        self.bos = bos
        self.answers_only = True  # other symbols are no targets
        self.is_training = purpose == "training"
        self.ids = SymbolTokenizer(task.alphabet).ids

    @property
    def width(self) -> int:
        """Inputs of the longest item."""
        return self.task.size(self.lengths[1]) + self.bos - 1

    def length(self, index: np.ndarray) -> np.ndarray:
        """Length of the problem of each item (n,)."""
        least, most = self.lengths
        return least + below(bits(key_of(*self.key, "length"), index), most - least + 1)

    def count(self, index: np.ndarray) -> np.ndarray:
        """Inputs of each item (n,)."""
        return np.array([self.task.size(n) for n in self.length(index).tolist()]) + self.bos - 1

    def item(self, index: int) -> SymbolItem:
        """Item `index`, without the begin symbol."""
        (length,) = self.length(np.array([index])).tolist()
        return self.task.make(NamedDraws(*self.key, index), length)

    def rows(self, index: np.ndarray, width: int) -> ItemRows:
        """The items with these indices, padded to `width` inputs."""
        inputs = np.zeros((len(index), width), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        position = np.zeros_like(inputs)
        count = np.zeros_like(index)
        begin = [BEGIN] * self.bos
        for row, i in enumerate(index.tolist()):
            item = self.item(i)
            ids = np.array([self.ids[symbol] for symbol in [*begin, *item.symbols]])
            n = len(ids) - 1
            is_target = np.array([False] * self.bos + item.is_answer)[1:]
            inputs[row, :n] = ids[:-1]
            targets[row, :n] = np.where(is_target | (not self.answers_only), ids[1:], IGNORED)
            if self.task.has_positions:
                position[row, self.bos : n] = self._shifted(i, item)[: n - self.bos]
            count[row] = n
        return ItemRows(inputs, targets, position if self.task.has_positions else None, count)

    def _shifted(self, index: int, item: SymbolItem) -> np.ndarray:
        """The positions of an item; in training, those above 0 begin at random."""
        positions = np.array(item.positions)
        most = self.task.max_position
        if self.is_training and most is not None:
            room = most - int(positions.max()) + 1
            start = int(NamedDraws(*self.key, index).below("start", 1, room)[0])
            positions[positions > 0] += start
        return positions


def place_items(
    rows: ItemRows, positions: PlainPositions, seed: int, step: int, index: np.ndarray
) -> PositionedTokens:
    """Order, position and document (−1: padding) of items; `index` (b,) selects the random draws
    of each."""
    line = np.arange(rows.inputs.shape[1])[None]
    is_padding = (line >= rows.count[:, None]).astype(np.int64)
    placed = PositionedTokens(line, line, is_padding, "plain", unit_steps=True)
    if rows.position is None:
        placed = positions.apply(placed, PositionDraws(seed, step, index[:, None], is_padding))
    else:
        placed = placed._replace(position=rows.position, unit_steps=False)
    return placed._replace(document=-is_padding)


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
        return np.concatenate(
            [np.arange(part.first, part.stop) for part in self.plan.shares(start, stop)]
        )

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
