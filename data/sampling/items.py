"""Task items as rows of batches.

A row is one item: inputs from the left, then padding, which is never a target. Padding follows the
item, so that no token of the item attends to it.
"""

from typing import NamedTuple

import numpy as np

from data.sampling.positions import (
    IGNORED,
    PlainPositions,
    PositionDraws,
    PositionedTokens,
)
from data.sampling.random_draws import NamedDraws, below, bits, key_of
from data.tasks import CoupledTask, SymbolItem, SymbolTask
from data.tokenizers.tokenizer import BEGIN, SymbolTokenizer


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
        random = bits(key_of(*self.key, "length"), index)
        return least + below(random, most - least + 1)

    def count(self, index: np.ndarray) -> np.ndarray:
        """Inputs of each item (n,)."""
        sizes = [self.task.size(length) for length in self.length(index).tolist()]
        return np.array(sizes) + self.bos - 1

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
        has_positions = self.task.has_positions
        for row, i in enumerate(index.tolist()):
            item = self.item(i)
            symbols = [BEGIN] * self.bos + item.symbols
            is_target = np.array([False] * self.bos + item.is_answer)
            ids = np.array([self.ids[symbol] for symbol in symbols])
            n = len(ids) - 1
            count[row] = n
            inputs[row, :n] = ids[:-1]
            targets[row, :n] = ids[1:]
            if self.answers_only:
                targets[row, :n][~is_target[1:]] = IGNORED
            if has_positions:
                position[row, self.bos : n] = self._shifted(i, item)[: n - self.bos]
        return ItemRows(inputs, targets, position if has_positions else None, count)

    def _shifted(self, index: int, item: SymbolItem) -> np.ndarray:
        """The positions of an item; in training, those above 0 begin at random."""
        positions = np.array(item.positions)
        assert isinstance(self.task, CoupledTask)
        most = self.task.max_position
        if self.is_training and most is not None:
            room = most - int(positions.max()) + 1
            positions[positions > 0] += NamedDraws(*self.key, index).one("start", room)
        return positions


def place_items(
    rows: ItemRows,
    positions: PlainPositions,
    seed: int,
    step: int,
    index: np.ndarray,
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
