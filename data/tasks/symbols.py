"""The base class of tasks on symbols: problems with answers, as tokens of a small vocabulary."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from data.sampling.random_draws import NamedDraws
from data.tokenizers.tokenizer import END
from errors import DataError
from settings.fields import StrictSettings, setting

EQUALS = "="  # between a problem and its answer


@dataclass(frozen=True)
class SymbolItem:
    """A problem with its answers.

    Attributes:
        symbols: all tokens, without the begin symbol.
        is_answer: of each symbol, whether the model has to predict it.
        positions: of each symbol, from 0 on; None: 0, 1, 2, ...
    """

    symbols: list[str]
    is_answer: list[bool]
    positions: list[int] | None = None

    @property
    def prompt(self) -> list[str]:
        """The symbols before the first answer."""
        return self.symbols[: self.is_answer.index(True)]


class SymbolTask(StrictSettings):
    """Base class of tasks on symbols: their settings, and the items made from them. The length of a
    problem counts what the task's description says."""

    shortest: ClassVar[int] = 1  # the smallest length
    longest: ClassVar[int | None] = None  # the largest length; None: unlimited
    has_positions: ClassVar[bool] = False  # whether items have positions other than 0, 1, 2, ...

    name: str

    @property
    def alphabet(self) -> list[str]:
        """Every symbol that items may contain, besides `<begin>` and `<end>`."""
        return [*map(str, range(self.choices)), EQUALS]

    @property
    @abstractmethod
    def choices(self) -> int:
        """The number of symbols that a uniform guess of one symbol of the answer chooses from."""

    def size(self, length: int) -> int:
        """The number of symbols of an item of this length, `<end>` included."""
        return len(example(self, length).symbols)

    @abstractmethod
    def make(self, draws: NamedDraws, length: int) -> SymbolItem:
        """The item that the random draws select."""

    def positions_of(self, prompt: Sequence[str], more: int) -> list[int]:
        """The positions of the prompt's symbols and of the next `more`."""
        return list(range(len(prompt) + more))

    def answered(self, prompt: list[str], answer: list[str]) -> SymbolItem:
        """An item with one answer, which `<end>` follows."""
        answer = [*answer, END]
        is_answer = [False] * len(prompt) + [True] * len(answer)
        positions = self.positions_of(prompt, len(answer)) if self.has_positions else None
        return SymbolItem([*prompt, *answer], is_answer, positions)

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
    """Base class of tasks that may give positions to their tokens."""

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

    def position_end(self, length: int, training: bool = False) -> int:
        """1 + the largest position in items of this length."""
        end = 1 + max(example(self, length).positions or [length - 1])
        if not training or self.max_position is None:
            return end
        if self.max_position < end - 1:
            raise DataError(
                f"max_position={self.max_position} of the task {self.name} is less than the "
                f"{end - 1} positions of an item of length {length}; increase it"
            )
        return self.max_position + 1


def example(task: SymbolTask, length: int) -> SymbolItem:
    """An item, as long as all items of this length. Raises DataError if there are none."""
    hashable: Any = task  # pydantic hashes immutable settings, which type checkers do not see
    return _example(hashable, length)


@cache
def _example(task: SymbolTask, length: int) -> SymbolItem:
    task.check([length])
    return task.make(NamedDraws("any"), length)
