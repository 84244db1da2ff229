"""Selects the texts of a mixture, and selects and orders the windows of each text for a run: pure
functions of a plan and a seed.

A run is a sequence of step ranges, each with a number of steps, a batch size and a window length.
The documents of an epoch form one token stream, which is divided into chunks. Step ranges take
consecutive chunks in an order drawn from the seed and divide each chunk into windows of their own
length. Thus no token is an input twice in an epoch, and every step range samples documents from the
whole text. If all windows have the same length, chunks are windows. Tokens are dropped at the end
of a stream if they do not fill a chunk, at the end of a chunk if they do not fill a window, and
from the last chunk of a step range if it does not use all of it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from data.random_draws import permuted

FEW = 64  # streams with fewer chunks than this use the shortest possible chunks


class StepRange(NamedTuple):
    """Consecutive steps with one window length and batch size. The last range of a run has no
    end."""

    length: int  # tokens per window
    batch_size: int  # windows per step, over all ranks
    steps: int = 0


class SampleGroup(NamedTuple):
    """Samples of consecutive steps with windows of one length. A sample is one window."""

    length: int
    batch_size: int  # windows of the last of these steps
    samples: int


def samples_before(plan: Sequence[StepRange], step: int) -> list[SampleGroup]:
    """The samples of the steps before `step`, in groups. The last group, which `step` continues,
    may be empty."""
    groups: list[SampleGroup] = []
    for number, (length, batch_size, steps) in enumerate(plan, start=1):
        before = groups.pop().samples if groups and groups[-1].length == length else 0
        is_last = step < steps or number == len(plan)
        samples = before + batch_size * (step if is_last else steps)
        groups.append(SampleGroup(length, batch_size, samples))
        if is_last:
            break
        step -= steps
    return groups


class MixturePattern:
    """Assigns each sample of a run to one text of a mixture, by a fixed, repeating pattern.

    After any number of samples, the count of samples of each text is within one of its share.

    shares: exact fraction of samples for each text; the sum is 1.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self.period = math.lcm(*(share.denominator for share in shares))
        parts = [int(share * self.period) for share in shares]
        self._turns = np.array(_quota(parts), dtype=np.int64)
        self._before = np.zeros((len(parts), self.period + 1), dtype=np.int64)
        for source, before in enumerate(self._before):
            before[1:] = np.cumsum(self._turns == source)

    def turns(self, sample: np.ndarray) -> np.ndarray:
        """Return the text of each sample 0, 1, ...: int64."""
        return self._turns[sample % self.period]

    def before(self, source: int, sample: np.ndarray) -> np.ndarray:
        """For each sample, count the earlier samples of text `source`: int64."""
        rounds, rest = np.divmod(sample, self.period)
        return rounds * self._before[source, -1] + self._before[source, rest]


def _quota(parts: list[int]) -> list[int]:
    """Assign sum(parts) samples to texts by the quota method of Balinski and Young (1975). After n
    samples, the count of each text differs from its share of n by less than one.
    """
    whole = sum(parts)
    had = [0] * len(parts)
    turns = []
    for n in range(1, whole + 1):
        due = [j for j, part in enumerate(parts) if had[j] * whole < part * n]
        turn = min(due, key=lambda j: Fraction(had[j] + 1, parts[j]))  # the first of a tie
        had[turn] += 1
        turns.append(turn)
    return turns


def chunk_sizes(lengths: Sequence[int]) -> tuple[int, int]:
    """Return (tokens per chunk, tokens per chunk of a short stream) for windows of these
    lengths."""
    return min(math.lcm(*lengths), 16 * max(lengths)), max(lengths)


def chunk_size(tokens: int, lengths: Sequence[int]) -> int:
    """Tokens per chunk of a stream. Windows of each length fill a chunk up to a remainder of less
    than a sixteenth. If there would be few such chunks, a chunk is as long as the longest window.
    """
    long, short = chunk_sizes(lengths)
    return long if (tokens - 1) // long >= FEW else short


def stream_key(seed: int, source: int, epoch: int, what: str) -> list[int | str]:
    """Key of the random draws for a token stream of the text `source`."""
    key = [seed, epoch, what]
    return [*key, f"source {source}"] if source else key


class WindowSampler:
    """Locates the windows of one length that a run reads from one text.

    Args:
        tokens: number of tokens in the text.
        chunk: tokens per chunk.
        length: tokens per window.
        total: number of windows; None: unlimited.
        begin: (epoch, chunk), the first stream and the index of its first unused chunk.
        seed: seed of the order of the windows.
        source: index of the text in a mixture.
    """

    def __init__(
        self,
        tokens: int,
        chunk: int,
        length: int,
        total: int | None,
        *,
        begin: tuple[int, int],
        seed: int,
        source: int,
    ):
        self.chunk = chunk
        self.length = length
        self.total = total
        self.begin = begin
        self.seed = seed
        self.source = source
        self._chunks = (tokens - 1) // chunk
        self._per_chunk = chunk // length
        self._per_stream = self._chunks * self._per_chunk
        self._skipped = begin[1] * self._per_chunk  # windows used before `begin`

    @property
    def end(self) -> tuple[int, int]:
        """(epoch, chunk): the first unused chunk after the last window."""
        if not self.total:
            return self.begin
        stream, last = divmod(self._skipped + self.total - 1, self._per_stream)
        return self.begin[0] + stream, last // self._per_chunk + 1

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For windows `index` (0, 1, ...) of this sampler, return (epoch, offset of the first token
        in its stream), both int64.
        """
        streams, numbers = np.divmod(index + self._skipped, self._per_stream)
        starts = np.empty_like(index)
        for stream in np.unique(streams).tolist():
            here = streams == stream
            starts[here] = self._starts(stream, numbers[here])
        return self.begin[0] + streams, starts

    def _starts(self, stream: int, number: np.ndarray) -> np.ndarray:
        """Offsets of the windows `number` (0, 1, ...) of one stream."""
        key = stream_key(self.seed, self.source, self.begin[0] + stream, "windows")
        if self._per_chunk > 1:  # windows of one chunk are not consecutive
            first = 0 if stream else self._skipped
            end = self._per_stream
            if self.total is not None:
                end = min(end, self._skipped + self.total - stream * self._per_stream)
            name = f"from {first // self._per_chunk}"
            number = first + permuted(number - first, end - first, *key, name)
        chunk, part = np.divmod(number, self._per_chunk)
        chunk = permuted(chunk, self._chunks, *key)
        return chunk * self.chunk + part * self.length


def window_samplers(
    tokens: int,
    lengths: Sequence[int],
    totals: Sequence[int],
    *,
    seed: int,
    source: int = 0,
) -> list[WindowSampler]:
    """Return one WindowSampler per group of a plan. Each starts where the previous one ends; the
    last one has no end.

    Args:
        tokens: number of tokens in the text.
        lengths, totals: window length and number of windows of each group.
        source: index of the text in a mixture.
    """
    chunk = chunk_size(tokens, lengths)
    begin = (0, 0)
    samplers = []
    for length, total in zip(lengths, [*totals[: len(lengths) - 1], None], strict=True):
        sampler = WindowSampler(tokens, chunk, length, total, begin=begin, seed=seed, source=source)
        samplers.append(sampler)
        begin = sampler.end
    return samplers
