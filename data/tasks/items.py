"""The base class of tasks, their items, and the random draws that generate them from names and
numbers."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from data.sampling.random_draws import NamedDraws
from data.tokenizers import Tokenizer
from errors import DataError
from settings.fields import StrictSettings, setting

CACHED = 100_000  # encodings kept
NO_TEXT = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class TaskItem:
    """One question with its context, as tokens, without BOS.

    Attributes:
        prompt: the context and the question.
        answer: the correct continuation.
        others: wrong continuations with the same number of tokens. If the task hides facts, most of
            them occur in the context as other facts; otherwise they are variations of the correct
            answer. A training item may have fewer than the task's setting.
        depth: relative position of the answer in the context, 0 at the start and 1 at the end.
        distance: tokens from the first token of the answer in the context to the end of the prompt.
    """

    prompt: list[int]
    answer: list[int]
    others: list[list[int]]
    depth: float
    distance: int


class Task(StrictSettings):
    """Base class of tasks: their settings, and the items made from them."""

    name: str
    queries: int = setting(
        1,
        "maximum number of questions per training item; evaluation asks one, as "
        "earlier ones could contain its answer",
        ge=1,
    )

    @abstractmethod
    def make(self, request: "TaskRequest") -> TaskItem:
        """Make the requested item."""


class TaskContext:
    """A task, the tokenizer of its items, and the seed. `purpose` ("training", "evaluation") is
    part of every random key, so training and evaluation items differ. Evaluation items have one
    question.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, purpose: str, seed: int):
        self.is_scored = purpose == "evaluation"
        self.task = task.model_copy(update={"queries": 1}) if self.is_scored else task
        self.purpose = purpose
        self.seed = seed
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
        """Generate item `index` with at most `length` tokens (exactly `length` if it has a
        haystack).

        The same index at another length is the same question in a longer or shorter context. For
        tasks without a haystack, where the length is the difficulty, the longer item extends the
        shorter one.

        Args:
            index: index of the item.
            length: tokens of prompt and answer together, without BOS.
            depth: position of the answer, 0 (far from the question) to 1 (just before it).
            haystack: at least `length` tokens of text, for tasks that use a haystack.

        Raises:
            DataError: no item fits the length, or the tokenizer cannot encode comparable wrong
                answers.
        """
        return self.task.make(TaskRequest(self, index, length, depth, haystack))


@dataclass(frozen=True)
class TaskRequest:
    """The parameters of one item; see `TaskContext.item`. The required number of haystack tokens is
    taken from the end, so a longer item extends towards the start.
    """

    context: TaskContext
    index: int
    length: int
    depth: float
    haystack: np.ndarray

    @cached_property
    def draws(self) -> NamedDraws:
        c = self.context
        return NamedDraws("task", c.purpose, c.seed, c.task.name, self.index)

    def numbers(self, digits: int, least: int, used: int | None = None) -> list[str]:
        """Distinct numbers with `digits` digits, such as ` 417`, all encoded in the same number of
        tokens: at least `least` of them, and more if available. `used` of them (default: all) are
        facts of the item; the others are wrong answers, of which a training item, whose answers are
        not compared, may have fewer.
        """
        needed = least if used is None or self.context.is_scored else used
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

    def encode(self, text: str) -> list[int]:
        return self.context.encode(text)

    def earlier_questions(self, count: int) -> list[int]:
        """Which of `count` questions are asked, with their answers, before the last one."""
        asked = self.draws.one("asked", self.context.task.queries)
        return self.draws.below("earlier", asked, count)

    def too_short(self, least: int) -> DataError:
        return DataError(
            f"an item of {self.length} tokens is too short for the task {self.context.task.name}: "
            f"with this tokenizer it needs at least {least}; increase the length or make the task "
            "smaller"
        )
