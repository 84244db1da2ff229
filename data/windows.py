"""Which windows of a text a run sees, and in which order: pure functions of a plan and a seed.

A run is a row of portions, each of so many steps of windows of one length. An epoch's documents stand end to
end on a line, which is cut in slots; portions take slots one after another, in an order drawn from the seed,
and cut each in windows of their own length. So no token is an input twice in an epoch, and every portion sees
documents from all over the text, not only those of one stretch. Where all windows are of one length, slots
are windows. Left out are what is too short for a slot at the end of a line, what is too short for a window
at the end of a slot, and what the last window of a portion leaves of its slot.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import NamedTuple

import numpy as np

from data.draws import permuted

FEW = 64  # slots of a line, below which they are made as short as can be


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


class Slots(NamedTuple):
    """How a line is cut."""

    size: int  # tokens
    count: int

    @classmethod
    def of(cls, tokens: int, lengths: Sequence[int]) -> "Slots":
        """Of a line of `tokens`: slots that windows of every length fill, or leave less than a sixteenth of;
        as long as the longest windows where such slots would be few."""
        long, short = sizes_of_slots(lengths)
        size = long if (tokens - 1) // long >= FEW else short
        return cls(size, max(tokens - 1, 0) // size)


def sizes_of_slots(lengths: Sequence[int]) -> tuple[int, int]:
    """(tokens of a slot, of one on a short line) for windows of these lengths."""
    return min(math.lcm(*lengths), 16 * max(lengths)), max(lengths)


class Course:
    """The windows of one length that a run takes of one text: from where the course before it ends.

    Lines are asked for as late as can be, since those of text in groups may not be prepared yet: those of
    the courses before, and of its own as far as its windows go.

    Args:
        slots: of the line of each epoch.
        length: of a window.
        total: windows; None: without end.
        seed: of their order.
        before: None: it begins with the first line.
        source: number of the text in a mixture.
    """

    def __init__(
        self,
        slots: Callable[[int], Slots],
        length: int,
        total: int | None,
        seed: int,
        before: "Course | None" = None,
        source: int = 0,
    ):
        self.slots, self.length, self.total, self.before = slots, length, total, before
        self._key = lambda epoch, what: [seed, epoch, what] + ([f"source {source}"] if source else [])
        self._firsts = [0]  # number of the first window of each line, and of what follows
        self._growing = Lock()  # a step is read ahead while the ledger counts those before it

    @cached_property
    def begin(self) -> tuple[int, int]:
        """(epoch, slot): the first line, and the number of its first slot that is free."""
        return (0, 0) if self.before is None else self.before.end

    @cached_property
    def end(self) -> tuple[int, int]:
        """(epoch, slot): the first that is free after the last window."""
        assert self.total is not None
        epoch, free = self.begin
        if not self.total:
            return epoch, free
        firsts = self._upto(self.total - 1)
        line = bisect_right(firsts, self.total - 1) - 1
        each = self.slots(epoch + line).size // self.length
        return epoch + line, self._free(line) - (firsts[line] - self.total) // each

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of windows number 0, 1, ... of this course: (epoch, first token on its line), int64 each."""
        epoch, _ = self.begin
        firsts = np.array(self._upto(int(index.max(initial=0))))
        line = np.searchsorted(firsts, index, side="right") - 1
        starts = np.empty(len(index), dtype=np.int64)
        for k in np.unique(line).tolist():
            here, first = line == k, int(firsts[k])
            slots, number, of_line = (
                self.slots(epoch + k),
                index[here] - first,
                self._key(epoch + k, "windows"),
            )
            each = slots.size // self.length
            if each > 1:  # windows of one slot are not seen in a row
                count = int(firsts[k + 1]) - first
                count = count if self.total is None else min(count, self.total - first)
                number = permuted(number, count, *of_line, f"from {self._free(k)}")
            slot, part = np.divmod(number, each)
            slot = permuted(slot + self._free(k), slots.count, *of_line)
            starts[here] = slot * slots.size + part * self.length
        return epoch + line, starts

    def lies_in(self, index: int, last: int) -> bool:
        """Whether window `index` is one of the lines of the epochs up to `last`; asks for no other."""
        if self.before is not None and not self.before.ends_in(last):
            return False
        epoch, _ = self.begin
        firsts = self._upto(index, last)
        return firsts[max(0, min(len(firsts) - 1, last - epoch + 1))] > index

    def ends_in(self, last: int) -> bool:
        """Whether all its windows are of the lines of the epochs up to `last`; asks for no other."""
        assert self.total is not None
        if self.total:
            return self.lies_in(self.total - 1, last)
        return self.before is None or self.before.ends_in(last)

    def _free(self, k: int) -> int:
        """The first slot that is free on the k-th of its lines: the course before ends within the first."""
        return 0 if k else self.begin[1]

    def _upto(self, index: int, last: int | None = None) -> list[int]:
        if self._firsts[-1] <= index:
            epoch, _ = self.begin
            with self._growing:
                while self._firsts[-1] <= index:
                    k = len(self._firsts) - 1
                    if last is not None and epoch + k > last:
                        break
                    slots = self.slots(epoch + k)
                    more = (slots.count - self._free(k)) * (slots.size // self.length)
                    self._firsts.append(self._firsts[-1] + more)
        return self._firsts


def courses(
    tokens: Callable[[int], int], lengths: Sequence[int], totals: Sequence[int], seed: int, source: int = 0
) -> list[Course]:
    """One Course a group of a plan, each from where the one before it ends; the last has no end.

    Args:
        tokens: of the line of each epoch; asked for no earlier than its windows are.
        lengths, totals: of windows and their number, of each group.
    """
    found: list[Course] = []

    def slots(epoch: int) -> Slots:
        return Slots.of(tokens(epoch), lengths)

    for length, total in zip(lengths, [*totals[: len(lengths) - 1], None], strict=True):
        found.append(Course(slots, length, total, seed, found[-1] if found else None, source))
    return found
