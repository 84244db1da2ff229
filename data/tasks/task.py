"""The base class of tasks, their items, and the random draws that generate them from names and
numbers."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from data.random_draws import NamedDraws
from data.tokenizers import Tokenizer
from errors import DataError
from settings.fields import StrictSettings

CACHED = 100_000  # maximum number of cached encodings
NO_TEXT = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class TaskItem:
    """A question, or several, with their answers as tokens, without BOS.

    Attributes:
        tokens: all tokens of the item.
        is_answer: whether the model has to predict each token.
        positions: position of each token, from 0 on; None: 0, 1, 2, ...
        others: wrong continuations of the prompt, as long as the answer; none for tasks on symbols.
            If the task hides facts, most of them occur in the context as other facts; otherwise
            they are variations of the correct answer. A training item may have fewer than the
            task's setting.
        distance: tokens from the first token of the answer in the context to the end of the prompt.
    """

    tokens: list[int]
    is_answer: list[bool]
    positions: list[int] | None = None
    others: list[list[int]] = field(default_factory=list)
    distance: int = 0

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer."""
        return self.tokens[: self.is_answer.index(True)]

    @property
    def answer(self) -> list[int]:
        """The tokens from the first answer on."""
        return self.tokens[self.is_answer.index(True) :]


def answer_mask(prompt: Sequence, answer: Sequence) -> list[bool]:
    """`is_answer` of an item with one answer, at its end."""
    return [False] * len(prompt) + [True] * len(answer)


class Task(StrictSettings):
    """Base class of tasks: their settings, and the items made from them."""

    key: ClassVar[str]  # the beginning of the key of all random draws

    name: str

    def scored(self) -> "Task":
        """The task whose items are evaluated."""
        return self

    @abstractmethod
    def make(self, request: "TaskRequest") -> TaskItem:
        """Make the requested item."""


class TaskItems:
    """The items of a task, encoded by a tokenizer. `purpose` ("training", "validation",
    "evaluation") and `seed` are part of every random key, so training and evaluation items differ.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, purpose: str, seed: int):
        self.task = task.scored() if purpose == "evaluation" else task
        self.tokenizer = tokenizer
        self.purpose = purpose
        self.key = (task.key, purpose, seed, task.name)
        # Text can be split where a token begins with white space: the rest is then encoded as it
        # would be alone.
        self.may_cut = np.array([piece[:1].isspace() for piece in tokenizer.pieces])
        self.encode = lru_cache(maxsize=CACHED)(tokenizer.encode)

    def item(
        self,
        index: int,
        length: int,
        depth: float = 0.0,
        haystack: np.ndarray = NO_TEXT,
    ) -> TaskItem:
        """Generate item `index`.

        In text, the same index at another length is the same question in a longer or shorter
        context. For tasks without a haystack, where the length is the difficulty, the longer item
        extends the shorter one.

        Args:
            index: index of the item.
            length: in text, tokens of prompt and answer together, without BOS: exactly this many
                with a haystack, otherwise at most this many. On symbols, the length of the problem.
            depth: position of the answer, 0 (far from the question) to 1 (just before it).
            haystack: at least `length` tokens of text, for tasks that use a haystack.

        Raises:
            DataError: no item fits the length, or the tokenizer cannot encode comparable wrong
                answers.
        """
        return self.task.make(TaskRequest(self, index, length, depth, haystack))


@dataclass(frozen=True)
class TaskRequest:
    """The parameters of one item; see `TaskItems.item`. The required number of haystack tokens is
    taken from the end, so a longer item extends towards the start.
    """

    items: TaskItems
    index: int
    length: int
    depth: float
    haystack: np.ndarray

    @cached_property
    def draws(self) -> NamedDraws:
        return NamedDraws(*self.items.key, self.index)

    def encode(self, text: str) -> list[int]:
        return self.items.encode(text)

    def numbers(self, digits: int, least: int, used: int | None = None) -> list[str]:
        """Distinct numbers with `digits` digits, such as ` 417`, all encoded in the same number of
        tokens: at least `least` of them, and more if available. `used` of them (default: all) are
        facts of the item; the others are wrong answers, of which a training item, whose answers are
        not compared, may have fewer.
        """
        is_compared = self.items.purpose == "evaluation"
        needed = least if used is None or is_compared else used
        first = 10 ** (digits - 1) if digits > 1 else 0
        room = 10**digits - first
        drawn = self.draws.distinct("values", min(room, 2 * least + 4), room)
        return self.same_count([f" {first + n}" for n in drawn], needed)

    def same_count(self, texts: list[str], least: int) -> list[str]:
        """Filter `texts` to those with the most common number of tokens. Raises DataError if fewer
        than `least` remain.
        """
        sizes = [len(self.encode(text)) for text in texts]
        common = np.bincount(sizes).argmax()
        kept = [text for text, size in zip(texts, sizes, strict=True) if size == common]
        if len(kept) < least:
            raise DataError(
                f"only {len(kept)} of {len(texts)} answers such as {texts[0]!r} have the same "
                f"number of tokens, but {least} are compared; compare fewer, or use more digits "
                "per answer"
            )
        return kept
