"""The exposure ledger: which positions and which distances a training has shown, and how often.

It is counted from the order of the data alone, and takes nothing from the steps themselves: a pure function
of the settings, the store and the number of steps, so that a resumed run has the ledger of one that was not.
Where positions are not drawn it is a closed form. Where they are, the draws are made again, for every step
or, in a run too long for that, for one step of each `stride`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.draws import below, bits, key_of
from data.errors import DataError
from data.files import atomic
from data.positions import Placed, place

if TYPE_CHECKING:
    from data.batches import Batches

EXPOSURE = "exposure.npz"
LOOKED_AT = 200_000_000  # positions and pairs counted one by one in a whole run: a second or two
_AT_ONCE = 1 << 18  # tokens


class Sight(NamedTuple):
    """What the farthest-seeing layer of a model sees: the latest `window` keys (None: all) and, beside them,
    the first `sinks` of the text."""

    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class Exposure:
    """Counts over the inputs of a training, one bin for each whole number; reals go to the nearest."""

    positions: np.ndarray  # (P,) int64: inputs placed at position first + p
    distances: np.ndarray  # (D,) int64: pairs of query and key that a layer sees, by distance in position
    first: int  # position of the first bin: 0, or below where positions are drawn below 0
    tokens: int  # inputs of all steps
    steps: int  # steps the counts stand for
    counted: int  # steps whose positions were looked at; fewer than `steps` where the rest is scaled up

    def __add__(self, other: Exposure) -> Exposure:
        """The ledger of one training after another."""
        first, positions = _joined((self.first, self.positions), (other.first, other.positions))
        _, distances = _joined((0, self.distances), (0, other.distances))
        return Exposure(
            positions,
            distances,
            first,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.counted + other.counted,
        )


class Ledger:
    """Counts the exposure of a run step by step, each step once.

    Args:
        batches: the order of the data.
        steps: length of the whole run; decides, with the sizes, how many steps are looked at.
        sight: what layers see at a step (0, 1, ...), as schemes may change on the way.
        start: steps before the first that counts: another run's, in a fork.
    """

    def __init__(
        self,
        batches: Batches,
        steps: int,
        sight: Callable[[int], Sight] = lambda step: Sight(),
        start: int = 0,
    ):
        self.batches, self.sight, self.start = batches, sight, start
        sampler = batches.positions.name
        self._plain, self._unit_steps = sampler == "plain", sampler in ("plain", "random_offset")
        looked_at = sum(
            (share.stop - share.first) * share.length * (1 if self._unit_steps else (share.length + 1) // 2)
            for share in batches.plan.shares(start, steps)
        )
        self.stride = 1 if self._plain else max(1, -(-looked_at // LOOKED_AT))
        self._done, self._counted, self._first = start, 0, 0
        empty = np.zeros(0, dtype=np.int64)
        self._positions, self._distances = empty, empty  # of the steps looked at where those are drawn

    def upto(self, step: int) -> Exposure:
        """The exposure of steps `start` ... `step` − 1; `step` may not fall from one call to the next."""
        if step < self._done:
            raise ValueError(f"the ledger is at step {self._done} already, asked for {step}")
        while self._done < step:
            start, sight, portion = self._done, self.sight(self._done), self.batches.plan.at(self._done)
            while (
                self._done < step
                and self.sight(self._done) == sight
                and self.batches.plan.at(self._done) is portion
            ):
                self._done += 1
            self._count(start, self._done, sight)
        shares = self.batches.plan.shares(self.start, step)
        steps = step - self.start
        counted = steps if self._plain else self._counted
        scale = 1.0 if counted == 0 else steps / counted
        return Exposure(
            positions=self._positions if scale == 1 else np.rint(self._positions * scale).astype(np.int64),
            distances=self._distances
            if scale == 1 or self._unit_steps
            else np.rint(self._distances * scale).astype(np.int64),
            first=self._first,
            tokens=sum((share.stop - share.first) * share.length for share in shares),
            steps=steps,
            counted=counted,
        )

    def _count(self, start: int, stop: int, sight: Sight) -> None:
        if self._unit_steps:
            texts = texts_by_length(self.batches, start, stop)
            self._add(distances=unit_distances(texts, sight))
            if self._plain:
                self._add(positions=(0, above(texts)))
                return
        looked_at = [step for step in range(start, stop) if self._is_looked_at(step)]
        portion = self.batches.plan.at(start)
        group = max(1, _AT_ONCE // (portion.batch_size * portion.length))
        for i in range(0, len(looked_at), group):
            placed = _stacked([_placed(self.batches, step) for step in looked_at[i : i + group]])
            self._add(positions=_binned(placed.position.reshape(-1)))
            if not self._unit_steps:
                self._add(distances=distances_of(placed, sight))
        self._counted += len(looked_at)

    def _is_looked_at(self, step: int) -> bool:
        """One step of every `stride`, drawn by the run's seed; the first is always among them."""
        if self.stride == 1 or step == self.start:
            return True
        block = step // self.stride
        drawn = bits(key_of(self.batches.seed, "exposure"), np.array([block]))
        return bool(step % self.stride == below(drawn, self.stride)[0]) and block > 0

    def _add(
        self, positions: tuple[int, np.ndarray] | None = None, distances: np.ndarray | None = None
    ) -> None:
        if positions is not None:
            self._first, self._positions = _joined((self._first, self._positions), positions)
        if distances is not None:
            _, self._distances = _joined((0, self._distances), (0, distances))


