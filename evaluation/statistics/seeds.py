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

from errors import EvaluationError
from evaluation.statistics.intervals import POINTS_ONLY_BELOW, MeanInterval, smallest, t_quantile

CLAIM_SEEDS = 3  # fewer seeds of a scheme: point estimates only
MANY_SEEDS = 10_000  # a larger number of seeds is not useful advice
MANY_UNITS = 10**7
FAMILY_POWER = 4 / 3  # of the shares of V in the degrees of freedom of a family; see `SeedVariance`


@dataclass(frozen=True)
class SeedVariance:
    """The parts of the variance of an estimate: of seed means, for each scheme (NaN with one seed),
    and of seed-averaged unit values. `pooled_df`: of a seed variance pooled over schemes by
    declaration."""

    of_seeds: tuple[float, ...]
    of_units: float
    pooled_df: float | None
    family: int

    def total(self, seeds: Sequence[int], units: int) -> tuple[float, float]:
        """(V, its degrees of freedom 1 / Σ wᵖ/dfᵢ over the shares w of V); NaN where a part is
        unknown.

        p = 2 is Welch-Satterthwaite. It takes too many degrees of freedom where the largest
        variance happens
        to be estimated small, which shows in the far tail of a family: 6 schemes of 3 seeds with
            unequal
        variances have a simultaneous coverage of 89 to 95% at a nominal 95%. p = 4/3 gives 94 to
        98%, ends 0 to 30% wider.
        """
        if self.pooled_df is None:
            parts = [
                (variance / n, n - 1) for variance, n in zip(self.of_seeds, seeds, strict=True)
            ]
        else:  # one estimate for all schemes: its error is shared
            parts = [(self.of_seeds[0] * sum(1 / n for n in seeds), self.pooled_df)]
        parts.append((self.of_units / units, units - 1))
        total = sum(variance for variance, _ in parts)
        if math.isnan(total):
            return math.nan, math.nan
        if total == 0:
            return 0.0, float(min(df for _, df in parts))
        power = 2 if self.family == 1 else FAMILY_POWER
        return total, 1 / sum((variance / total) ** power / df for variance, df in parts)

    def half(self, seeds: Sequence[int], units: int, alpha: float) -> float:
        """The half-width of an interval at level 1 − alpha."""
        variance, df = self.total(seeds, units)
        return t_quantile(1 - alpha / 2, df) * math.sqrt(variance)


@dataclass(frozen=True)
class SeedInterval(MeanInterval):
    """Of a mean over seeds and units. Ends are NaN if no claim is made."""

    df: float  # Welch-Satterthwaite, fewer in a family; NaN where a variance cannot be estimated
    seeds: tuple[int, ...]  # of each scheme
    variance: SeedVariance

    @property
    def claimed(self) -> bool:
        """Whether there are enough seeds and units for an interval."""
        return min(self.seeds) >= CLAIM_SEEDS and self.units >= POINTS_ONLY_BELOW


def compare(
    a: np.ndarray,
    b: np.ndarray,
    *,
    alpha: float = 0.05,
    family: int = 1,
    pooled_variance: tuple[float, float] | None = None,
) -> SeedInterval:
    """mean(a) − mean(b) for a (S_A, D) and b (S_B, D) over the same units, ± t(df)·√V.

    V = s²_A/S_A + s²_B/S_B (variances of seed means) + s²_doc/D (variance of the seed-averaged unit
    differences), df by Welch-Satterthwaite over the three, fewer in a family. `pooled_variance`:
    `pool` of all schemes, if the study declares equal seed variances. Seeds of the two need not
    correspond.
    """
    a = _checked(a)
    b = _checked(b)
    if a.shape[1] != b.shape[1]:
        raise EvaluationError(
            f"two schemes are compared on the same units; these have {a.shape[1]} and {b.shape[1]}"
        )
    return _interval(
        (a, b),
        a.mean(axis=0) - b.mean(axis=0),
        alpha,
        family,
        pooled_variance,
    )


def change(
    a: np.ndarray,
    *,
    alpha: float = 0.05,
    family: int = 1,
    pooled_variance: tuple[float, float] | None = None,
) -> SeedInterval:
    """mean(a) for a (S, D), a difference paired within each seed and unit, such as NLL(L) −
    NLL(L0)."""
    a = _checked(a)
    return _interval((a,), a.mean(axis=0), alpha, family, pooled_variance)


def upper(a: np.ndarray, confidence: float = 0.975) -> float:
    """One-sided upper bound of mean(a), a as for `change`; NaN if no claim is made."""
    return change(a, alpha=2 * (1 - confidence)).high


def pool(schemes: Sequence[np.ndarray]) -> tuple[float, float]:
    """(variance of seed means, its degrees of freedom) over schemes (S, D) with equal seed
    variances.

    Raises EvaluationError if no scheme has two seeds.
    """
    parts = [(len(one) - 1, _of_seeds(_checked(one))) for one in schemes if len(one) > 1]
    df = sum(n for n, _ in parts)
    if df == 0:
        raise EvaluationError("no scheme has two seeds: there is no seed variance to pool")
    return sum(n * variance for n, variance in parts) / df, float(df)


def needed(interval: SeedInterval, half: float) -> tuple[int | None, int | None]:
    """(seeds of each scheme with these units, units with these seeds) for a half-width of at most
    `half`.

    Based on the three estimated variances of the interval; None if no number would be enough, or a
    variance or a claim is missing.
    """
    if not half > 0:
        raise EvaluationError(f"a half-width of {half} nats is impossible; choose one above 0")
    parts = interval.variance
    seeds = interval.seeds
    units = interval.units
    alpha = 1 - interval.level
    if any(math.isnan(v) for v in (*parts.of_seeds, parts.of_units)):
        return None, None
    more_seeds = more_units = None
    if units >= POINTS_ONLY_BELOW:
        each = len(seeds)
        more_seeds = smallest(
            lambda n: parts.half([n] * each, units, alpha) <= half, CLAIM_SEEDS, MANY_SEEDS
        )
    if min(seeds) >= CLAIM_SEEDS:
        more_units = smallest(
            lambda n: parts.half(seeds, n, alpha) <= half, POINTS_ONLY_BELOW, MANY_UNITS
        )
    return more_seeds, more_units


def _checked(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise EvaluationError(f"expected seeds by units, (S, D); got the shape {values.shape}")
    if not np.isfinite(values).all():
        raise EvaluationError("a mean NLL of a seed and unit is not finite")
    return values


def _of_seeds(scheme: np.ndarray) -> float:
    return float(scheme.mean(axis=1).var(ddof=1)) if len(scheme) > 1 else math.nan


def _interval(
    schemes: tuple[np.ndarray, ...],
    values: np.ndarray,
    alpha: float,
    family: int,
    pooled: tuple[float, float] | None,
) -> SeedInterval:
    """`values` (D,): the seed-averaged estimate of each unit."""
    seeds = tuple(map(len, schemes))
    units = len(values)
    of_seeds = tuple(_of_seeds(one) if pooled is None else pooled[0] for one in schemes)
    of_units = float(values.var(ddof=1)) if units > 1 else math.nan
    parts = SeedVariance(
        of_seeds,
        of_units,
        None if pooled is None else pooled[1],
        family,
    )
    enough = min(seeds) >= CLAIM_SEEDS and units >= POINTS_ONLY_BELOW
    half = parts.half(seeds, units, alpha / family) if enough else math.nan
    mean = float(values.mean())
    df = parts.total(seeds, units)[1]
    return SeedInterval(
        mean, mean - half, mean + half, 1 - alpha / family, family, units, df, seeds, parts
    )
