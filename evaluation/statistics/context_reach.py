"""Context reach: the length beyond which more context no longer helps, and the gain per
doubling."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import numpy as np

from evaluation.results_table import ResultsTable
from evaluation.statistics.verdicts import VerdictRules


def add_reach(
    table: ResultsTable,
    variant: str,
    lengths: Sequence[int],
    gain: Callable[[int, int], np.ndarray],
    rules: VerdictRules,
    failed: Collection[int] = (),
) -> None:
    """Add how far a variant uses context, from bounds of the gains NLL(l) − NLL(L′).

    gain_per_doubling: from one length of the grid to the next, with its own interval; positive:
    more context helps.

    context_reach: the smallest length L whose context no longer one improves on; NaN if that is not
    shown for any length. The gain of each L′ > L over the best context up to L is below the
    tolerance if its one-sided 97.5% upper bound is, for any l <= L and by Bonferroni over them. L′
    are tested from the longest downwards, and testing stops at the first failure.

    gain_shown_to: the longest length that is better than every shorter one: the lower bounds over
    all l < L are positive, by Bonferroni over the grid.

    Args:
        lengths: the measured ones, ascending, at least two.
        gain: NLL(a) − NLL(b) on the same targets for two lengths a and b, as `rules.interval` takes
            it.
        failed: lengths of the grid that could not be measured; nothing shorter can be shown to
            reach as far.
    """

    def upper(a: int, b: int, tests: int) -> float:
        """Of NLL(a) − NLL(b), one of so many bounds at 97.5% together."""
        return rules.interval(gain(a, b), family=tests).high

    for shorter, longer in pairwise(lengths):
        step = gain(shorter, longer) / math.log2(longer / shorter)
        table.add(variant, "gain_per_doubling", rules.interval(step, alpha=rules.alpha), longer)
    if not rules.has_learned or math.isnan(upper(*lengths[:2], 1)):
        return  # or too few units or seeds for any bound
    reach = math.nan
    for n in range(len(lengths) - 1, 0, -1):
        up_to = lengths[:n]
        bounds = [min(upper(shorter, longer, n) for shorter in up_to) for longer in lengths[n:]]
        if any(length > up_to[-1] for length in failed) or not max(bounds) < rules.tolerance:
            break
        reach = up_to[-1]
    shown = lengths[0]
    for n in range(1, len(lengths)):
        if max(upper(lengths[n], shorter, len(lengths) - 1) for shorter in lengths[:n]) < 0:
            shown = lengths[n]
    if reach > shown:
        text = f"at most {reach:,}; no gain is shown beyond {shown:,}"
    elif reach <= shown:
        text = f"at most {reach:,}"
    elif shown == max((*lengths, *failed)):
        text = f"a gain is shown up to {shown:,}, the longest length"
    else:
        text = f"a gain is shown up to {shown:,} and not excluded beyond"
    table.add(variant, "context_reach", reach, note=text)
    table.add(variant, "gain_shown_to", shown)
