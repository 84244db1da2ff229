"""Intervals over training seeds and units (recipe (b)), for claims about a scheme and not a
checkpoint.

The array of a scheme is (S, D): the mean NLL of unit j under the model of seed s. Training seeds
and units are both samples, so both variances count; a bootstrap over documents alone covers 22 to
31% where seeds dominate. With fewer than 3 seeds of a scheme, or fewer than 6 units, only point
estimates are reported.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from errors import EvaluationError
from evaluation.statistics.intervals import (
    MANY_UNITS,
    POINTS_ONLY_BELOW,
    MeanInterval,
    smallest,
)

CLAIM_SEEDS = 3  # fewer seeds of a scheme: point estimates only
MANY_SEEDS = 10_000  # a larger number of seeds is not useful advice
FAMILY_POWER = 4 / 3  # of the shares of V in the degrees of freedom of a family; see `SeedVariance`


@dataclass(frozen=True)
class SeedVariance:
    """The parts of the variance of an estimate: of seed means, for each scheme (NaN with one seed),
    and of seed-averaged unit values."""

    of_seeds: tuple[float, ...]
    of_units: float
    family: int

    def total(self, seeds: Sequence[int], units: int) -> tuple[float, float]:
        """(V, its degrees of freedom 1 / Σ wᵖ/dfᵢ over the shares w of V); NaN where a part is
        unknown.

        p = 2 is Welch-Satterthwaite. It takes too many degrees of freedom where the largest
        variance happens to be estimated small, which shows in the far tail of a family: 6 schemes
        of 3 seeds with unequal variances have a simultaneous coverage of 89 to 95% at a nominal
        95%. p = 4/3 gives 94 to 98%, ends 0 to 30% wider.
        """
        sizes = np.array([*seeds, units])
        variances = np.array([*self.of_seeds, self.of_units]) / sizes
        total = float(variances.sum())
        if total == 0:
            return 0.0, float(sizes.min() - 1)
        power = 2 if self.family == 1 else FAMILY_POWER
        return total, float(1 / ((variances / total) ** power / (sizes - 1)).sum())

    def half(self, seeds: Sequence[int], units: int, alpha: float) -> float:
        """The half-width of an interval at level 1 − alpha."""
        variance, df = self.total(seeds, units)
        return float(stdtrit(df, 1 - alpha / 2)) * math.sqrt(variance)


@dataclass(frozen=True)
class SeedInterval(MeanInterval):
    """Of a mean over seeds and units. Ends are NaN if no claim is made."""

    df: float  # Welch-Satterthwaite, fewer in a family; NaN where a variance cannot be estimated
    seeds: tuple[int, ...]  # of each scheme
    variance: SeedVariance

    @property
    def claimed(self) -> bool:
        """Whether there are enough seeds and units for an interval."""
        return math.isfinite(self.low)


def compare(a: np.ndarray, b: np.ndarray, *, alpha: float = 0.05, family: int = 1) -> SeedInterval:
    """mean(a) − mean(b) for a (S_A, D) and b (S_B, D) over the same units, ± t(df)·√V.

    V = s²_A/S_A + s²_B/S_B (variances of seed means) + s²_doc/D (variance of the seed-averaged unit
    differences), df by Welch-Satterthwaite over the three, fewer in a family. Seeds of the two need
    not correspond.
    """
    if a.shape[1] != b.shape[1]:
        raise EvaluationError(
            f"two schemes are compared on the same units; these have {a.shape[1]} and {b.shape[1]}"
        )
    return _interval((a, b), a.mean(axis=0) - b.mean(axis=0), alpha / family, family)


def change(a: np.ndarray, *, alpha: float = 0.05, family: int = 1) -> SeedInterval:
    """mean(a) for a (S, D), a difference paired within each seed and unit, such as NLL(L) −
    NLL(L0)."""
    return _interval((a,), a.mean(axis=0), alpha / family, family)


def _interval(
    schemes: tuple[np.ndarray, ...], values: np.ndarray, alpha: float, family: int
) -> SeedInterval:
    """`values` (D,): the seed-averaged estimate of each unit."""
    if not all(np.isfinite(scheme).all() for scheme in schemes):
        raise EvaluationError("a mean NLL of a seed and unit is not finite")
    seeds = tuple(map(len, schemes))
    units = len(values)
    of_seeds = tuple(_variance(scheme.mean(axis=1)) for scheme in schemes)
    variance = SeedVariance(of_seeds, _variance(values), family)
    enough = min(seeds) >= CLAIM_SEEDS and units >= POINTS_ONLY_BELOW
    half = variance.half(seeds, units, alpha) if enough else math.nan
    mean = float(values.mean())
    _, df = variance.total(seeds, units)
    return SeedInterval(
        mean, mean - half, mean + half, 1 - alpha, family, units, df, seeds, variance
    )


def _variance(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else math.nan


def needed(interval: SeedInterval, half: float) -> tuple[int | None, int | None]:
    """(seeds of each scheme with these units, units with these seeds) for a half-width of at most
    `half`.

    Based on the three estimated variances of the interval; None if no number would be enough, or a
    variance or a claim is missing.
    """
    variance = interval.variance
    seeds = interval.seeds
    units = interval.units
    alpha = 1 - interval.level
    if math.isnan(interval.df):
        return None, None
    more_seeds = more_units = None
    if units >= POINTS_ONLY_BELOW:
        more_seeds = smallest(
            lambda n: variance.half([n] * len(seeds), units, alpha) <= half,
            CLAIM_SEEDS,
            MANY_SEEDS,
        )
    if min(seeds) >= CLAIM_SEEDS:
        more_units = smallest(
            lambda n: variance.half(seeds, n, alpha) <= half, POINTS_ONLY_BELOW, MANY_UNITS
        )
    return more_seeds, more_units
