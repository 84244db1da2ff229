"""Confidence intervals over independent units by Student's t.

A unit is a document, or a cluster where the corpus defines clusters. The intervals describe these
checkpoints on such documents; they do not include the variance between training seeds.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from data.preparation.summary import POINTS_ONLY_BELOW


@dataclass(frozen=True)
class MeanInterval:
    """A two-sided interval for a mean. Ends are NaN where only the point estimate is reported."""

    estimate: float
    low: float
    high: float
    level: float  # 0.95 for a 95% interval, after the split over `family`
    family: int
    units: int
    seeds: tuple[int, ...] = ()  # of each scheme, where training seeds are a sample too


def unit_means(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Mean of `values` (n,) over each unit that occurs in `unit` (n,), ascending: (D,)."""
    _, inverse, counts = np.unique(unit, return_inverse=True, return_counts=True)
    return np.bincount(inverse, weights=values) / counts


def interval(means: np.ndarray, *, alpha: float = 0.05, family: int = 1) -> MeanInterval:
    """mean ± t(D−1)·sd/√D at level 1 − alpha/family (simultaneous over `family` intervals by
    Bonferroni). At alpha 0.05 `high` is also the one-sided 97.5% upper bound."""
    units = len(means)
    half = math.nan
    if units >= POINTS_ONLY_BELOW:
        half = half_width(float(means.std(ddof=1)), units, alpha / family)
    return around(means, half, alpha, family)


def around(
    means: np.ndarray, half: float, alpha: float, family: int, seeds: tuple[int, ...] = ()
) -> MeanInterval:
    """The interval of the mean of `means` (D,), ± half."""
    mean = float(means.mean())
    return MeanInterval(
        estimate=mean,
        low=mean - half,
        high=mean + half,
        level=1 - alpha / family,
        family=family,
        units=len(means),
        seeds=seeds,
    )


def half_width(sd: float, units: int, alpha: float) -> float:
    """Of the interval of a mean over so many units with this standard deviation."""
    t = float(stdtrit(units - 1, 1 - alpha / 2))
    return t * sd / math.sqrt(units)


def interval_columns(name: str, mean: MeanInterval | None) -> dict[str, float | None]:
    """`name`, `name_low` and `name_high` of an interval; None for what does not exist."""
    return {
        name: mean and mean.estimate,
        f"{name}_low": mean and mean.low,
        f"{name}_high": mean and mean.high,
    }


def mean_over_units(values: np.ndarray, unit: np.ndarray, confidence: float) -> dict:
    """value, low and high: mean and interval over units of the finite values (n,)."""
    known = np.isfinite(values)
    if not known.any():
        return {"value": math.nan}
    mean = interval(unit_means(values[known], unit[known]), alpha=1 - confidence)
    return {"value": mean.estimate, "low": mean.low, "high": mean.high}
