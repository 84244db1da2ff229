"""Selects and orders the windows of a text for a run: pure functions of a plan and a seed.

A run is a sequence of segments, each with a number of steps, a batch size and a window length. The documents
of an epoch form one token stream, which is divided into chunks. Segments take consecutive chunks in an order
drawn from the seed and divide each chunk into windows of their own length. Thus no token is an input twice in
an epoch, and every segment samples documents from the whole text. If all windows have the same length, chunks
are windows. Tokens are dropped at the end of a stream if they do not fill a chunk, at the end of a chunk if
they do not fill a window, and from the last chunk of a segment if it does not use all of it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import NamedTuple

import numpy as np

from data.sampling.random_draws import permuted

FEW = 64  # streams with fewer chunks than this use the shortest possible chunks


class Segment(NamedTuple):
    """Consecutive steps with one window length and batch size. The last segment of a run has no end."""

    length: int  # tokens per window
    batch_size: int  # windows per step, over all ranks
    steps: int = 0


class SegmentSlice(NamedTuple):
    """The samples of some steps within one segment."""

    length: int
    group: int  # index of the group: consecutive segments of the same length
    first: int  # index of the first sample in its group
    stop: int


class SegmentPlan:
    """The segments of a run, indexed by step and by sample."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self._begins = np.cumsum([0, *(one.steps for one in self.segments[:-1])])
        lengths = [one.length for one in self.segments]
        self.lengths = [length for length, _ in groupby(lengths)]  # of each group
        self._group = [i for i, (_, row) in enumerate(groupby(lengths)) for _ in row]
        # samples per group; the last has no end
        self._before, self.samples = [], [0] * len(self.lengths)
        for segment, group in zip(self.segments, self._group, strict=True):
            self._before.append(self.samples[group])
            self.samples[group] += segment.steps * segment.batch_size

    def at(self, step: int) -> Segment:
        """The segment of update `step` (0, 1, ...)."""
        return self.segments[self._index(step)]

    def shares(self, start: int, stop: int) -> list[SegmentSlice]:
        """The samples of steps `start` ... `stop` − 1, one slice per segment."""
        found = []
        while start < stop:
            i = self._index(start)
            begin = int(self._begins[i])
            segment = self.segments[i]
            end = stop if i + 1 == len(self.segments) else min(stop, int(self._begins[i + 1]))
            low, high = (
                self._before[i] + (step - begin) * segment.batch_size for step in (start, end)
            )
            found.append(SegmentSlice(segment.length, self._group[i], low, high))
            start = end
        return found

    def _index(self, step: int) -> int:
        return int(np.searchsorted(self._begins, step, side="right")) - 1


