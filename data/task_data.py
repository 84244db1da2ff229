"""The data of a run on task items on symbols, which are generated during training: nothing is
stored on the disk.

A row of a batch is one item: inputs from the left, then padding, which is never a target. Padding
follows the item, so that no token of the item attends to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data.data_settings import DataSettings, SymbolSource
from data.files import canonical_hash
from data.random_draws import below, bits, key_of
from data.sampling.batches import Batch, content_hash, rows_of_rank
from data.sampling.packing import IGNORED, PositionedTokens
from data.sampling.position_samplers import PLAIN, PlainPositions, PositionDraws
from data.sampling.window_order import StepRange, samples_before
from data.tasks import CoupledTask, TaskItem, TaskItems
from data.tokenizers.tokenizer_base import SymbolTokenizer
from errors import DataError

SAMPLED = 16  # items that the hash includes, so that it changes with the generator


class ItemRows(NamedTuple):
    """Items as rows of T inputs, int64."""

    inputs: np.ndarray  # (b, T)
    targets: np.ndarray  # (b, T), IGNORED where the next symbol is not to be predicted
    position: np.ndarray | None  # (b, T); None: the task does not set positions
    count: np.ndarray  # (b,) inputs of each item

    def part(self, rows: slice) -> "ItemRows":
        position = None if self.position is None else self.position[rows]
        return ItemRows(self.inputs[rows], self.targets[rows], position, self.count[rows])

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
    """The items of a run's task for one purpose: "training", "validation" or "evaluation"."""

    def __init__(self, data: "GeneratedData", purpose: str, seed: int):
        super().__init__(data.source.task, data.tokenizer, purpose, seed)
        data.source.task.check(data.source.bounds)
        self.data = data

    def lengths(self, index: np.ndarray) -> list[int]:
        """Length of the problem of each item (n,), drawn uniformly."""
        least, most = self.data.source.bounds
        random = bits(key_of(*self.key, "length"), index)
        return (least + below(random, most - least + 1)).tolist()

    def drawn(self, index: np.ndarray) -> list[TaskItem]:
        """The items with these indices (n,), each of its own length."""
        return list(map(self.item, index.tolist(), self.lengths(index)))

    def rows(
        self,
        index: np.ndarray,
        width: int | None = None,
        answers_only: bool = True,
    ) -> ItemRows:
        """The items with these indices, padded to `width` inputs, or to the number of inputs of the
        longest item.

        Args:
            answers_only: only the tokens of answers are targets.
        """
        bos = self.data.bos
        items = self.drawn(index)
        count = np.array([len(item.tokens) + bos - 1 for item in items])
        shape = (len(items), width or int(count.max()))
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORED)
        position = np.zeros_like(inputs)
        begin = [self.tokenizer.bos_id] * bos
        for row, (item, n) in enumerate(zip(items, count.tolist(), strict=True)):
            tokens = np.array([*begin, *item.tokens])
            is_target = np.array([False] * bos + item.is_answer) | (not answers_only)
            inputs[row, :n] = tokens[:-1]
            targets[row, :n] = np.where(is_target[1:], tokens[1:], IGNORED)
            if item.positions is not None:
                position[row, bos:n] = item.positions[: n - bos]
        has_positions = self.data.source.task.has_positions
        return ItemRows(inputs, targets, position if has_positions else None, count)


@dataclass(frozen=True)
class GeneratedData:
    """Task items in place of a prepared text. `bos`: each row begins with `<begin>`."""

    source: SymbolSource
    bos: bool

    @cached_property
    def tokenizer(self) -> SymbolTokenizer:
        return SymbolTokenizer(self.source.task.alphabet)

    def items(self, purpose: str, seed: int) -> SymbolItems:
        """The items for a purpose. Raises DataError for a length without problems."""
        return SymbolItems(self, purpose, seed)

    def _hash(self, purpose: str) -> str:
        rows = self.items(purpose, 0).rows(np.arange(SAMPLED), self.longest)
        content = [None if array is None else array.tolist() for array in rows]
        return canonical_hash([purpose, self.source.model_dump(mode="json"), self.bos, content])

    @cached_property
    def hash(self) -> str:
        """Hash of the training items."""
        return self._hash("training")

    @cached_property
    def valid_hash(self) -> str:
        return self._hash("validation")

    @property
    def longest(self) -> int:
        """Inputs of the longest item."""
        return self.source.inputs(self.bos)

    def facts(self) -> dict:
        """What the manifest of a run records about its data."""
        return {"data": None, "data_hash": self.hash, "valid_hash": self.valid_hash}

    def verify(self) -> None:
        """Nothing is stored that could be damaged."""

    def opening(self) -> str:
        """The problem of a held-out item, as a prompt."""
        (item,) = self.items("validation", 0).drawn(np.arange(1))
        return self.tokenizer.decode(item.prompt)

    def positions(self, ids: list[int], more: int) -> list[int]:
        """The positions that the task sets for a prompt and for the next `more` tokens. Raises
        DataError if the prompt is not a problem of the task."""
        task = self.source.task
        assert isinstance(task, CoupledTask)
        begin = [0] * (self.bos and ids[:1] == [self.tokenizer.bos_id])
        prompt = self.tokenizer.decode(ids[len(begin) :]).split()
        try:
            return begin + task.positions_of(prompt, more)
        except ValueError:
            raise DataError(
                f"the positions of the task {task.name} require a whole problem, such as "
                f"{self.opening()!r}"
            ) from None


class ItemSampler:
    """Computes the batch of each step of a run on task items, as `BatchSampler` does for text:
    items are generated as they are needed.

    Args:
        items: the training items.
        plan: the step ranges of the run.
        answers_only: only the tokens of answers are targets.
        seed: seed of random positions.
        positions: settings of the positional sampler.
    """

    def __init__(
        self,
        items: SymbolItems,
        plan: Sequence[StepRange],
        *,
        answers_only: bool,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        self.items = items
        self.answers_only = answers_only
        self.plan = plan
        self.seed = seed
        self.positions = positions
        lengths = {step_range.length for step_range in plan}
        if min(lengths) < items.data.longest or len(lengths) > 1:
            raise DataError(
                f"training.stages: every window must have train_length tokens, as items of the "
                f"task {items.task.name} do; remove the lengths of the stages"
            )

    def passes(self, steps: int) -> dict[str, float]:
        """Always empty: items are generated, so no text is read twice."""
        return {}

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        length, batch_size, first = samples_before(self.plan, step)[-1]
        rows = rows_of_rank(batch_size, rank, world)
        # All ranks generate all items, because the loss is normalized by their number of targets.
        items = self.items.rows(np.arange(first, first + batch_size), length, self.answers_only)
        own = items.part(rows)
        return Batch(
            own.inputs,
            own.targets,
            own.placed(self.positions, self.seed, step, np.arange(rows.start, rows.stop)),
            n_targets=int((items.targets != IGNORED).sum()),
            epoch=0,
            hash=content_hash(items.inputs, items.targets) if rank == 0 else "",
        )


def generated(settings: DataSettings) -> GeneratedData | None:
    """The data of settings with a task on symbols; None for text."""
    if isinstance(settings.source, SymbolSource):
        return GeneratedData(settings.source, settings.bos)
    return None
