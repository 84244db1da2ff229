"""Intervals for accuracies, where several items may share one haystack."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from errors import EvaluationError


def wilson(
    successes: float, n: int, *, alpha: float = 0.05, n_eff: float | None = None
) -> tuple[float, float, float]:
    """(share, low, high) by Wilson's score interval (1927), `n_eff` in place of n for dependent
    items.

    The ends lie in [0, 1] and exist for 0 and for n successes too. Raises EvaluationError for no
    items.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"{successes} correct answers of {n} items is not a share")
    size = n if n_eff is None else n_eff
    if not 0 < size <= n:
        raise EvaluationError(f"{n} items cannot count as {size} independent ones")
    p = successes / n
    z = NormalDist().inv_cdf(1 - alpha / 2)
    center = (p + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(p * (1 - p) / size + z * z / (4 * size * size))
    # At a share of 0 or 1 one end is the share itself, without rounding error.
    low = 0.0 if p == 0 else max(0.0, center - half)
    high = 1.0 if p == 1 else min(1.0, center + half)
    return p, low, high


def effective(
    n: int,
    hits: Sequence[int] | np.ndarray,
    items: Sequence[int] | np.ndarray,
) -> float:
    """Effective number of independent items among n dependent ones: p(1−p)/V, at most n.

    `hits`, `items`: right answers and questions of each haystack. V is the variance of the share
    with haystacks as the sample (the ratio estimator, as their sizes may differ). If all answers
    are correct, or all wrong, V is undefined and each haystack counts once, the lower bound.
    """
    hits = np.asarray(hits, dtype=np.float64)
    items = np.asarray(items, dtype=np.float64)
    if hits.shape != items.shape or int(items.sum()) != n or n < 1 or items.min() < 1:
        raise EvaluationError(f"hits and items must be given for each haystack, {n} items in total")
    haystacks = len(items)
    if haystacks == n:
        return float(n)
    p = float(hits.sum()) / n
    if p in (0.0, 1.0) or haystacks == 1:
        return float(haystacks)
    variance = haystacks / (haystacks - 1) * float(((hits - p * items) ** 2).sum()) / n**2
    return float(n) if variance == 0 else min(float(n), p * (1 - p) / variance)
