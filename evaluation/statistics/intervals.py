"""Intervals of means over targets or items, with the units of the targets or items as the sample.

A unit is a document, or a cluster if the corpus defines clusters. Values of one checkpoint are unit
means (D,): the intervals describe this checkpoint on similar documents. Values of a scheme are unit
means of each training seed (S, D): seeds and units are both samples, so both variances count. A
bootstrap over documents alone covers only 22 to 31% if the variance of the seeds dominates. The
estimator is the mean over targets (`mean_over_targets`). With fewer than 6 units, or fewer than 3
seeds of a scheme, only point estimates are reported.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from data.preparation.summary import POINTS_ONLY_BELOW
from errors import EvaluationError
from evaluation.fixed_target_loss import half_width, mean_over_targets

LEAST_SEEDS = 3  # fewer seeds per scheme give point estimates only
FAMILY_POWER = 4 / 3  # power of the shares of V in the degrees of freedom of a family


class MeanInterval(NamedTuple):
    """A two-sided interval for a mean, in the columns of a table of results. Ends are NaN where
    only the point estimate is reported."""

    value: float
    low: float
    high: float
    units: int
    seeds: str  # `4 and 3`: numbers of training seeds of each scheme, if seeds are a sample too
    family: int
    level: float  # simultaneous level of all intervals of the family


def unit_counts(unit: np.ndarray) -> np.ndarray:
    """Number of times that each unit occurs in `unit` (n,), units ascending: (D,)."""
    return np.unique(unit, return_counts=True)[1]


def unit_means(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Mean of `values` (n,) over each unit that occurs in `unit` (n,), ascending: (D,)."""
    _, inverse, counts = np.unique(unit, return_inverse=True, return_counts=True)
    return np.bincount(inverse, weights=values) / counts


def seed_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(S,) the mean of each seed over all targets, from its unit means `values` (S, D)."""
    return values @ counts / counts.sum()


def interval(
    values: np.ndarray,
    counts: np.ndarray,
    *,
    minus: np.ndarray | None = None,
    alpha: float = 0.05,
    family: int = 1,
) -> MeanInterval:
    """The mean over all targets at level 1 − alpha/family, simultaneous over `family` intervals by
    Bonferroni. At alpha 0.05 `high` is also the one-sided 97.5% upper bound.

    With seeds it is ± t(df)·√V for V = Σ s²/S (variances of the seed means of each scheme) + the
    variance of the mean over units of the seed-averaged values.

    Args:
        values: unit means (D,) of one checkpoint, or (S, D) of one scheme, such as differences that
            are paired within each seed and unit.
        counts: (D,) targets of each unit.
        minus: (S_B, D) unit means of another scheme on the same units, to subtract; seeds need not
            correspond.
    """
    schemes = [each for each in (values, minus) if each is not None]
    units = len(counts)
    if any(each.shape[-1] != units for each in schemes):
        raise EvaluationError(
            f"two schemes are compared on the same units; these have "
            f"{', '.join(str(each.shape[-1]) for each in schemes)}"
        )
    if not all(np.isfinite(each).all() for each in schemes):
        raise EvaluationError("a mean of a seed and unit is not finite")
    seeds = tuple(map(len, schemes)) if values.ndim == 2 else ()
    first, *second = [each.mean(axis=0) if seeds else each for each in schemes]
    mean, error = mean_over_targets((first - second[0] if second else first) * counts, counts)
    half = math.nan
    if units >= POINTS_ONLY_BELOW and min(seeds, default=LEAST_SEEDS) >= LEAST_SEEDS:
        half = half_width(error, units - 1, alpha / family)
        if seeds:
            parts = [(seed_means(x, counts).var(ddof=1) / len(x), len(x) - 1) for x in schemes]
            power = 2 if family == 1 else FAMILY_POWER
            half = half_width_of_sum([*parts, (error**2, units - 1)], alpha / family, power)
    names = " and ".join(map(str, seeds))
    return MeanInterval(mean, mean - half, mean + half, units, names, family, round(1 - alpha, 9))


def half_width_of_sum(
    parts: Sequence[tuple[float, float]], alpha: float, power: float = 2
) -> float:
    """t(df)·√V for the sum V of independent variances. df = 1 / Σ wᵖ/dfᵢ over the shares w of V.

    p = 2 is Welch-Satterthwaite. It has too many degrees of freedom if the estimate of the largest
    variance happens to be small, which matters in the far tail of a family: 6 schemes of 3 seeds
    with unequal variances have a simultaneous coverage of 89 to 95% at a nominal 95%. p = 4/3 gives
    94 to 98%, with intervals 0 to 30% wider.

    Args:
        parts: each variance, with the degrees of freedom of its estimate.
    """
    variances, dfs = np.array(parts, dtype=np.float64).T
    total = float(variances.sum())
    if total == 0:
        return 0.0
    df = float(1 / ((variances / total) ** power / dfs).sum())
    return half_width(math.sqrt(total), df, alpha)


def interval_over_units(
    values: np.ndarray,
    unit: np.ndarray,
    *,
    alpha: float = 0.05,
    family: int = 1,
) -> MeanInterval:
    """The mean of `values` (n,), whose units are `unit` (n,)."""
    return interval(unit_means(values, unit), unit_counts(unit), alpha=alpha, family=family)


def interval_columns(name: str, mean: MeanInterval | None) -> dict[str, float | None]:
    """`name`, `name_low` and `name_high` of an interval; None for missing ones."""
    value, low, high = (None, None, None) if mean is None else mean[:3]
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def mean_over_units(values: np.ndarray, unit: np.ndarray, confidence: float) -> dict:
    """value, low and high: mean and interval over units of the finite values (n,)."""
    known = np.isfinite(values)
    if not known.any():
        return {"value": math.nan}
    mean = interval_over_units(values[known], unit[known], alpha=1 - confidence)
    return dict(zip(("value", "low", "high"), mean, strict=False))


def wilson(hits: float, n: int, *, alpha: float = 0.05, n_eff: float) -> tuple[float, float]:
    """(low, high) by Wilson's score interval (1927), `n_eff` in place of n for dependent items.

    The ends lie in [0, 1] and are defined for 0 and for n hits too.
    """
    share = hits / n
    z = NormalDist().inv_cdf(1 - alpha / 2)
    square = z * z
    scale = 1 + square / n_eff
    center = (share + square / (2 * n_eff)) / scale
    variance = share * (1 - share) / n_eff + square / (4 * n_eff * n_eff)
    half = z / scale * math.sqrt(variance)
    # At a share of 0 or 1 one end is the share itself, without rounding error.
    low = 0.0 if share == 0 else max(0.0, center - half)
    high = 1.0 if share == 1 else min(1.0, center + half)
    return low, high


def effective(hits: np.ndarray, items: np.ndarray) -> float:
    """Effective number of independent items among n dependent ones: p(1−p)/V, at most n.

    `hits`, `items` (haystacks,): right answers and questions of each haystack. V is the variance of
    the share with haystacks as the sample. If all answers are correct, or all wrong, V is undefined
    and the number of haystacks, a lower bound, is returned.
    """
    n = float(items.sum())
    haystacks = len(items)
    p, error = mean_over_targets(hits, items)
    if haystacks == n or haystacks == 1 or p in (0.0, 1.0):
        return float(haystacks)
    return n if error == 0 else min(n, p * (1 - p) / error**2)
