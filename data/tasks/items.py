"""Task items and the inputs that generate them. Every item is a function of names and numbers."""

from dataclasses import dataclass

import numpy as np

from data.errors import DataError
from data.sampling.random_draws import below, bits, key_of
from data.tasks.settings import Task
from data.tokenizer import Tokenizer

REMEMBERED = 100_000  # cached encodings
SORTED = 4096  # sets up to this size are shuffled completely; from larger sets, distinct numbers are sampled


@dataclass(frozen=True)
class TaskItem:
    """One question with its context, as tokens, without BOS.

    Attributes:
        prompt: the context and the question.
        answer: the correct continuation.
        others: wrong continuations with the same number of tokens. If the task hides facts, most of them
            occur in the context as other facts; otherwise they are variations of the correct answer.
        depth: relative position of the answer in the context, 0 at the start and 1 at the end; None if it is
            not in the context.
        distance: tokens from the first token of the answer in the context to the end of the prompt.
    """

    prompt: list[int]
    answer: list[int]
    others: list[list[int]]
    depth: float | None = None
    distance: int | None = None


class TaskContext:
    """A task, the tokenizer of its items, and the seed. `purpose` ("training", "evaluation") is part of every
    random key, so training and evaluation items differ.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, purpose: str, seed: int):
        self.task, self.tokenizer, self.purpose, self.seed = task, tokenizer, purpose, seed
        # Text can be split where a token begins with white space: the rest is then encoded as it would be
        # alone.
        self.may_cut = np.array([piece[:1].isspace() for piece in tokenizer.pieces])
        self._spelled: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._spelled:
            if len(self._spelled) >= REMEMBERED:
                self._spelled.clear()
            self._spelled[text] = self.tokenizer.encode(text)
        return self._spelled[text]


@dataclass(frozen=True)
class TaskRequest:
    """The parameters of one item.

    Attributes:
        length: maximum tokens of prompt and answer together.
        haystack: text tokens, for tasks that use a haystack. The required number is taken from the end, so a
            longer item extends towards the start.
    """

    bench: TaskContext
    index: int
    length: int
    depth: float
    haystack: np.ndarray

    @property
    def key(self) -> tuple[str | int, ...]:
        name = getattr(self.bench.task, "name", "")
        return ("task", self.bench.purpose, self.bench.seed, name, self.index)

    def draw(self, what: str, count: int, below_what: int) -> np.ndarray:
        """(count,) integers in 0 ... below_what-1. The first n do not depend on `count`."""
        return below(bits(key_of(*self.key, what), np.arange(count)), below_what)

    def different(self, what: str, count: int, below_what: int) -> np.ndarray:
        """(count,) distinct integers in 0 ... below_what-1. The first n do not depend on `count`."""
        if below_what <= SORTED:
            return np.argsort(bits(key_of(*self.key, what), np.arange(below_what)), kind="stable")[:count]
        wanted, drawn = count, np.zeros(0, dtype=np.int64)
        while len(drawn) < count:
            wanted *= 2
            drawn = self.draw(what, wanted, below_what)
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return drawn[:count]

    def numbers(self, what: str, digits: int, least: int) -> list[str]:
        """Distinct numbers with `digits` digits, such as ` 417`, all encoded in the same number of tokens: at
        least `least` of them, and more if available.
        """
        first = 10 ** (digits - 1) if digits > 1 else 0
        room = 10**digits - first
        drawn = self.different(what, min(room, 2 * least + 4), room)
        return self.same_count([f" {first + n}" for n in drawn.tolist()], least)

    def same_count(self, texts: list[str], least: int) -> list[str]:
        """Filter `texts` to those with the most common number of tokens. Raises DataError if fewer than
        `least` remain.
        """
        sizes = np.array([len(self.encode(text)) for text in texts])
        commonest = int(np.bincount(sizes).argmax())
        kept = [text for text, size in zip(texts, sizes.tolist(), strict=True) if size == commonest]
        if len(kept) < least:
            raise DataError(
                f"only {len(kept)} of {len(texts)} answers such as {texts[0]!r} are spelled in equally many "
                f"tokens, and {least} are to be compared: compare fewer, give them more digits, or use a "
                "tokenizer that spells each digit alone"
            )
        return kept

    def encode(self, text: str) -> list[int]:
        return self.bench.encode(text)

    def encode_once(self, text: str) -> list[int]:
        """Encode text that occurs in no other item, without caching."""
        return self.bench.tokenizer.encode(text)

    def too_short(self, least: int) -> DataError:
        name = getattr(self.bench.task, "name", "")
        return DataError(
            f"an item of {self.length} tokens is too short for the task {name} as it is set: with this "
            f"tokenizer it takes {least} at least; raise the length, or make the task smaller"
        )
