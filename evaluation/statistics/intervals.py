"""Confidence intervals over independent units: means over targets with cluster-robust errors.

A unit is a document, or a cluster where the corpus defines clusters. The estimator is that of
`fixed_targets.ratio_interval`, here from the mean and the number of targets of each unit. The
intervals describe these checkpoints on such documents; they do not include the variance between
training seeds.
"""

import math
from dataclasses import dataclass

import numpy as np

from evaluation.fixed_targets import ratio_interval


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


def unit_counts(unit: np.ndarray) -> np.ndarray:
    """How often each unit occurs in `unit` (n,), ascending: (D,)."""
    return np.unique(unit, return_counts=True)[1]


def unit_means(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Mean of `values` (n,) over each unit that occurs in `unit` (n,), ascending: (D,)."""
    _, inverse, counts = np.unique(unit, return_inverse=True, return_counts=True)
    return np.bincount(inverse, weights=values) / counts


def interval(
    means: np.ndarray, counts: np.ndarray, *, alpha: float = 0.05, family: int = 1
) -> MeanInterval:
    """The mean over all targets of units with these `means` (D,) and `counts` (D,) of targets, at
    level 1 − alpha/family (simultaneous over `family` intervals by Bonferroni). At alpha 0.05
    `high` is also the one-sided 97.5% upper bound."""
    ends = ratio_interval(means * counts, counts, alpha / family)
    return MeanInterval(*ends, level=1 - alpha / family, family=family, units=len(counts))


def interval_over_units(
    values: np.ndarray, unit: np.ndarray, *, alpha: float = 0.05, family: int = 1
) -> MeanInterval:
    """The mean of `values` (n,), whose units are `unit` (n,)."""
    return interval(unit_means(values, unit), unit_counts(unit), alpha=alpha, family=family)


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
    mean = interval_over_units(values[known], unit[known], alpha=1 - confidence)
    return {"value": mean.estimate, "low": mean.low, "high": mean.high}
