"""Which windows of a text a run sees, and in which order: pure functions of a plan and a seed.

A run is a row of portions, each of so many steps of windows of one length. An epoch's documents stand end to
end on a line; portions of other lengths take stretches of it one after another, each cut in windows of its
own length, so that no token is an input twice in an epoch. What is too short for a window at the end of a
line is left out: at most as many tokens as a window has, whatever the plan.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from threading import Lock
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


class Course:
    """The windows of one length that a run takes of one text: from a place on one of its lines on.

    Args:
        tokens: of the line of each epoch; asked for no earlier than its windows are.
        length: of a window.
        total: windows; None: without end.
        seed: of their order.
        epoch, offset: the first line, and the first token of it that is free.
        source: number of the text in a mixture.
    """

    def __init__(
        self,
        tokens: Callable[[int], int],
        length: int,
        total: int | None,
        seed: int,
        epoch: int = 0,
        offset: int = 0,
        source: int = 0,
    ):
        self.tokens, self.length, self.total, self.seed = tokens, length, total, seed
        self.epoch, self.offset, self.source = epoch, offset, source
        self._firsts = [0]  # number of the first window of each line, and of what follows
        self._growing = Lock()  # a step is read ahead while the ledger counts those before it

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of windows number 0, 1, ... of this course: (epoch, first token on its line), int64 each.

        The windows of one line are seen in an order drawn from the seed.
        """
        firsts = np.array(self._upto(int(index.max(initial=0))))
        line = np.searchsorted(firsts, index, side="right") - 1
        starts = np.empty(len(index), dtype=np.int64)
        for k in np.unique(line).tolist():
            here, begin, offset = line == k, int(firsts[k]), 0 if k else self.offset
            count = int(firsts[k + 1]) - begin
            count = count if self.total is None else min(count, self.total - begin)
            key = [self.seed, self.epoch + k, "windows"]
            key += [f"source {self.source}"] if self.source else []
            key += [f"from {offset}"] if offset else []
            starts[here] = offset + self.length * permuted(index[here] - begin, count, *key)
        return self.epoch + line, starts

    def end(self) -> tuple[int, int]:
        """(epoch, offset) of what is free after the last window."""
        assert self.total is not None
        if not self.total:
            return self.epoch, self.offset
        firsts = self._upto(self.total - 1)
        line = bisect_right(firsts, self.total - 1) - 1
        offset = 0 if line else self.offset
        return self.epoch + line, offset + (self.total - firsts[line]) * self.length

    def lies_in(self, index: int, last: int) -> bool:
        """Whether window `index` is one of the lines of the epochs up to `last`; asks for no other."""
        firsts = self._upto(index, last)
        return firsts[min(len(firsts) - 1, last - self.epoch + 1)] > index

    def _upto(self, index: int, last: int | None = None) -> list[int]:
        if self._firsts[-1] <= index:
            with self._growing:
                while self._firsts[-1] <= index:
                    k = len(self._firsts) - 1
                    if last is not None and self.epoch + k > last:
                        break
                    free = self.tokens(self.epoch + k) - 1 - (0 if k else self.offset)
                    self._firsts.append(self._firsts[-1] + max(free, 0) // self.length)
        return self._firsts


def courses(
    tokens: Callable[[int], int], lengths: Sequence[int], totals: Sequence[int], seed: int, source: int = 0
) -> list[Course]:
    """One Course a group of a plan, each from where the one before it ends; the last has no end."""
    found, epoch, offset = [], 0, 0
    for length, total in zip(lengths[:-1], totals, strict=False):
        found.append(Course(tokens, length, total, seed, epoch, offset, source))
        epoch, offset = found[-1].end()
    return [*found, Course(tokens, lengths[-1], None, seed, epoch, offset, source)]
