"""Context reach: the length beyond which more context no longer helps, and the gain per
doubling."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.statistics.intervals import Interval, interval, unit_means, upper_bound


@dataclass(frozen=True)
class DoublingGain:
    """Gain from one length of the grid to the next, in nats per doubling; positive: more context
    helps."""

    shorter: int
    longer: int
    gain: Interval


@dataclass(frozen=True)
class ContextReach:
    """How far one method uses context. `reach` is None if saturation by `longest` is not shown."""

    method: str
    reach: int | None
    longest: int
    doublings: list[DoublingGain]
    points: bool  # too few units for any bound


def context_reach(
    method: str,
    nll: dict[int, np.ndarray],
    unit: np.ndarray,
    *,
    tolerance: float,
    failed: Collection[int] = (),
    alpha: float = 0.05,
    resamples: int = 10_000,
    seed: int = 0,
) -> ContextReach:
    """The smallest L such that NLL(L) − NLL(L′) has a one-sided 97.5% upper bound below the
    tolerance for every longer L′ of the grid, tested from the longest downwards, stopping at the
    first failure.

    `nll`: per-target NLL of the same targets by length, `unit` (n_targets,). `failed`: lengths of
    the grid that could not be measured; nothing shorter can be shown to reach as far. Gains per
    doubling have two-sided intervals at 1 − alpha each.
    """
    lengths = sorted(nll)
    longest = max((*lengths, *failed))
    reach = None
    for length in reversed(lengths[:-1]):
        longer = [n for n in lengths if n > length]
        bounds = [upper_bound(unit_means(nll[length] - nll[n], unit)) for n in longer]
        if any(n > length for n in failed) or not all(bound < tolerance for bound in bounds):
            break
        reach = length
    doublings = []
    for shorter, longer in pairwise(lengths):
        per = unit_means(nll[shorter] - nll[longer], unit) / math.log2(longer / shorter)
        doublings.append(
            DoublingGain(
                shorter, longer, interval(per, alpha=alpha, resamples=resamples, seed=seed)
            )
        )
    points = math.isnan(upper_bound(unit_means(nll[lengths[0]], unit)))
    return ContextReach(method, reach, longest, doublings, points)
