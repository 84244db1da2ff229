"""The base class of tasks on symbols: problems with answers, as tokens of a small vocabulary."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from data.random_draws import NamedDraws
from data.tasks.task import Task, TaskItem, TaskRequest, answer_mask
from data.tokenizers.tokenizer_base import END, SymbolTokenizer
from errors import DataError
from settings.fields import setting

EQUALS = "="  # between a problem and its answer


class Problem(NamedTuple):
    """A problem with its answers, without the begin symbol. `is_answer`: whether the model has to
    predict each symbol."""

    symbols: list[str]
    is_answer: list[bool]


def answered(prompt: list[str], answer: list[str]) -> Problem:
    """A problem with one answer, which `<end>` follows."""
    answer = [*answer, END]
    return Problem([*prompt, *answer], answer_mask(prompt, answer))


class SymbolTask(Task):
    """Base class of tasks on symbols: their settings, and the items made from them. The length of a
    problem counts what the task's description says."""

    key = "items"
    shortest: ClassVar[int] = 1  # the smallest length
    longest: ClassVar[int | None] = None  # the largest length; None: unlimited
    has_positions: ClassVar[bool] = False  # whether items have positions other than 0, 1, 2, ...

    @property
    def alphabet(self) -> list[str]:
        """Every symbol that items may contain, besides `<begin>` and `<end>`."""
        return [*map(str, range(self.choices)), EQUALS]

    @property
    @abstractmethod
    def choices(self) -> int:
        """The number of symbols that a uniform guess of one symbol of the answer chooses from."""

    @abstractmethod
    def problem(self, draws: NamedDraws, length: int) -> Problem:
        """The problem that the random draws select."""

    def make(self, request: TaskRequest) -> TaskItem:
        symbols, is_answer = self.problem(request.draws, request.length)
        tokenizer = request.items.tokenizer
        assert isinstance(tokenizer, SymbolTokenizer)
        return TaskItem([tokenizer.ids[symbol] for symbol in symbols], is_answer)

    def size(self, length: int) -> int:
        """The number of symbols of an item of this length, including `<end>`."""
        return len(example(self, length).symbols)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise DataError if there are no problems of one of these lengths."""
        for length in lengths:
            if self.longest is not None and length > self.longest:
                raise DataError(
                    f"the task {self.name} has problems of at most {self.longest} symbols, not "
                    f"{length}; increase the number of its symbols or lower the lengths"
                )
            if length < self.shortest:
                raise DataError(
                    f"the task {self.name} has problems from length {self.shortest} on, not "
                    f"{length}; increase the lengths"
                )


class CoupledTask(SymbolTask):
    """Base class of tasks that may set the positions of their tokens."""

    positions: Literal["plain", "coupled"] = setting(
        "plain",
        "plain: 0, 1, 2, ..., or as data.positions draws them; coupled: the same "
        "position for a symbol of the problem and its symbol of the answer (arXiv:2405.20671)",
    )
    max_position: int | None = setting(
        None,
        "training items begin at a random position and end at or below this one, which "
        "should cover all evaluated lengths; null: positions begin as in evaluation",
        ge=2,
    )

    @property
    def has_positions(self):
        return self.positions != "plain"

    @abstractmethod
    def positions_of(self, prompt: Sequence[str], more: int) -> list[int]:
        """The positions of the prompt's symbols and of the next `more` symbols."""

    def item_positions(self, length: int) -> list[int]:
        """The positions in items of this length."""
        symbols, is_answer = example(self, length)
        return self.positions_of(symbols[: is_answer.index(True)], sum(is_answer))

    def make(self, request):
        item = super().make(request)
        if not self.has_positions:
            return item
        positions = np.array(self.item_positions(request.length))
        if request.items.purpose == "training" and self.max_position is not None:
            room = self.max_position - int(positions.max()) + 1
            positions[positions > 0] += request.draws.one("start", room)
        return replace(item, positions=positions.tolist())

    def position_end(self, length: int, training: bool = False) -> int:
        """1 + the largest position in items of this length."""
        end = 1 + max(self.item_positions(length))
        if not training or self.max_position is None:
            return end
        if self.max_position < end - 1:
            raise DataError(
                f"max_position={self.max_position} of the task {self.name} is less than the "
                f"{end - 1} positions of an item of length {length}; increase it"
            )
        return self.max_position + 1


def example(task: SymbolTask, length: int) -> Problem:
    """An example problem; all problems of this length have equally many symbols. Raises DataError
    if there are none."""
    hashable: Any = task  # pydantic hashes immutable settings, which type checkers do not see
    return _example(hashable, length)


@cache
def _example(task: SymbolTask, length: int) -> Problem:
    task.check([length])
    return task.problem(NamedDraws("any"), length)