class ChunkLayout(NamedTuple):
    """How a token stream is divided into chunks."""

    size: int  # tokens
    count: int

    @classmethod
    def of(cls, tokens: int, lengths: Sequence[int]) -> "ChunkLayout":
        """Layout of a stream of `tokens` tokens. Windows of each length fill a chunk up to a remainder of
        less than a sixteenth. If there would be few such chunks, a chunk is as long as the longest window.
        """
        long, short = chunk_sizes(lengths)
        size = long if (tokens - 1) // long >= FEW else short
        return cls(size, max(tokens - 1, 0) // size)


def chunk_sizes(lengths: Sequence[int]) -> tuple[int, int]:
    """Return (tokens per chunk, tokens per chunk of a short stream) for windows of these lengths."""
    return min(math.lcm(*lengths), 16 * max(lengths)), max(lengths)


def stream_key(seed: int, source: int, epoch: int, what: str) -> list[int | str]:
    """Key of the random draws for a token stream of the text `source`."""
    return [seed, epoch, what] + ([f"source {source}"] if source else [])


class WindowSampler:
    """Locates the windows of one length that a run reads from one text, starting where the previous sampler
    ends.

    Token streams are requested as late as possible, because groups of text may not be prepared yet. Only the
    streams of the previous samplers and those that contain the requested windows are read.

    Args:
        layout: returns the chunk layout of the stream of an epoch.
        length: tokens per window.
        total: number of windows; None: unlimited.
        seed: seed of their order.
        previous: the previous sampler; None: start with the first stream.
        source: index of the text in a mixture.
    """

    def __init__(
        self,
        layout: Callable[[int], ChunkLayout],
        length: int,
        total: int | None,
        seed: int,
        previous: "WindowSampler | None",
        source: int,
    ):
        self.layout = layout
        self.length = length
        self.total = total
        self.previous = previous
        self.seed = seed
        self.source = source
        self._firsts = [0]  # index of the first window in each stream, and the end of the last one
        self._growing = Lock()  # a step may be prefetched while the ledger counts earlier ones

    @cached_property
    def begin(self) -> tuple[int, int]:
        """(epoch, chunk): the first stream and the index of its first unused chunk."""
        return (0, 0) if self.previous is None else self.previous.end

    @cached_property
    def end(self) -> tuple[int, int]:
        """(epoch, chunk): the first unused chunk after the last window."""
        assert self.total is not None
        epoch, free = self.begin
        if not self.total:
            return epoch, free
        firsts = self._upto(self.total - 1)
        stream = bisect_right(firsts, self.total - 1) - 1
        each = self.layout(epoch + stream).size // self.length
        return epoch + stream, self._free(stream) - (firsts[stream] - self.total) // each

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, offset of the first token in its stream), both int64, of windows 0, 1, ... of this
        sampler.
        """
        epoch, _ = self.begin
        firsts = np.array(self._upto(int(index.max(initial=0))))
        stream = np.searchsorted(firsts, index, side="right") - 1
        starts = np.empty(len(index), dtype=np.int64)
        for k in np.unique(stream).tolist():
            here = stream == k
            first = int(firsts[k])
            layout = self.layout(epoch + k)
            number = index[here] - first
            key = stream_key(self.seed, self.source, epoch + k, "windows")
            each = layout.size // self.length
            if each > 1:  # windows of one chunk are not consecutive
                count = int(firsts[k + 1]) - first
                count = count if self.total is None else min(count, self.total - first)
                number = permuted(number, count, *key, f"from {self._free(k)}")
            chunk, part = np.divmod(number, each)
            chunk = permuted(chunk + self._free(k), layout.count, *key)
            starts[here] = chunk * layout.size + part * self.length
        return epoch + stream, starts

    def is_within(self, index: int, last: int) -> bool:
        """Whether window `index` is in the streams of epochs up to `last`. Reads no other stream."""
        if self.previous is not None and not self.previous.ends_within(last):
            return False
        epoch, _ = self.begin
        firsts = self._upto(index, last)
        return firsts[max(0, min(len(firsts) - 1, last - epoch + 1))] > index

    def ends_within(self, last: int) -> bool:
        """Whether all windows are in the streams of epochs up to `last`. Reads no other stream."""
        assert self.total is not None
        if self.total:
            return self.is_within(self.total - 1, last)
        return self.previous is None or self.previous.ends_within(last)

    def _free(self, k: int) -> int:
        """The first unused chunk of the k-th stream. The previous sampler ends within the first stream."""
        return 0 if k else self.begin[1]

    def _upto(self, index: int, last: int | None = None) -> list[int]:
        """Extend `_firsts` to window `index`, but not to epochs after `last`."""
        epoch, _ = self.begin
        with self._growing:
            while self._firsts[-1] <= index and (
                last is None or epoch + len(self._firsts) - 1 <= last
            ):
                k = len(self._firsts) - 1
                layout = self.layout(epoch + k)
                windows = (layout.count - self._free(k)) * (layout.size // self.length)
                self._firsts.append(self._firsts[-1] + windows)
        return self._firsts


def window_samplers(
    tokens: Callable[[int], int],
    lengths: Sequence[int],
    totals: Sequence[int],
    seed: int,
    source: int = 0,
) -> list[WindowSampler]:
    """Return one WindowSampler per group of a plan. Each starts where the previous one ends; the last has no
    end.

    Args:
        tokens: returns the number of tokens in the stream of an epoch; called only when its windows are
            needed.
        lengths, totals: window length and number of windows of each group.
        source: index of the text in a mixture.
    """

    def layout(epoch: int) -> ChunkLayout:
        return ChunkLayout.of(tokens(epoch), lengths)

    found: list[WindowSampler] = []
    for length, total in zip(lengths, [*totals[: len(lengths) - 1], None], strict=True):
        found.append(
            WindowSampler(layout, length, total, seed, found[-1] if found else None, source)
        )
    return found
