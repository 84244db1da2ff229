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
    resamples: int = 10_000,
    seed: int = 0,
) -> ContextReach:
    """The smallest length L whose context no longer one improves on, from bounds of the gains
    NLL(l) − NLL(L′) of each L′ > L over lengths l <= L.

    The gain over the best context up to L is below the tolerance if its one-sided 97.5% upper bound
    is, for any such l and by Bonferroni over them. L′ are tested from the longest downwards, and
    testing stops at the first failure. A gain is shown at L if the lower bounds over all l < L are
    positive, by Bonferroni over L.

    Args:
        nll: per-target NLL of the same targets by length.
        unit: (n_targets,).
        failed: lengths of the grid that could not be measured; nothing shorter can be shown to
            reach as far.
        alpha: gains per doubling have two-sided intervals at 1 − alpha each.
    """
    lengths = sorted(nll)
    longest = max((*lengths, *failed))
    reach = None
    for n in range(len(lengths) - 2, -1, -1):
        bounds = [
            [_upper(nll, shorter, longer, unit, n + 1) for shorter in lengths[: n + 1]]
            for longer in lengths[n + 1 :]
        ]
        is_bounded = all(min(over) < tolerance for over in bounds)
        if any(length > lengths[n] for length in failed) or not is_bounded:
            break
        reach = lengths[n]
    shown = lengths[0]
    for n in range(1, len(lengths)):
        losses = [
            _upper(nll, lengths[n], shorter, unit, len(lengths) - 1) for shorter in lengths[:n]
        ]
        if max(losses) < 0:
            shown = lengths[n]
    doublings = []
    for shorter, longer in pairwise(lengths):
        per = unit_means(nll[shorter] - nll[longer], unit) / math.log2(longer / shorter)
        gain = interval(per, alpha=alpha, resamples=resamples, seed=seed)
        doublings.append(DoublingGain(shorter, longer, gain))
    points = math.isnan(_upper(nll, lengths[0], lengths[0], unit, 1))
    return ContextReach(method, reach, shown, longest, doublings, points)


def _upper(nll: dict[int, np.ndarray], a: int, b: int, unit: np.ndarray, tests: int) -> float:
    """Upper bound of NLL(a) − NLL(b), one of so many at 97.5% together."""
    return interval(unit_means(nll[a] - nll[b], unit), alpha=0.05 / tests, resamples=0).high