def texts_by_length(batches: Batches, start: int, stop: int) -> np.ndarray:
    """How many texts of each length the windows of steps `start` ... `stop` − 1 hold, which are of one
    portion: (T + 1,) int64.

    A window is one text of T tokens, or with packing `documents` as many as it has parts of documents.
    """
    length = batches.plan.at(start).length
    counts = np.zeros(length + 1, dtype=np.int64)
    for windows in batches.windows(start, stop):
        if batches.packing == "running":
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
    """From how many texts have n tokens, how many have a token of order p: those with n > p. (T,) int64."""
    return np.cumsum(texts[::-1])[::-1][1:].copy()


def unit_distances(texts: np.ndarray, sight: Sight) -> np.ndarray:
    """Pairs at each distance in texts of these lengths where positions rise by one: (T,) int64.

    A text of n tokens has n − d pairs at distance d; past the window only those whose key is a sink,
    min(sinks, n − d).
    """
    texts = above(texts)
    all_pairs = np.cumsum(texts[::-1])[::-1]
    window, sinks = sight
    if window is None or window >= len(all_pairs):
        return all_pairs.copy()
    further = np.append(all_pairs[sinks:], np.zeros(min(sinks, len(all_pairs)), dtype=np.int64))
    seen = all_pairs - further[: len(all_pairs)]
    seen[:window] = all_pairs[:window]
    return seen


def distances_of(placed: Placed, sight: Sight) -> np.ndarray:
    """Pairs that are seen, by the distance of their positions: (D,) int64. placed: arrays (b, T)."""
    counts, (window, sinks) = np.zeros(0, dtype=np.int64), sight
    length = placed.order.shape[1]
    for lag in range(length):
        beyond = window is not None and lag >= window
        if beyond and not sinks:
            break
        keys, queries = slice(0, length - lag), slice(lag, length)
        seen = placed.document[:, keys] == placed.document[:, queries]
        if beyond:
            seen &= placed.order[:, keys] < sinks
        apart = np.abs(placed.position[:, queries] - placed.position[:, keys])[seen]
        _, counts = _joined((0, counts), (0, _binned(apart)[1]) if apart.size else (0, counts[:0]))
    return counts


def _placed(batches: Batches, step: int) -> Placed:
    rows = np.arange(batches.plan.at(step).batch_size)
    return place(
        batches.packing, batches.positions, batches.begins(step), seed=batches.seed, step=step, rows=rows
    )


def _stacked(steps: list[Placed]) -> Placed:
    """All rows of several steps, every array of them at full size."""
    whole = [np.broadcast_arrays(one.order, one.position, one.document) for one in steps]
    order, position, document = (np.concatenate(arrays) for arrays in zip(*whole, strict=True))
    return Placed(order, position, document, steps[0].layout, steps[0].unit_steps)


def _binned(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Counts of the nearest whole numbers, from the smallest of them (or 0, if that is less) on."""
    whole = np.rint(values).astype(np.int64)
    first = min(0, int(whole.min()))
    return first, np.bincount(whole - first)


def _joined(a: tuple[int, np.ndarray], b: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """The sum of two counts with their first bins."""
    first = min(a[0], b[0])
    counts = np.zeros(max(one + len(values) for one, values in (a, b)) - first, dtype=np.int64)
    for one, values in (a, b):
        counts[one - first : one - first + len(values)] += values
    return first, counts


def write_exposure(folder: Path, exposure: Exposure, name: str = EXPOSURE) -> None:
    """Write the ledger into a run's folder, whole or not at all."""
    with atomic(folder / name) as file:
        np.savez_compressed(file, **vars(exposure))


def read_exposure(folder: Path, name: str = EXPOSURE) -> Exposure | None:
    """The ledger of a run's folder; None where it has none. Raises DataError where the file is damaged."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            arrays = {key: stored[key] for key in Exposure.__dataclass_fields__}
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise DataError(f"{path} is damaged; delete it, and it is counted anew") from error
    return Exposure(
        **{key: value if value.ndim else int(value) for key, value in arrays.items()}  # pyright: ignore
    )
