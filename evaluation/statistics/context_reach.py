"""Context reach: the length beyond which more context no longer helps, and the gain per
doubling."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.statistics.intervals import Interval, interval, unit_means


@dataclass(frozen=True)
class DoublingGain:
    """Gain from one length of the grid to the next, in nats per doubling; positive: more context
    helps."""

    shorter: int
    longer: int
    gain: Interval


@dataclass(frozen=True)
class ContextReach:
    """How far one method uses context.

    Attributes:
        reach: no context longer than this gains the tolerance over the best one up to it; None if
            that is not shown for any length.
        shown: the longest length that is shown to be better than every shorter one.
        points: too few units for any bound.
    """

    method: str
    reach: int | None
    shown: int
    longest: int
    doublings: list[DoublingGain]
    points: bool


def context_reach(
    method: str,
    nll: dict[int, np.ndarray],
    unit: np.ndarray,
    *,
    tolerance: float,
    failed: Collection[int] = (),
    alpha: float = 0.05,
) -> ContextReach:
    """The smallest length L whose context no longer one improves on, from bounds of the gains
    NLL(l) − NLL(L′) of each L′ > L over lengths l <= L.

    The gain over the best context up to L is below the tolerance if its one-sided 97.5% upper bound
    is, for any such l and by Bonferroni over them. L′ are tested from the longest downwards, and
    testing stops at the first failure. A gain is shown at L if the lower bounds over all l < L are
    positive, by Bonferroni over L.

    Args:
        nll: per-target NLL of the same targets by length, of two lengths or more.
        unit: (n_targets,).
        failed: lengths of the grid that could not be measured; nothing shorter can be shown to
            reach as far.
        alpha: gains per doubling have two-sided intervals at 1 − alpha each.
    """

    def upper(a: int, b: int, tests: int) -> float:
        """Of NLL(a) − NLL(b), one of so many bounds at 97.5% together."""
        return interval(unit_means(nll[a] - nll[b], unit), family=tests).high

    lengths = sorted(nll)
    longest = max((*lengths, *failed))
    reach = None
    for n in range(len(lengths) - 1, 0, -1):
        up_to = lengths[:n]
        bounds = [min(upper(shorter, longer, n) for shorter in up_to) for longer in lengths[n:]]
        if any(length > up_to[-1] for length in failed) or not max(bounds) < tolerance:
            break
        reach = up_to[-1]
    shown = lengths[0]
    for n in range(1, len(lengths)):
        if max(upper(lengths[n], shorter, len(lengths) - 1) for shorter in lengths[:n]) < 0:
            shown = lengths[n]
    doublings = []
    for shorter, longer in pairwise(lengths):
        gains = unit_means(nll[shorter] - nll[longer], unit) / math.log2(longer / shorter)
        doublings.append(DoublingGain(shorter, longer, interval(gains, alpha=alpha)))
    points = math.isnan(doublings[0].gain.low)
    return ContextReach(method, reach, shown, longest, doublings, points)
