"""Accuracy by length, depth and distance, each with an interval.

Accuracy per length is averaged over depth: the mean over haystacks of their items' share, with recipe (a) of
`evaluation.statistics`, simultaneous over all methods and lengths. Where every haystack has the same share,
recipe (a) has no width and is replaced by Wilson's interval with haystacks as items. Cells of the grids have
individual Wilson intervals, not simultaneous.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.binomial import effective, wilson
from evaluation.statistics.intervals import POINTS_ONLY_BELOW, Interval, interval, unit_means
from evaluation.tasks.measure import TaskResult

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
    """One method at one length. `low`, `high`: simultaneous, for `share.share`. `word`: compared with
    chance. `gain`: accuracy minus that with the context truncated to L0, over the same items."""

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
    """One cell of a grid: a method, a length, and the place of the answer: a depth, or tokens before the
    question, from `where` up to `until` (exclusive)."""

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
    unit, alpha = result.drawn.unit, 1 - result.settings.confidence
    family = len(result.answers)
    rows, by_depth, by_distance = [], [], []
    for method in result.methods:
        for length in result.drawn.lengths:
            answers = result.answers.get((method.label, length))
            if answers is None:
                continue
            right, exact = answers.right.astype(float), answers.exact.astype(float)
            means = unit_means(right, unit)
            low, high = _ends(means, right, unit, alpha / family)
            chance = result.drawn.chance
            word = "above chance" if low > chance else "below chance" if high < chance else UNDECIDED
            if math.isnan(low):
                word = "point estimate"
            rows.append(
                TaskRow(
                    method.label,
                    length,
                    share_of(right, unit, alpha),
                    share_of(exact, unit, alpha),
                    low,
                    high,
                    word,
                    _gain(result, method.label, length, right, alpha / family),
                    means.tolist(),
                    unit_means(exact, unit).tolist(),
                )
            )
            if not result.drawn.task.hides:
                continue
            for where, until, members in _by_depth(result):
                by_depth.append(_spot(method.label, length, where, until, members, right, exact, unit, alpha))
            for where, until, members in _by_distance(result, length):
                by_distance.append(
                    _spot(method.label, length, where, until, members, right, exact, unit, alpha)
                )
    return TaskAnalysis(rows, by_depth, by_distance, family, len(np.unique(unit)))


def share_of(hits: np.ndarray, unit: np.ndarray, alpha: float) -> Accuracy:
    """Wilson's interval for 0/1 `hits` (n,), whose haystacks `unit` (n,) may repeat."""
    _, inverse = np.unique(unit, return_inverse=True)
    n_eff = effective(len(hits), np.bincount(inverse, weights=hits), np.bincount(inverse))
    return Accuracy(len(hits), *wilson(float(hits.sum()), len(hits), alpha=alpha, n_eff=n_eff), n_eff)


def _ends(means: np.ndarray, hits: np.ndarray, unit: np.ndarray, alpha: float) -> tuple[float, float]:
    """Ends of the interval of a mean share over units, within 0 and 1; NaN with too few units."""
    if len(means) < POINTS_ONLY_BELOW:
        return math.nan, math.nan
    if np.ptp(means) == 0:
        one = share_of(hits, unit, alpha)
        return one.low, one.high
    found = interval(means, alpha=alpha, resamples=0)
    return max(0.0, found.low), min(1.0, found.high)


def _gain(result: TaskResult, label: str, length: int, right: np.ndarray, alpha: float) -> Interval | None:
    if label == TRUNCATE or length <= result.subject.trained_length:
        return None
    cut = result.answers.get((TRUNCATE, length))
    if cut is None:
        return None
    return interval(unit_means(right - cut.right, result.drawn.unit), alpha=alpha, resamples=0)


def _spot(label, length, where, until, members, right, exact, unit, alpha) -> DepthCell:
    shares = (share_of(hits[members], unit[members], alpha) for hits in (right, exact))
    return DepthCell(label, length, where, until, *shares)


def _by_depth(result: TaskResult) -> list[tuple[float, None, np.ndarray]]:
    drawn = result.drawn
    found = [(depth, None, np.flatnonzero(drawn.depth == k)) for k, depth in enumerate(drawn.depths)]
    return [one for one in found if len(one[2])]


def _by_distance(result: TaskResult, length: int) -> list[tuple[float, float, np.ndarray]]:
    """Items by the number of tokens between answer and question, in buckets of powers of two."""
    distance = np.array([item.distance or 0 for item in result.drawn.items[length]])
    edges = distance_edges(distance)
    found = [
        (low, high, np.flatnonzero((distance >= low) & (distance < high))) for low, high in pairwise(edges)
    ]
    return [one for one in found if len(one[2])]


def distance_edges(distance: Sequence[int] | np.ndarray) -> list[int]:
    """Powers of two around the distances."""
    low, high = int(np.min(distance)).bit_length() - 1, int(np.max(distance)).bit_length()
    return [1 << k for k in range(max(0, low), high + 1)]


def reference(result: TaskResult, analysis: TaskAnalysis) -> TaskRow | None:
    """The checkpoint as trained at its trained length."""
    l0 = result.subject.trained_length
    return next((row for row in analysis.rows if row.method == TRAINED and row.length == l0), None)
