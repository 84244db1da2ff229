"""Exposure: how often a training run has shown each position and each distance to the model.

Counts are computed from the data order alone, not recorded during training. They are a pure function of the
settings, the store and the number of steps, so resumed and uninterrupted runs have the same counts. Without
random positions the counts have a closed form. With random positions the draws are repeated for every step
or, in long runs, for one step out of every `stride`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.files import atomic, damage_reported
from data.sampling.packing import PositionedTokens
from data.sampling.random_draws import below, bits, key_of
from data.sampling.random_positions import place

if TYPE_CHECKING:
    from data.sampling.batches import BatchSampler

EXPOSURE = "exposure.npz"
# limit on positions and pairs counted individually in a run: one to two seconds
COUNTED = 200_000_000
_AT_ONCE = 1 << 18  # tokens
_EMPTY = np.zeros(0, dtype=np.int64)


class ExposureRule(NamedTuple):
    """The attention range of the layer of a model with the longest range: the latest `window` keys (None:
    all) and the first `sinks` tokens of the text.
    """

    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class Exposure:
    """Counts over the inputs of a training run, with one bin per integer; real numbers are rounded to the
    nearest.
    """

    positions: np.ndarray  # (P,) int64: inputs at position first + p
    distances: np.ndarray  # (D,) int64: attended query-key pairs at each distance in position
    first: int  # position of the first bin: 0, or less if negative positions are drawn
    tokens: int  # inputs of all steps
    steps: int  # steps that the counts cover
    counted: int  # steps counted individually; if fewer than `steps`, the counts are scaled up

    def __add__(self, other: Exposure) -> Exposure:
        """The exposure of two consecutive training runs."""
        first, positions = _sum((self.first, self.positions), (other.first, other.positions))
        _, distances = _sum((0, self.distances), (0, other.distances))
        sums = (getattr(self, key) + getattr(other, key) for key in ("tokens", "steps", "counted"))
        return Exposure(positions, distances, first, *sums)


class ExposureLedger:
    """Counts the exposure of a run incrementally; each step is counted once.

    Args:
        batches: the data order.
        steps: length of the whole run. With the batch sizes, it determines how many steps are sampled.
        rule: returns the attention range at a step (0, 1, ...), which a schedule may change during the run.
        start: first step to count. In a fork, the steps before it belong to the parent run.
    """

    def __init__(
        self,
        batches: BatchSampler,
        steps: int,
        rule: Callable[[int], ExposureRule] = lambda step: ExposureRule(),
        start: int = 0,
    ):
        self.batches = batches
        self.rule = rule
        self.start = start
        sampler = batches.positions.name
        self._plain = sampler == "plain"
        self._unit_steps = sampler in ("plain", "random_offset")
        work = sum(
            (share.stop - share.first)
            * share.length
            * (1 if self._unit_steps else (share.length + 1) // 2)
            for share in batches.plan.shares(start, steps)
        )
        self.stride = 1 if self._plain else max(1, -(-work // COUNTED))
        self._done = start
        self._counted = 0
        self._first = 0
        self._positions = self._distances = _EMPTY  # of sampled steps, where the values are random

    def upto(self, step: int) -> Exposure:
        """Return the exposure of steps `start` ... `step` − 1. `step` must not decrease between calls."""
        if step < self._done:
            raise ValueError(f"the ledger is at step {self._done} already, asked for {step}")
        plan = self.batches.plan
        while self._done < step:
            start = self._done
            rule = self.rule(self._done)
            segment = plan.at(self._done)
            while (
                self._done < step
                and self.rule(self._done) == rule
                and plan.at(self._done) is segment
            ):
                self._done += 1
            self._count(start, self._done, rule)
        steps = step - self.start
        counted = steps if self._plain else self._counted
        scale = steps / counted if counted else 1.0

        def scaled(counts: np.ndarray, is_sampled: bool) -> np.ndarray:
            return np.rint(counts * scale).astype(np.int64) if is_sampled and scale != 1 else counts

        return Exposure(
            positions=scaled(self._positions, True),
            distances=scaled(self._distances, not self._unit_steps),
            first=self._first,
            tokens=sum(
                (one.stop - one.first) * one.length for one in plan.shares(self.start, step)
            ),
            steps=steps,
            counted=counted,
        )

    def _count(self, start: int, stop: int, rule: ExposureRule) -> None:
        """Count steps of one segment with one attention range."""
        if self._unit_steps:
            texts = texts_by_length(self.batches, start, stop)
            self._add((0, _EMPTY), unit_distances(texts, rule))
            if self._plain:
                self._add((0, above(texts)), _EMPTY)
                return
        sampled = [step for step in range(start, stop) if self._is_sampled(step)]
        segment = self.batches.plan.at(start)
        group = max(1, _AT_ONCE // (segment.batch_size * segment.length))
        for i in range(0, len(sampled), group):
            placed = _stacked([_placed(self.batches, step) for step in sampled[i : i + group]])
            distances = _EMPTY if self._unit_steps else distances_of(placed, rule)
            self._add(_binned(placed.position.reshape(-1)), distances)
        self._counted += len(sampled)

    def _is_sampled(self, step: int) -> bool:
        """Whether a step is counted: one step out of every `stride`, drawn with the seed of the run. The
        first step is always counted.
        """
        if self.stride == 1 or step == self.start:
            return True
        block = step // self.stride
        drawn = bits(key_of(self.batches.seed, "exposure"), np.array([block]))
        return bool(step % self.stride == below(drawn, self.stride)[0]) and block > 0

    def _add(self, positions: tuple[int, np.ndarray], distances: np.ndarray) -> None:
        self._first, self._positions = _sum((self._first, self._positions), positions)
        _, self._distances = _sum((0, self._distances), (0, distances))


def texts_by_length(batches: BatchSampler, start: int, stop: int) -> np.ndarray:
    """Count the texts of each length in the windows of steps `start` ... `stop` − 1 of one segment: (T + 1,)
    int64.

    A window is one text of T tokens or, with packing `intra_document`, one text per document fragment.
    """
    length = batches.plan.at(start).length
    counts = np.zeros(length + 1, dtype=np.int64)
    for windows in batches.windows(start, stop):
        if batches.packing == "concat":
            counts[length] += len(windows.start)
            continue
        lines = np.stack([windows.source, windows.epoch])
        for source, epoch in np.unique(lines, axis=1).T.tolist():
            here = np.sort(windows.start[(windows.source == source) & (windows.epoch == epoch)])
            starts = batches.document_starts(source, epoch)
            window = np.searchsorted(here, starts, side="right") - 1
            inside = (window >= 0) & (starts < here[window] + length)
            begins = np.union1d(starts[inside], here)
            edges = here[np.searchsorted(here, begins, side="right") - 1] + length
            ends = np.minimum(np.append(begins[1:], edges[-1]), edges)
            counts += np.bincount(ends - begins, minlength=length + 1)
    return counts


def above(texts: np.ndarray) -> np.ndarray:
    """Convert counts of texts with n tokens to counts of texts with a token of order p, i.e. n > p: (T,)
    int64.
    """
    return np.cumsum(texts[::-1])[::-1][1:].copy()


def unit_distances(texts: np.ndarray, rule: ExposureRule) -> np.ndarray:
    """Count attended pairs at each distance in texts of these lengths, if positions increase by 1: (T,)
    int64.

    A text of n tokens has n − d pairs at distance d. Beyond the window only pairs whose key is a sink are
    attended, min(sinks, n − d) of them.
    """
    texts = above(texts)
    all_pairs = np.cumsum(texts[::-1])[::-1]
    window, sinks = rule
    if window is None or window >= len(all_pairs):
        return all_pairs.copy()
    further = np.append(all_pairs[sinks:], np.zeros(min(sinks, len(all_pairs)), dtype=np.int64))
    seen = all_pairs - further[: len(all_pairs)]
    seen[:window] = all_pairs[:window]
    return seen


def distances_of(placed: PositionedTokens, rule: ExposureRule) -> np.ndarray:
    """Count attended pairs by the distance of their positions: (D,) int64. `placed` has arrays (b, T)."""
    counts = _EMPTY
    (window, sinks) = rule
    length = placed.order.shape[1]
    for lag in range(length):
        beyond = window is not None and lag >= window
        if beyond and not sinks:
            break
        keys = slice(0, length - lag)
        queries = slice(lag, length)
        seen = placed.document[:, keys] == placed.document[:, queries]
        if beyond:
            seen &= placed.order[:, keys] < sinks
        apart = np.abs(placed.position[:, queries] - placed.position[:, keys])[seen]
        if apart.size:
            _, counts = _sum((0, counts), _binned(apart))
    return counts


def _placed(batches: BatchSampler, step: int) -> PositionedTokens:
    rows = np.arange(batches.plan.at(step).batch_size)
    return place(
        batches.packing,
        batches.positions,
        batches.begins(step),
        seed=batches.seed,
        step=step,
        rows=rows,
    )


def _stacked(steps: list[PositionedTokens]) -> PositionedTokens:
    """Concatenate the rows of several steps, with every array expanded to full size."""
    whole = [np.broadcast_arrays(one.order, one.position, one.document) for one in steps]
    order, position, document = (np.concatenate(arrays) for arrays in zip(*whole, strict=True))
    return PositionedTokens(order, position, document, steps[0].layout, steps[0].unit_steps)


def _binned(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Round values to integers and count them. Bins start at the smallest value, or at 0 if that is less."""
    whole = np.rint(values).astype(np.int64)
    first = min(0, int(whole.min()))
    return first, np.bincount(whole - first)


def _sum(a: tuple[int, np.ndarray], b: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """Add two counts, each given with its first bin."""
    first = min(a[0], b[0])
    counts = np.zeros(max(one + len(values) for one, values in (a, b)) - first, dtype=np.int64)
    for one, values in (a, b):
        counts[one - first : one - first + len(values)] += values
    return first, counts


def write_exposure(folder: Path, exposure: Exposure, name: str = EXPOSURE) -> None:
    """Write the exposure to a run directory atomically."""
    with atomic(folder / name) as file:
        np.savez_compressed(file, **vars(exposure))


def read_exposure(folder: Path, name: str = EXPOSURE) -> Exposure | None:
    """Read the exposure of a run directory; None if it has none. Raises DataError if the file is damaged."""
    path = folder / name
    if not path.is_file():
        return None
    with damage_reported(path, "delete it to recompute it"), np.load(path) as stored:
        arrays = {field.name: stored[field.name] for field in fields(Exposure)}
    return Exposure(
        **{key: value if value.ndim else int(value) for key, value in arrays.items()}  # pyright: ignore
    )
