"""Intervals for accuracies, where several items may share one haystack."""

import math
from statistics import NormalDist

import numpy as np

from evaluation.fixed_targets import ratio


def wilson(hits: float, n: int, *, alpha: float = 0.05, n_eff: float) -> tuple[float, float]:
    """(low, high) by Wilson's score interval (1927), `n_eff` in place of n for dependent items.

    The ends lie in [0, 1] and exist for 0 and for n hits too.
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
    the share with haystacks as the sample. If all
    answers are correct, or all wrong, V is undefined and each haystack counts once, the lower
    bound.
    """
    n = float(items.sum())
    haystacks = len(items)
    p, error = ratio(hits, items)
    if haystacks == n or haystacks == 1 or p in (0.0, 1.0):
        return float(haystacks)
    return n if error == 0 else min(n, p * (1 - p) / error**2)
