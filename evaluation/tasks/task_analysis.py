"""Accuracy by length, depth and distance, each with an interval.

Accuracy per length is averaged over depth: the mean over haystacks of their items' share, with
    recipe (a) of
`evaluation.statistics`, simultaneous over all methods and lengths. Where every haystack has the
same share, recipe (a) has no width and is replaced by Wilson's interval with haystacks as items.
Cells of the grids have individual Wilson intervals, not simultaneous.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.binomial import effective, wilson
from evaluation.statistics.intervals import Interval, interval, unit_means
from evaluation.tasks.task_session import TaskResult

UNDECIDED = "not distinguishable from chance"


@dataclass(frozen=True)
class Accuracy:
    """Accuracy with Wilson's interval for `n_eff` independent items."""

    n: int
    share: float
    low: float
    high: float
    n_eff: float


@dataclass(frozen=True)
class TaskRow:
    """One method at one length. `low`, `high`: simultaneous, for `share.share`. `word`: compared
    with chance. `gain`: accuracy minus that with the context truncated to L0, over the same
    items."""

    method: str
    length: int
    share: Accuracy
    exact: Accuracy
    low: float
    high: float
    word: str
    gain: Interval | None
    unit_share: list[float]
    unit_exact: list[float]


@dataclass(frozen=True)
class DepthCell:
    """One cell of a grid: a method, a length, and the place of the answer: a depth, or tokens
    before the question, from `where` up to `until` (exclusive)."""

    method: str
    length: int
    where: float
    until: float | None
    share: Accuracy
    exact: Accuracy


@dataclass(frozen=True)
class TaskAnalysis:
    rows: list[TaskRow]
    by_depth: list[DepthCell]
    by_distance: list[DepthCell]
    family: int
    units: int


def analyse_tasks(result: TaskResult) -> TaskAnalysis:
    """Compute every number of a task report."""
    drawn = result.drawn
    alpha = 1 - result.settings.confidence
    family = len(result.answers)
    unit = drawn.unit
    found = TaskAnalysis([], [], [], family, len(np.unique(drawn.unit)))
    for cell in [(method.label, n) for method in result.methods for n in drawn.lengths]:
        if cell not in result.answers:
            continue
        right, exact = (
            hits.astype(float) for hits in (result.answers[cell].right, result.answers[cell].exact)
        )
        means = unit_means(right, unit)
        low, high = _ends(means, right, unit, alpha / family)
        word = (
            "above chance"
            if low > drawn.chance
            else "below chance"
            if high < drawn.chance
            else UNDECIDED
        )
        found.rows.append(
            TaskRow(
                *cell,
                share_of(right, unit, alpha),
                share_of(exact, unit, alpha),
                low,
                high,
                "point estimate" if math.isnan(low) else word,
                _gain(result, cell, right, alpha / family),
                means.tolist(),
                unit_means(exact, unit).tolist(),
            )
        )
        for cells, place, edges in _grids(result, cell[1]):
            for where, until in edges:
                here = (place == where) if until is None else (place >= where) & (place < until)
                if here.any():
                    shares = (share_of(hits[here], unit[here], alpha) for hits in (right, exact))
                    getattr(found, cells).append(DepthCell(*cell, where, until, *shares))
    return found


def share_of(hits: np.ndarray, unit: np.ndarray, alpha: float) -> Accuracy:
    """Wilson's interval for 0/1 `hits` (n,), whose haystacks `unit` (n,) may repeat."""
    _, inverse = np.unique(unit, return_inverse=True)
    n = len(hits)
    total = float(hits.sum())
    n_eff = effective(np.bincount(inverse, weights=hits), np.bincount(inverse))
    low, high = wilson(total, n, alpha=alpha, n_eff=n_eff)
    return Accuracy(n, total / n, low, high, n_eff)


def _ends(
    means: np.ndarray, hits: np.ndarray, unit: np.ndarray, alpha: float
) -> tuple[float, float]:
    """Ends of the interval of a mean share over units, within 0 and 1; NaN with too few units."""
    found = interval(means, alpha=alpha, resamples=0)
    if np.ptp(means) == 0 and not math.isnan(found.low):
        found = share_of(hits, unit, alpha)
    return float(np.clip(found.low, 0, 1)), float(np.clip(found.high, 0, 1))


def _gain(
    result: TaskResult, cell: tuple[str, int], right: np.ndarray, alpha: float
) -> Interval | None:
    cut = result.answers.get((TRUNCATE, cell[1]))
    if cell[0] == TRUNCATE or cell[1] <= result.subject.trained_length or cut is None:
        return None
    return interval(
        unit_means(right - cut.right, result.drawn.unit),
        alpha=alpha,
        resamples=0,
    )


def _grids(result: TaskResult, length: int) -> Iterator[tuple[str, np.ndarray, list[tuple]]]:
    """The grids of a task that hides something: name, place of every item, and the rows as (where,
    until)."""
    drawn = result.drawn
    if drawn.task.hides:
        yield (
            "by_depth",
            np.array(drawn.depths)[drawn.depth],
            [(depth, None) for depth in drawn.depths],
        )
        distance = np.array([item.distance or 0 for item in drawn.items[length]])
        yield "by_distance", distance, list(pairwise(distance_edges(distance)))


def distance_edges(distance: Sequence[int] | np.ndarray) -> list[int]:
    """Powers of two around the distances."""
    low = int(np.min(distance)).bit_length() - 1
    high = int(np.max(distance)).bit_length()
    return [1 << k for k in range(max(0, low), high + 1)]


def reference(result: TaskResult, analysis: TaskAnalysis) -> TaskRow | None:
    """The checkpoint as trained at its trained length."""
    l0 = result.subject.trained_length
    return next((row for row in analysis.rows if row.method == TRAINED and row.length == l0), None)
