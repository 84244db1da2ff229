"""Confidence intervals over independent units by Student's t.

A unit is a document, or a cluster where the corpus defines clusters. The intervals describe these
checkpoints on such documents; they do not include the variance between training seeds.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from data.preparation.summary import POINTS_ONLY_BELOW

MANY_UNITS = 10**7  # a larger number of units, or of spans, is not useful advice
MANY_SPANS = 10_000


@dataclass(frozen=True)
class MeanInterval:
    """A two-sided interval for a mean. Ends are NaN where only the point estimate is reported."""

    estimate: float
    low: float
    high: float
    level: float  # 0.95 for a 95% interval, after the split over `family`
    family: int
    units: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Interval(MeanInterval):
    """Of a mean over units."""

    sd: float  # of the unit means


def unit_means(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Mean of `values` (n,) over each unit that occurs in `unit` (n,), ascending: (D,)."""
    _, inverse, counts = np.unique(unit, return_inverse=True, return_counts=True)
    return np.bincount(inverse, weights=values) / counts


def interval(means: np.ndarray, *, alpha: float = 0.05, family: int = 1) -> Interval:
    """mean ± t(D−1)·sd/√D at level 1 − alpha/family (simultaneous over `family` intervals by
    Bonferroni). At alpha 0.05 `high` is also the one-sided 97.5% upper bound."""
    n = len(means)
    mean = float(means.mean())
    alpha = alpha / family
    sd = float(means.std(ddof=1)) if n > 1 else math.nan
    half = half_width(sd, n, alpha) if n >= POINTS_ONLY_BELOW else math.nan
    return Interval(mean, mean - half, mean + half, 1 - alpha, family, n, sd)


def half_width(sd: float, units: int, alpha: float) -> float:
    """Of the interval of a mean over so many units with this standard deviation."""
    return float(stdtrit(units - 1, 1 - alpha / 2)) * sd / math.sqrt(units)


def units_needed(sd: float, half: float, *, alpha: float = 0.05) -> int:
    """The smallest number of units whose interval has a half-width of at most `half`, given `sd`;
    `MANY_UNITS` where no smaller number is enough."""
    units = smallest(lambda n: half_width(sd, n, alpha) <= half, POINTS_ONLY_BELOW, MANY_UNITS)
    return MANY_UNITS if units is None else units


def smallest(enough: Callable[[int], bool], start: int, limit: int) -> int | None:
    """The smallest n >= `start` that is enough, as is every larger one; None above `limit`."""
    n = bisect_left(range(limit + 1), True, lo=start, key=enough)
    return None if n > limit else n


def spans_needed(
    span_means: np.ndarray, unit: np.ndarray, half: float, *, alpha: float = 0.05
) -> int | None:
    """Spans per document that would give the half-width with the same documents; None if not even
    `MANY_SPANS` would.

    `span_means` (documents, N), `unit` (documents,) of each. More spans reduce only the variance
    within documents.
    """
    spans = span_means.shape[1]
    _, counts = np.unique(unit, return_counts=True)
    units = len(counts)
    if units < POINTS_ONLY_BELOW or spans < 2:
        return None
    # with one span each
    within = float(span_means.var(axis=1, ddof=1).mean()) * float((1 / counts).mean())
    means = unit_means(span_means.mean(axis=1), unit)
    rest = max(0.0, float(means.var(ddof=1)) - within / spans)
    allowed = (half / half_width(1.0, units, alpha)) ** 2 - rest
    needed = max(1, math.ceil(within / allowed)) if allowed > 0 else math.inf
    return int(needed) if needed <= MANY_SPANS else None


def interval_columns(name: str, one: MeanInterval | None) -> dict[str, float | None]:
    """`name`, `name_low` and `name_high` of an interval; None for what does not exist."""
    ends = (None, None, None) if one is None else (one.estimate, one.low, one.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def mean_over_units(values: np.ndarray, unit: np.ndarray, confidence: float) -> dict:
    """value, low and high: mean and interval over units of the finite values (n,)."""
    known = np.isfinite(values)
    if not known.any():
        return {"value": math.nan}
    mean = interval(unit_means(values[known], unit[known]), alpha=1 - confidence)
    return {"value": mean.estimate, "low": mean.low, "high": mean.high}
