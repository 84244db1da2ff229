"""Verdicts on claims.

A comparison has one paired value for each seed, positive as predicted, and a smallest effect δ that
counts. Its interval [low, high] is mean ± t·s/√n, or for solved tasks the difference of two
Clopper-Pearson intervals; the m primary comparisons of a claim share its error probability α.

- Reproduced: low ≥ δ in every primary comparison. Refuted: high < δ in any.
- Of a claim of no difference: reproduced if −δ < low and high < δ in every one, refuted if low ≥ δ
  or high ≤ −δ in any.
- Otherwise inconclusive, with "sign only" if low > 0 in every one; also where, in an arm, more than
  one in eight runs has not learned within the trained length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, chdtri, nctdtrinc, stdtrit

from evaluation.fixed_targets import half_width

ALPHA = 0.05
POWER = 0.8
SD_LEVEL = 0.8  # of the upper bound of a pilot's SD; Browne 1995, Statistics in Medicine 14:1933
REPRODUCED = "reproduced"
REFUTED = "refuted"
INCONCLUSIVE = "inconclusive"
SIGN_ONLY = "inconclusive (sign only)"
NOT_LEARNED = "inconclusive (not learned)"


@dataclass(frozen=True)
class PrimaryComparison:
    """What was measured for one primary comparison.

    Attributes:
        values: (n,) one for each seed, positive as predicted; empty for `solved`.
        error: standard error of one seed's value from the evaluation, a lower bound of s.
        solved: for each of one or two arms, which of its seeds have solved the task.
        difference: whether a difference is predicted, or none.
    """

    delta: float
    values: np.ndarray
    error: float = 0.0
    solved: tuple[np.ndarray, ...] = ()
    difference: bool = True

    @property
    def estimate(self) -> float:
        if not self.solved:
            return float(self.values.mean())
        share, *other = [float(arm.mean()) for arm in self.solved]
        return share - sum(other)

    def interval(self, alpha: float) -> tuple[float, float]:
        """(low, high) at level 1 − alpha."""
        if not self.solved:
            n = len(self.values)
            s = max(float(self.values.std(ddof=1)), self.error)
            half = half_width(s / math.sqrt(n), n - 1, alpha)
            return self.estimate - half, self.estimate + half
        alpha /= len(self.solved)
        ends = [clopper_pearson(int(arm.sum()), len(arm), alpha) for arm in self.solved]
        if len(ends) == 1:
            return ends[0]
        (low, high), (other_low, other_high) = ends
        return low - other_high, high - other_low


def clopper_pearson(hits: int, n: int, alpha: float) -> tuple[float, float]:
    """(low, high) of a share at level 1 − alpha (Clopper and Pearson 1934)."""
    low = 0.0
    high = 1.0
    if hits > 0:
        low = float(betaincinv(hits, n - hits + 1, alpha / 2))
    if hits < n:
        high = float(betaincinv(hits + 1, n - hits, 1 - alpha / 2))
    return low, high


def enough_learned(learned: Sequence[bool]) -> bool:
    """Whether all but one in eight runs of an arm have learned."""
    return sum(learned) >= len(learned) - len(learned) // 8


def decide(primaries: Sequence[PrimaryComparison], alpha: float = ALPHA) -> str:
    """The verdict, where every arm has learned."""
    ends = [primary.interval(alpha / len(primaries)) for primary in primaries]
    reproduced = []
    refuted = []
    for primary, (low, high) in zip(primaries, ends, strict=True):
        delta = primary.delta
        if primary.difference:
            reproduced.append(low >= delta)
            refuted.append(high < delta)
        else:
            reproduced.append(-delta < low and high < delta)
            refuted.append(low >= delta or high <= -delta)
    if any(refuted):
        return REFUTED
    if all(reproduced):
        return REPRODUCED
    are_differences = all(primary.difference for primary in primaries)
    if are_differences and all(low > 0 for low, _ in ends):
        return SIGN_ONLY
    return INCONCLUSIVE


def p_value(primaries: Sequence[PrimaryComparison]) -> float:
    """The smallest α at which the verdict would be the same; 1 if it is inconclusive."""
    verdict = decide(primaries)
    if verdict not in (REPRODUCED, REFUTED):
        return 1.0
    low, high = -15.0, math.log10(ALPHA)
    for _ in range(50):
        middle = (low + high) / 2
        if decide(primaries, 10**middle) == verdict:
            high = middle
        else:
            low = middle
    return 10**high


def holm(p_values: Sequence[float]) -> list[bool]:
    """Which verdicts hold simultaneously at level 1 − ALPHA (Holm 1979)."""
    ordered = np.sort(p_values)
    hold = ordered <= ALPHA / (len(ordered) - np.arange(len(ordered)))
    failed = ordered[~hold][:1]  # the smallest that does not hold, and all above it
    return [bool((p < failed).all()) for p in p_values]


def detectable(seeds: int, primaries: int) -> float:
    """The effect beyond δ, in standard deviations, that is found with this POWER: 1.16 for eight
    seeds and one comparison."""
    df = seeds - 1
    t = float(stdtrit(df, 1 - ALPHA / (2 * primaries)))
    return float(nctdtrinc(df, 1 - POWER, t)) / math.sqrt(seeds)


def sd_bound(values: np.ndarray) -> float:
    """Upper bound of the SD of normal values, at level SD_LEVEL."""
    df = len(values) - 1
    quantile = float(chdtri(df, SD_LEVEL))
    return float(values.std(ddof=1)) * math.sqrt(df / quantile)
