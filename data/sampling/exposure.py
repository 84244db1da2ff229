"""Exposure: how often a training run has shown each position and each distance to the model.

Counts are computed from the data order alone, not recorded during training. They are a pure
function of the settings, the store and the number of steps, so resumed and uninterrupted runs have
the same counts. Without random positions the counts have a closed form. With random positions the
draws are repeated for every step or, in long runs, for one step out of every `stride`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.files import atomic, damage_reported
from data.sampling.positions import PositionedTokens
from data.sampling.random_draws import below, bits, key_of

if TYPE_CHECKING:
    from data.sampling.batches import BatchSampler, ItemSampler

EXPOSURE = "exposure.npz"
# limit on pairs counted individually in a run: one to two seconds
COUNTED = 200_000_000
_AT_ONCE = 1 << 18  # tokens


class ExposureRule(NamedTuple):
    """The attention range of the layer of a model with the longest range: the latest `window` keys
    (None: all) and the first `sinks` tokens of the text.
    """

    window: int | None = None
    sinks: int = 0


class Bins(NamedTuple):
    """Counts of consecutive integers from `first` on."""

    first: int = 0
    counts: np.ndarray = np.zeros(0, dtype=np.int64)

    @classmethod
    def of(cls, values: np.ndarray) -> Bins:
        """Count values, rounded to the nearest integer. Bins start at the smallest, or at 0."""
        whole = np.rint(values).astype(np.int64)
        first = min(0, int(whole.min(initial=0)))
        return cls(first, np.bincount((whole - first).reshape(-1)))

    def plus(self, other: Bins) -> Bins:
        first = min(self.first, other.first)
        stop = max(self.first + len(self.counts), other.first + len(other.counts))
        total = np.zeros(stop - first, dtype=np.int64)
        for bins in (self, other):
            start = bins.first - first
            total[start : start + len(bins.counts)] += bins.counts
        return Bins(first, total)

    def scaled(self, factor: float) -> Bins:
        return Bins(self.first, np.rint(self.counts * factor).astype(np.int64))


@dataclass(frozen=True)
class Exposure:
    """Counts over the inputs of a training run, with one bin per integer; real numbers are rounded
    to the nearest.
    """

    positions: np.ndarray  # (P,) int64: inputs at position first + p
    distances: np.ndarray  # (D,) int64: attended query-key pairs at each distance in position
    first: int  # position of the first bin: 0, or less if negative positions are drawn
    tokens: int  # inputs of all steps
    steps: int  # steps that the counts cover
    counted: int  # steps counted individually; if fewer than `steps`, the counts are scaled up

    def __add__(self, other: Exposure) -> Exposure:
        """The exposure of two consecutive training runs."""
        positions = Bins(self.first, self.positions).plus(Bins(other.first, other.positions))
        distances = Bins(0, self.distances).plus(Bins(0, other.distances))
        return Exposure(
            positions=positions.counts,
            distances=distances.counts,
            first=positions.first,
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            counted=self.counted + other.counted,
        )


class ExposureLedger:
    """Counts the exposure of a run incrementally; each step is counted once.

    Args:
        batches: the data order.
        steps: length of the whole run. With the batch sizes, it determines how many steps are
            sampled.
        rule: returns the attention range at a step (0, 1, ...), which a schedule may change during
            the run.
        start: first step to count. In a fork, the steps before it belong to the parent run.
    """

    def __init__(
        self,
        batches: BatchSampler | ItemSampler,
        steps: int,
        rule: Callable[[int], ExposureRule] = lambda step: ExposureRule(),
        start: int = 0,
    ):
        self.batches = batches
        self.rule = rule
        self.start = start
        self._plain = batches.has_plain_positions
        pairs = 0
        for part in batches.plan.shares(start, steps):
            pairs += (part.stop - part.first) * part.length * (part.length + 1) // 2
        self.stride = 1 if self._plain else max(1, -(-pairs // COUNTED))
        self._done = start
        self._counted = 0
        self._positions = Bins()  # as the distances, of sampled steps where the values are random
        self._distances = Bins()

    def upto(self, step: int) -> Exposure:
        """Return the exposure of steps `start` ... `step` − 1. `step` must not decrease between
        calls.
        """
        plan = self.batches.plan
        new = range(self._done, step)
        for (rule, _), steps in groupby(new, lambda i: (self.rule(i), id(plan.at(i)))):
            self._count(list(steps), rule)
        self._done = step
        steps = step - self.start
        counted = steps if self._plain else self._counted
        factor = steps / counted if counted else 1.0
        positions = self._positions.scaled(factor)
        distances = self._distances.scaled(factor)
        tokens = 0
        for part in plan.shares(self.start, step):
            tokens += (part.stop - part.first) * part.length
        return Exposure(
            positions=positions.counts,
            distances=distances.counts,
            first=positions.first,
            tokens=tokens,
            steps=steps,
            counted=counted,
        )

    def _count(self, steps: list[int], rule: ExposureRule) -> None:
        """Count consecutive steps of one segment with one attention range."""
        if self._plain:
            texts = self.batches.text_lengths(steps[0], steps[-1] + 1)
            self._positions = self._positions.plus(Bins(0, above(texts)))
            self._distances = self._distances.plus(Bins(0, unit_distances(texts, rule)))
            return
        sampled = [step for step in steps if self._is_sampled(step)]
        segment = self.batches.plan.at(steps[0])
        group = max(1, _AT_ONCE // (segment.batch_size * segment.length))
        for i in range(0, len(sampled), group):
            placed = _stacked([self.batches.positioned(step) for step in sampled[i : i + group]])
            positions = placed.position[placed.document >= 0]
            self._positions = self._positions.plus(Bins.of(positions))
            self._distances = self._distances.plus(distances_of(placed, rule))
        self._counted += len(sampled)

    def _is_sampled(self, step: int) -> bool:
        """Whether a step is counted: one step out of every `stride`, drawn with the seed of the
        run. The first step is always counted.
        """
        if self.stride == 1 or step == self.start:
            return True
        block = step // self.stride
        random = bits(key_of(self.batches.seed, "exposure"), np.array([block]))
        drawn = int(below(random, self.stride)[0])
        return block > 0 and step % self.stride == drawn


def above(texts: np.ndarray) -> np.ndarray:
    """Convert counts of texts with n tokens to counts of texts with a token of order p, i.e. n > p:
    (T,) int64.
    """
    return np.cumsum(texts[::-1])[::-1][1:].copy()


def unit_distances(texts: np.ndarray, rule: ExposureRule) -> np.ndarray:
    """Count attended pairs at each distance in texts of these lengths, if positions increase by 1:
    (T,) int64.

    A text of n tokens has n − d pairs at distance d. Beyond the window only pairs whose key is a
    sink are attended, min(sinks, n − d) of them.
    """
    with_order = above(texts)
    pairs = np.cumsum(with_order[::-1])[::-1]
    if rule.window is None or rule.window >= len(pairs):
        return pairs.copy()
    no_sink = np.zeros(len(pairs), dtype=np.int64)  # pairs whose key is not a sink
    no_sink[: max(0, len(pairs) - rule.sinks)] = pairs[rule.sinks :]
    attended = pairs - no_sink
    attended[: rule.window] = pairs[: rule.window]
    return attended


def distances_of(placed: PositionedTokens, rule: ExposureRule) -> Bins:
    """Count attended pairs by the distance of their positions. `placed` has arrays (b, T)."""
    total = Bins()
    length = placed.order.shape[1]
    for lag in range(length):
        is_beyond = rule.window is not None and lag >= rule.window
        if is_beyond and not rule.sinks:
            break
        keys = slice(0, length - lag)
        queries = slice(lag, length)
        attended = placed.document[:, keys] == placed.document[:, queries]
        attended &= placed.document[:, queries] >= 0
        if is_beyond:
            attended &= placed.order[:, keys] < rule.sinks
        distance = placed.position[:, queries] - placed.position[:, keys]
        total = total.plus(Bins.of(np.abs(distance)[attended]))
    return total


def _stacked(steps: list[PositionedTokens]) -> PositionedTokens:
    """Concatenate the rows of several steps, with every array expanded to full size."""
    whole = [np.broadcast_arrays(step.order, step.position, step.document) for step in steps]
    order, position, document = np.concatenate(whole, axis=1)
    return steps[0]._replace(order=order, position=position, document=document)


def write_exposure(folder: Path, exposure: Exposure, name: str = EXPOSURE) -> None:
    """Write the exposure to a run directory atomically."""
    with atomic(folder / name) as file:
        np.savez_compressed(file, **vars(exposure))


def read_exposure(folder: Path, name: str = EXPOSURE) -> Exposure | None:
    """Read the exposure of a run directory; None if it has none. Raises DataError if the file is
    damaged.
    """
    path = folder / name
    if not path.is_file():
        return None
    with damage_reported(path, "delete it to recompute it"), np.load(path) as stored:
        values = {field.name: stored[field.name] for field in fields(Exposure)}
    for key in ("first", "tokens", "steps", "counted"):
        values[key] = int(values[key])
    return Exposure(**values)
