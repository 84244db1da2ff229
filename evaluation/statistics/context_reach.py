"""Context reach: the length beyond which more context no longer helps, and the gain per
doubling."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evaluation.results_table import ResultsTable
from evaluation.statistics.intervals import MeanInterval, interval


@dataclass(frozen=True)
class DoublingGain:
    """Gain from one length of the grid to the next, in nats per doubling; positive: more context
    helps."""

    shorter: int
    longer: int
    gain: MeanInterval


@dataclass(frozen=True)
class ContextReach:
    """How far a method uses context.

    Attributes:
        reach: no context longer than this gains the tolerance over the best one up to it; None if
            that is not shown for any length.
        shown: the longest length that is shown to be better than every shorter one.
        points: too few units or seeds for any bound.
    """

    reach: int | None
    shown: int
    longest: int
    doublings: list[DoublingGain]
    points: bool

    @property
    def text(self) -> str:
        """`at most 512; no gain is shown beyond 256`."""
        if self.points:
            return "point estimates only"
        if self.reach is None and self.shown == self.longest:
            return f"a gain is shown up to {self.longest:,}, the longest length"
        if self.reach is None:
            return f"a gain is shown up to {self.shown:,} and not excluded beyond"
        if self.reach > self.shown:
            return f"at most {self.reach:,}; no gain is shown beyond {self.shown:,}"
        return f"at most {self.reach:,}"


def add_reach(table: ResultsTable, variant: str, reach: ContextReach) -> None:
    """Add `gain_per_doubling` by length and, unless there are only points, `context_reach` and
    `gain_shown_to` for all lengths."""
    for doubling in reach.doublings:
        table.add(variant, "gain_per_doubling", doubling.gain, doubling.longer)
    if not reach.points:
        longest = math.nan if reach.reach is None else reach.reach
        table.add(variant, "context_reach", longest, note=reach.text)
        table.add(variant, "gain_shown_to", reach.shown)


def context_reach(
    lengths: Sequence[int],
    gain: Callable[[int, int], np.ndarray],
    *,
    tolerance: float,
    failed: Collection[int] = (),
    alpha: float = 0.05,
    interval: Callable[..., MeanInterval] = interval,
) -> ContextReach:
    """The smallest length L whose context no longer one improves on, from bounds of the gains
    NLL(l) − NLL(L′) of each L′ > L over lengths l <= L.

    The gain over the best context up to L is below the tolerance if its one-sided 97.5% upper bound
    is, for any such l and by Bonferroni over them. L′ are tested from the longest downwards, and
    testing stops at the first failure. A gain is shown at L if the lower bounds over all l < L are
    positive, by Bonferroni over L.

    Args:
        lengths: the measured ones, ascending, at least two.
        gain: NLL(a) − NLL(b) on the same targets for two lengths a and b, as `interval` takes it.
        failed: lengths of the grid that could not be measured; nothing shorter can be shown to
            reach as far.
        alpha: gains per doubling have two-sided intervals at 1 − alpha each.
        interval: over units (`intervals.interval`), or over seeds and units (`seeds.change`).
    """

    def upper(a: int, b: int, tests: int) -> float:
        """Of NLL(a) − NLL(b), one of so many bounds at 97.5% together."""
        return interval(gain(a, b), family=tests).high

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
        of_doubling = gain(shorter, longer) / math.log2(longer / shorter)
        doublings.append(DoublingGain(shorter, longer, interval(of_doubling, alpha=alpha)))
    points = math.isnan(doublings[0].gain.low)
    longest = max((*lengths, *failed))
    return ContextReach(reach, shown, longest, doublings, points)
