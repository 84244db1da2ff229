"""Accuracy by length, depth and distance, each with an interval.

Accuracy per length is averaged over depth: the share of right items, with the interval over
haystacks, simultaneous over all methods and lengths. Where every haystack has the
same share, this interval has no width and is replaced by Wilson's interval with haystacks as items.
Cells of the grids have individual Wilson intervals, not simultaneous.
"""

import math

import numpy as np

from evaluation.scoring.methods import TRUNCATE
from evaluation.statistics.intervals import (
    effective,
    interval_columns,
    interval_over_units,
    unit_means,
    wilson,
)
from evaluation.tasks.task_session import TaskResult

ABOVE_CHANCE = "above chance"
UNDECIDED = "not distinguishable from chance"


def analyse_tasks(result: TaskResult) -> dict[str, list[dict]]:
    """Cells of results.json: of each method and length (`cells`), and of each place of the answer
    (`by_depth`, `by_distance`): a depth, or tokens before the question, from `where` up to `until`
    (exclusive)."""
    drawn = result.drawn
    cells = []
    by_depth = []
    by_distance = []
    for label, length in result.answers:
        cells.append(_row(result, label, length))
        depth = np.array(drawn.depths)[drawn.depth]
        by_depth += _grid(result, label, length, depth, doubles=False)
        # the power of two at or below each distance
        distance = np.array([item.distance for item in drawn.items[length]])
        octave = 2 ** np.frexp(distance)[1] // 2
        by_distance += _grid(result, label, length, octave, doubles=True)
    return {"cells": cells, "by_depth": by_depth, "by_distance": by_distance}


def _row(result: TaskResult, method: str, length: int) -> dict:
    unit = result.drawn.unit
    chance = result.drawn.chance
    alpha = 1 - result.settings.confidence
    joint = alpha / len(result.answers)
    answers = result.answers[method, length]
    right = answers.right.astype(float)
    exact = answers.exact.astype(float)
    low, high = unit_interval(right, unit, joint)
    word = UNDECIDED
    if math.isnan(low):
        word = "point estimate"
    elif low > chance:
        word = ABOVE_CHANCE
    elif high < chance:
        word = "below chance"
    gain = None
    truncated = result.answers.get((TRUNCATE, length))
    if method != TRUNCATE and length > result.subject.trained_length and truncated is not None:
        gain = interval_over_units(right - truncated.right, unit, alpha=joint)
    share = share_of(right, unit, alpha)
    of_exact = share_of(exact, unit, alpha)
    return {
        "method": method,
        "length": length,
        "accuracy": share["share"],
        "accuracy_low": low,
        "accuracy_high": high,
        "against_chance": word,
        "wilson_low": share["low"],
        "wilson_high": share["high"],
        "n_eff": share["n_eff"],
        "exact": of_exact["share"],
        "exact_low": of_exact["low"],
        "exact_high": of_exact["high"],
        **interval_columns("gain", gain),
        "unit_accuracy": unit_means(right, unit).tolist(),
        "unit_exact": unit_means(exact, unit).tolist(),
    }


def _grid(
    result: TaskResult,
    method: str,
    length: int,
    places: np.ndarray,
    doubles: bool,
) -> list[dict]:
    """A cell for each place of an item (n,); `doubles`: up to twice the place, and not at 0."""
    unit = result.drawn.unit
    alpha = 1 - result.settings.confidence
    answers = result.answers[method, length]
    cells = []
    for where in np.unique(places[places > 0] if doubles else places).tolist():
        here = places == where
        cells.append(
            {
                "method": method,
                "length": length,
                "where": where,
                "until": 2 * where if doubles else None,
                "share": share_of(answers.right[here], unit[here], alpha),
            }
        )
    return cells


def share_of(hits: np.ndarray, unit: np.ndarray, alpha: float) -> dict:
    """The share of 0/1 `hits` (n,) with Wilson's interval; haystacks `unit` (n,) may repeat."""
    _, inverse = np.unique(unit, return_inverse=True)
    n = len(hits)
    total = float(hits.sum())
    n_eff = effective(np.bincount(inverse, weights=hits), np.bincount(inverse))
    low, high = wilson(total, n, alpha=alpha, n_eff=n_eff)
    return {"n": n, "share": total / n, "low": low, "high": high, "n_eff": n_eff}


def unit_interval(hits: np.ndarray, unit: np.ndarray, alpha: float) -> tuple[float, float]:
    """Ends of the interval of the share of `hits` (n,) over units `unit` (n,), within 0 and 1; NaN
    with too few units."""
    mean = interval_over_units(hits, unit, alpha=alpha)
    ends = (mean.low, mean.high)
    if np.ptp(unit_means(hits, unit)) == 0 and not math.isnan(mean.low):
        share = share_of(hits, unit, alpha)
        ends = (share["low"], share["high"])
    low, high = np.clip(ends, 0, 1).tolist()
    return low, high
