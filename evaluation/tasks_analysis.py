"""From answers to shares: accuracy by length, depth and distance, each with an interval.

Accuracy per length is averaged over depth: the mean over haystacks of their items' share, with recipe (a) of
`evaluation.statistics`, simultaneous over all rules and lengths. Where every haystack has the same share,
recipe (a) has no width, and Wilson's interval with haystacks as its items stands in its place. Cells of the
grids have Wilson intervals of their own, not simultaneous.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.binomial import effective, wilson
from evaluation.rules import TRAINED, TRUNCATE
from evaluation.statistics import POINTS_ONLY_BELOW, Interval, interval, unit_means
from evaluation.tasks_measure import TaskResult

UNDECIDED = "not told from chance"


@dataclass(frozen=True)
class Share:
    """A share of right answers with Wilson's interval, for `n_eff` items."""

    n: int
    share: float
    low: float
    high: float
    n_eff: float


@dataclass(frozen=True)
class Row:
    """One rule at one length. `low`, `high`: simultaneous, for `share.share`. `word`: against chance.
    `gain`: accuracy less that with the context cut to L0, over the same items."""

    rule: str
    length: int
    share: Share
    exact: Share
    low: float
    high: float
    word: str
    gain: Interval | None
    unit_share: list[float]
    unit_exact: list[float]


@dataclass(frozen=True)
class Spot:
    """One cell of a grid: a rule, a length, and where the answer stood: a depth, or tokens before the
    question, from `where` to below `until`."""

    rule: str
    length: int
    where: float
    until: float | None
    share: Share
    exact: Share


@dataclass(frozen=True)
class TaskAnalysis:
    rows: list[Row]
    by_depth: list[Spot]
    by_distance: list[Spot]
    family: int
    units: int


def analyse_tasks(result: TaskResult) -> TaskAnalysis:
    """Everything a report says of a result, each number made in one place."""
    unit, alpha = result.drawn.unit, 1 - result.settings.confidence
    family = len(result.answers)
    rows, by_depth, by_distance = [], [], []
    for rule in result.rules:
        for length in result.drawn.lengths:
            answers = result.answers.get((rule.label, length))
            if answers is None:
                continue
            right, exact = answers.right.astype(float), answers.exact.astype(float)
            means = unit_means(right, unit)
            low, high = _ends(means, right, unit, alpha / family)
            chance = result.drawn.chance
            word = "above chance" if low > chance else "below chance" if high < chance else UNDECIDED
            if math.isnan(low):
                word = "a point"
            rows.append(
                Row(
                    rule.label,
                    length,
                    share_of(right, unit, alpha),
                    share_of(exact, unit, alpha),
                    low,
                    high,
                    word,
                    _gain(result, rule.label, length, right, alpha / family),
                    means.tolist(),
                    unit_means(exact, unit).tolist(),
                )
            )
            if not result.drawn.task.hides:
                continue
            for where, until, members in _by_depth(result):
                by_depth.append(_spot(rule.label, length, where, until, members, right, exact, unit, alpha))
            for where, until, members in _by_distance(result, length):
                by_distance.append(
                    _spot(rule.label, length, where, until, members, right, exact, unit, alpha)
                )
    return TaskAnalysis(rows, by_depth, by_distance, family, len(np.unique(unit)))


def share_of(hits: np.ndarray, unit: np.ndarray, alpha: float) -> Share:
    """Wilson's interval for 0/1 `hits` (n,), whose haystacks `unit` (n,) may repeat."""
    _, inverse = np.unique(unit, return_inverse=True)
    n_eff = effective(len(hits), np.bincount(inverse, weights=hits), np.bincount(inverse))
    return Share(len(hits), *wilson(float(hits.sum()), len(hits), alpha=alpha, n_eff=n_eff), n_eff)


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


def _spot(label, length, where, until, members, right, exact, unit, alpha) -> Spot:
    shares = (share_of(hits[members], unit[members], alpha) for hits in (right, exact))
    return Spot(label, length, where, until, *shares)


def _by_depth(result: TaskResult) -> list[tuple[float, None, np.ndarray]]:
    drawn = result.drawn
    found = [(depth, None, np.flatnonzero(drawn.depth == k)) for k, depth in enumerate(drawn.depths)]
    return [one for one in found if len(one[2])]


def _by_distance(result: TaskResult, length: int) -> list[tuple[float, float, np.ndarray]]:
    """Items by how many tokens lie between answer and question, in buckets that double."""
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


def reference(result: TaskResult, analysis: TaskAnalysis) -> Row | None:
    """The checkpoint as trained at its trained length."""
    l0 = result.subject.trained_length
    return next((row for row in analysis.rows if row.rule == TRAINED and row.length == l0), None)
