"""Task items on symbols as rows of batches.

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
from data.sampling.random_draws import below, bits, key_of
from data.tasks import SymbolTask, TaskItem, TaskItems
from data.tokenizers.tokenizer import SymbolTokenizer


class ItemRows(NamedTuple):
    """Items as rows of T inputs, int64."""

    inputs: np.ndarray  # (b, T)
    targets: np.ndarray  # (b, T), IGNORED where the next symbol is not to be predicted
    position: np.ndarray | None  # (b, T), of tasks that give positions
    count: np.ndarray  # (b,) inputs of each item

    def part(self, rows: slice) -> "ItemRows":
        return ItemRows(*(None if x is None else x[rows] for x in self))

    def placed(
        self,
        positions: PlainPositions,
        seed: int,
        step: int,
        index: np.ndarray,
    ) -> PositionedTokens:
        """Order, position and document (−1: padding); `index` (b,) selects the random draws of each
        item."""
        line = np.arange(self.inputs.shape[1])[None]
        is_padding = (line >= self.count[:, None]).astype(np.int64)
        placed = PositionedTokens(line, line, is_padding, "plain", unit_steps=True)
        if self.position is None:
            placed = positions.apply(placed, PositionDraws(seed, step, index[:, None], is_padding))
        else:
            placed = placed._replace(position=self.position, unit_steps=False)
        return placed._replace(document=-is_padding)


class SymbolItems(TaskItems):
    """The items of a task on symbols.

    Args:
        lengths: minimum and maximum of the problems, drawn uniformly.
        purpose: "training", "validation" or "evaluation", which have different items.
        seed: of the items.
        bos: begin each row with `<begin>`.
    """

    task: SymbolTask

    def __init__(
        self,
        task: SymbolTask,
        lengths: tuple[int, int],
        *,
        purpose: str,
        seed: int,
        bos: bool,
    ):
        super().__init__(task, SymbolTokenizer(task.alphabet), purpose, seed)
        task.check(lengths)
        self.lengths = lengths
        self.bos = bos

    @property
    def width(self) -> int:
        """Inputs of the longest item."""
        return self.task.size(self.lengths[1]) + self.bos - 1

    def length(self, index: int) -> int:
        """Length of the problem of item `index`."""
        least, most = self.lengths
        random = bits(key_of(*self.key, "length"), np.array([index]))
        return least + below(random, most - least + 1).item()

    def drawn(self, index: int) -> TaskItem:
        """Item `index`, of its own length."""
        return self.item(index, self.length(index))

    def rows(
        self,
        index: np.ndarray,
        width: int | None = None,
        answers_only: bool = True,
    ) -> ItemRows:
        """The items with these indices, padded to `width` inputs, or to those of the longest.

        Args:
            answers_only: other tokens are no targets.
        """
        items = [self.drawn(i) for i in index.tolist()]
        count = np.array([len(item.tokens) + self.bos - 1 for item in items])
        shape = (len(items), width or int(count.max()))
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORED)
        position = np.zeros_like(inputs)
        begin = [self.tokenizer.bos_id] * self.bos
        for row, (item, n) in enumerate(zip(items, count.tolist(), strict=True)):
            tokens = np.array([*begin, *item.tokens])
            is_target = np.array([False] * self.bos + item.is_answer) | (not answers_only)
            inputs[row, :n] = tokens[:-1]
            targets[row, :n] = np.where(is_target[1:], tokens[1:], IGNORED)
            if item.positions is not None:
                position[row, self.bos : n] = item.positions[: n - self.bos]
        return ItemRows(inputs, targets, position if self.task.has_positions else None, count)
