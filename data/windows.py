"""Which windows of a text a run sees, and in which order: pure functions of a plan and a seed.

A run is a row of portions, each of so many steps of windows of one length. An epoch's documents stand end to
end on a line; portions of other lengths take stretches of it one after another, each cut in windows of its
own length, so that no token is an input twice in an epoch. What is too short for a window at the end of a
line is left out: at most as many tokens as a window has, whatever the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from data.draws import permuted


class Portion(NamedTuple):
    """Steps in a row of windows of one length. The last of a run goes on for as long as it is asked."""

    length: int  # tokens of a window
    batch_size: int  # windows of a step, all ranks
    steps: int = 0


class Share(NamedTuple):
    """The samples of some steps within one portion."""

    length: int
    group: int  # of portions in a row of this length
    first: int  # number of the first sample within its group
    stop: int


class Plan:
    """The portions of a run, by step and by sample."""

    def __init__(self, portions: Sequence[Portion]):
        self.portions = tuple(portions)
        self._begins = np.cumsum([0, *(p.steps for p in self.portions[:-1])])
        lengths = [p.length for p in self.portions]
        self.lengths = [length for length, _ in groupby(lengths)]  # of each group
        self._group = [i for i, (_, row) in enumerate(groupby(lengths)) for _ in row]
        self._before, self.samples = [], [0] * len(self.lengths)  # samples of each group; of the last, no end
        for portion, group in zip(self.portions, self._group, strict=True):
            self._before.append(self.samples[group])
            self.samples[group] += portion.steps * portion.batch_size

    def at(self, step: int) -> Portion:
        """The portion of update `step` (0, 1, ...)."""
        return self.portions[self._index(step)]

    def shares(self, start: int, stop: int) -> list[Share]:
        """The samples of steps `start` ... `stop` − 1, portion by portion."""
        found = []
        while start < stop:
            i = self._index(start)
            begin, portion = int(self._begins[i]), self.portions[i]
            end = stop if i + 1 == len(self.portions) else min(stop, int(self._begins[i + 1]))
            low, high = (self._before[i] + (step - begin) * portion.batch_size for step in (start, end))
            found.append(Share(portion.length, self._group[i], low, high))
            start = end
        return found

    def _index(self, step: int) -> int:
        return int(np.searchsorted(self._begins, step, side="right")) - 1


@dataclass(frozen=True)
class Course:
    """The windows of one length that a run takes of one text: from a place on the line of an epoch on."""

    n_tokens: int  # of the whole line
    length: int
    total: int | None  # windows; None: without end
    seed: int
    epoch: int = 0
    offset: int = 0  # of the first token that is free on that line
    source: int = 0  # number of the text in a mixture

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of windows number 0, 1, ... of this course: (epoch, first token on its line), int64 each.

        The windows of one line are seen in an order drawn from the seed.
        """
        first, whole = self._on_first_line, (self.n_tokens - 1) // self.length
        line = np.where(index < first, 0, 1 + (index - first) // whole)
        starts = np.empty(len(index), dtype=np.int64)
        for k in np.unique(line).tolist():
            here, begin = line == k, first + (k - 1) * whole if k else 0
            offset, count = (0, whole) if k else (self.offset, first)
            count = count if self.total is None else min(count, self.total - begin)
            key = [self.seed, self.epoch + k, "windows"]
            key += [f"source {self.source}"] if self.source else []
            key += [f"from {offset}"] if offset else []
            starts[here] = offset + self.length * permuted(index[here] - begin, count, *key)
        return self.epoch + line, starts

    def end(self) -> tuple[int, int]:
        """(epoch, offset) of what is free after the last window."""
        assert self.total is not None
        first, whole = self._on_first_line, (self.n_tokens - 1) // self.length
        if self.total <= first:
            return self.epoch, self.offset + self.total * self.length
        lines, rest = divmod(self.total - first - 1, whole)
        return self.epoch + 1 + lines, (rest + 1) * self.length

    @property
    def _on_first_line(self) -> int:
        return (self.n_tokens - 1 - self.offset) // self.length


def courses(n_tokens: int, lengths: Sequence[int], totals: Sequence[int], seed: int, source: int = 0):
    """One Course a group of a plan, each from where the one before it ends; the last has no end."""
    found, epoch, offset = [], 0, 0
    for i, (length, total) in enumerate(zip(lengths, totals, strict=True)):
        last = i + 1 == len(lengths)
        course = Course(n_tokens, length, None if last else total, seed, epoch, offset, source)
        found.append(course)
        if not last:
            epoch, offset = course.end()
    return found
