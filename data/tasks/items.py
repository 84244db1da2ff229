"""What an item is, and what a task is given to make one: everything is a function of names and numbers."""

from dataclasses import dataclass

import numpy as np

from data.draws import below, bits, key_of
from data.errors import DataError
from data.tasks.settings import Task
from data.tokenizer import Tokenizer

REMEMBERED = 100_000  # spellings
SORTED = 4096  # numbers that are put in a random order as a whole; of more, the different ones are picked


@dataclass(frozen=True)
class Item:
    """One question with its context, as tokens, without BOS.

    Attributes:
        prompt: the context and the question.
        answer: the right continuation.
        others: wrong continuations of as many tokens; what they hold stands in the context too, where the
            task hides something, and is made from the right one elsewhere.
        depth: where the answer stands in the context, 0 at its beginning and 1 at its end; None where it
            stands nowhere.
        distance: tokens from where the answer stands to where it is asked for (first token to first token).
    """

    prompt: list[int]
    answer: list[int]
    others: list[list[int]]
    depth: float | None = None
    distance: int | None = None


class Bench:
    """A task, the tokenizer its items are spelled in, and the seed. `purpose` ("training", "evaluation") is
    part of every draw, so that items made for one are never made for the other."""

    def __init__(self, task: Task, tokenizer: Tokenizer, purpose: str, seed: int):
        self.task, self.tokenizer, self.purpose, self.seed = task, tokenizer, purpose, seed
        # Text can be cut where a token begins with white space: what follows is spelled as it would be alone.
        self.may_cut = np.array([piece[:1].isspace() for piece in tokenizer.pieces])
        self._spelled: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._spelled:
            if len(self._spelled) >= REMEMBERED:
                self._spelled.clear()
            self._spelled[text] = self.tokenizer.encode(text)
        return self._spelled[text]


@dataclass(frozen=True)
class Ask:
    """One item that is wanted. length: tokens of prompt and answer together, at most. haystack: tokens of
    text, for tasks that read some; as many as are needed are taken from its end, so that a longer item
    grows towards its beginning."""

    bench: Bench
    index: int
    length: int
    depth: float
    haystack: np.ndarray

    @property
    def key(self) -> tuple[str | int, ...]:
        name = getattr(self.bench.task, "name", "")
        return ("task", self.bench.purpose, self.bench.seed, name, self.index)

    def draw(self, what: str, count: int, below_what: int) -> np.ndarray:
        """(count,) integers of 0 ... below_what-1; the first n of them do not depend on how many follow."""
        return below(bits(key_of(*self.key, what), np.arange(count)), below_what)

    def different(self, what: str, count: int, below_what: int) -> np.ndarray:
        """(count,) integers of 0 ... below_what-1, no two equal; the first n do not depend on `count`."""
        if below_what <= SORTED:
            return np.argsort(bits(key_of(*self.key, what), np.arange(below_what)), kind="stable")[:count]
        wanted, drawn = count, np.zeros(0, dtype=np.int64)
        while len(drawn) < count:
            wanted *= 2
            drawn = self.draw(what, wanted, below_what)
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return drawn[:count]

    def numbers(self, what: str, digits: int, least: int) -> list[str]:
        """` 417` and the like: different numbers of so many digits, all spelled in equally many tokens, at
        least `least` of them, and more where there are as many."""
        first = 10 ** (digits - 1) if digits > 1 else 0
        room = 10**digits - first
        drawn = self.different(what, min(room, 2 * least + 4), room)
        return self.same_count([f" {first + n}" for n in drawn.tolist()], least)

    def same_count(self, texts: list[str], least: int) -> list[str]:
        """Those of `texts` that are spelled in the commonest number of tokens; DataError where they are fewer
        than `least`."""
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
        """Tokens of a text that no other item holds, and that is not worth remembering."""
        return self.bench.tokenizer.encode(text)

    def too_short(self, least: int) -> DataError:
        name = getattr(self.bench.task, "name", "")
        return DataError(
            f"an item of {self.length} tokens is too short for the task {name} as it is set: with this "
            f"tokenizer it takes {least} at least; raise the length, or make the task smaller"
        )
