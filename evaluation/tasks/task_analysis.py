"""Accuracy by length and depth, each with an interval.

In text, accuracy per length is averaged over depth: the share of correct items, with an interval
over haystacks, simultaneous over all methods and lengths. If every haystack has the same share,
this interval has no width and is replaced by Wilson's interval with haystacks as items. On symbols,
intervals of exact match are Wilson's. Cells by depth have individual Wilson intervals, not
simultaneous.
"""

import math
from collections.abc import Iterator

import numpy as np

from evaluation.methods import TRUNCATE
from evaluation.statistics.intervals import (
    effective,
    interval_columns,
    interval_over_units,
    unit_means,
    wilson,
)
from evaluation.tasks.task_session import TaskMeasurement

ABOVE_CHANCE = "above chance"
UNDECIDED = "not distinguishable from chance"


def analyse_tasks(measurement: TaskMeasurement) -> dict[str, list[dict]]:
    """Cells of results.json: for each method and length (`cells`), and in text for each depth of
    the answer (`by_depth`)."""
    cells = {"cells": [_cell(measurement, *where) for where in measurement.answers]}
    if measurement.drawn.in_text:
        cells["by_depth"] = [
            cell for where in measurement.answers for cell in _by_depth(measurement, *where)
        ]
    return cells


def _cell(measurement: TaskMeasurement, method: str, length: int) -> dict:
    drawn = measurement.drawn
    unit = drawn.unit
    alpha = 1 - measurement.settings.confidence
    joint = alpha / len(measurement.answers)
    metrics = measurement.metrics((method, length))
    cell: dict = {"method": method, "length": length}
    for name, values in metrics.items():
        if name == "exact":
            share = share_of(values, unit, alpha if drawn.in_text else joint)
            low, high = share["low"], share["high"]
        else:
            low, high = unit_interval(values, unit, joint)
        cell |= {
            name: float(values.mean()),
            f"{name}_low": low,
            f"{name}_high": high,
            f"unit_{name}": unit_means(values, unit).tolist(),
        }
    main = next(iter(metrics))
    chance = drawn.lengths[length].chance
    cell["against_chance"] = against(cell[f"{main}_low"], cell[f"{main}_high"], chance)
    if not drawn.in_text:
        return {**cell, "chance": chance, "shortest": drawn.lengths[length].shortest}
    gain = None
    is_beyond = length > measurement.subject.trained_length
    if method != TRUNCATE and is_beyond and (TRUNCATE, length) in measurement.answers:
        truncated = measurement.metrics((TRUNCATE, length))["accuracy"]
        gain = interval_over_units(metrics["accuracy"] - truncated, unit, alpha=joint)
    return cell | interval_columns("gain", gain)


def against(low: float, high: float, chance: float) -> str:
    """The verdict of an interval against chance."""
    if math.isnan(low):
        return "point estimate"
    if low > chance:
        return ABOVE_CHANCE
    return "below chance" if high < chance else UNDECIDED


def _by_depth(measurement: TaskMeasurement, method: str, length: int) -> Iterator[dict]:
    drawn = measurement.drawn
    right = measurement.metrics((method, length))["accuracy"]
    for n in np.unique(drawn.depth).tolist():
        here = drawn.depth == n
        share = share_of(right[here], drawn.unit[here], 1 - measurement.settings.confidence)
        yield {"method": method, "length": length, "where": drawn.depths[n], "share": share}


def share_of(hits: np.ndarray, unit: np.ndarray, alpha: float) -> dict:
    """The share of 0/1 `hits` (n,) with Wilson's interval; haystacks `unit` (n,) may repeat."""
    _, inverse = np.unique(unit, return_inverse=True)
    n = len(hits)
    total = float(hits.sum())
    n_eff = effective(np.bincount(inverse, weights=hits), np.bincount(inverse))
    low, high = wilson(total, n, alpha=alpha, n_eff=n_eff)
    return {"n": n, "share": total / n, "low": low, "high": high, "n_eff": n_eff}


def unit_interval(hits: np.ndarray, unit: np.ndarray, alpha: float) -> tuple[float, float]:
    """Ends of the interval over units of the share of `hits` (n,), whose units are `unit` (n,);
    within 0 and 1, NaN with too few units."""
    mean = interval_over_units(hits, unit, alpha=alpha)
    ends = (mean.low, mean.high)
    if np.ptp(unit_means(hits, unit)) == 0 and not math.isnan(mean.low):
        share = share_of(hits, unit, alpha)
        ends = (share["low"], share["high"])
    low, high = np.clip(ends, 0, 1).tolist()
    return low, high
