import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.loss_verdicts import VariantLosses, VerdictRules, reach_rows
from evaluation.statistics.results_table import results_table, select
from tests.studies.test_loss_comparison import half_width
from tests.tables import find, value

LENGTHS = (64, 128, 256, 512, 1024, 2048)
UNITS = 12
SEEDS = 4


def curve(means, shape, sd=0.002, seed=0):
    """NLL of units, or of seeds and units, by length: these means, which differ by `sd`."""
    rng = np.random.default_rng(seed)
    level = rng.gamma(2.0, size=shape)
    return {n: level + mean + rng.normal(0, sd, shape) for n, mean in means.items()}


def reach_of(nll, failed=()):
    """Reach, longest length with a gain, text; and the long table."""
    shape = next(iter(nll.values())).shape
    rules = VerdictRules(64, 0.02, counts=np.ones(shape[-1]))
    table = results_table(reach_rows("x", VariantLosses(nll=nll, failed_lengths=failed), rules))
    row = find(table, "x", "context_reach")
    if row is None:
        return None, None, "", table
    reach = None if math.isnan(row.value) else row.value
    return reach, value(table, "x", "gain_shown_to"), row.note, table


def bound(values, tests):
    """Upper end of a one-sided interval over units, or over seeds and units."""
    if values.ndim == 1:
        return values.mean() + stats.t.ppf(1 - 0.025 / tests, UNITS - 1) * stats.sem(values)
    parts = []
    for axis in range(2):
        means = values.mean(axis=1 - axis)
        parts.append((means.var(ddof=1) / len(means), len(means) - 1))
    return values.mean() + half_width(parts, tests)


@pytest.mark.parametrize("shape", [(UNITS,), (SEEDS, UNITS)])
@pytest.mark.parametrize(
    ("means", "sd", "reach", "shown", "text"),
    [
        # every doubling helps
        ((1.0, 0.8, 0.6, 0.4, 0.2, 0.0), 0.002, None, 2048, "up to 2,048, the longest"),
        # every doubling hurts
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 0.002, 64, 64, "at most 64"),
        # 2,048 is better than 1,024, and both are worse than 128
        ((1.0, 0.6, 0.7, 0.9, 1.4, 1.1), 0.002, 128, 128, "at most 128"),
        # better than ever after a loss
        ((1.0, 0.6, 0.9, 0.9, 0.5, 0.5), 0.002, 1024, 1024, "at most 1,024"),
        # gains too uncertain to be shown
        ((1.0, 0.6, 0.61, 0.6, 0.6, 0.6), 0.1, None, 128, "up to 128 and not excluded"),
        # a gain that is not excluded at 256 and would end the reach there
        ((1.0, 0.6, 0.59, 0.7, 0.7, 0.7), 0.024, 256, 128, "256; no gain is shown beyond 128"),
    ],
)
def test_reach_is_a_property_of_the_best_context_so_far(means, sd, reach, shown, text, shape):
    """The same function for one checkpoint and for the seeds of a study."""
    *found, note, _ = reach_of(curve(dict(zip(LENGTHS, means, strict=True)), shape, sd=sd))
    assert found == [reach, shown]
    assert text in note


@pytest.mark.parametrize("shape", [(UNITS,), (SEEDS, UNITS)])
@pytest.mark.parametrize("seed", range(10))
def test_reach_matches_definition(seed, shape):
    """Brute force: every L is tried by the words of the definition."""
    means = np.cumsum(np.random.default_rng(seed).normal(0, 0.012, 6))
    nll = curve(dict(zip(LENGTHS, means, strict=True)), shape, sd=0.008, seed=seed)

    def is_enough(k):
        """No longer context is better, by the tolerance, than the best of those up to LENGTHS[k]."""
        for longer in LENGTHS[k + 1 :]:
            bounds = [bound(nll[n] - nll[longer], k + 1) for n in LENGTHS[: k + 1]]
            if min(bounds) >= 0.02:
                return False
        return True

    enough = [is_enough(k) for k in range(len(LENGTHS) - 1)]
    want = None
    for k in reversed(range(len(enough))):
        if all(enough[k:]):
            want = LENGTHS[k]
    shown = 64
    for k, n in enumerate(LENGTHS[1:], start=1):
        ends = [bound(nll[n] - nll[m], len(LENGTHS) - 1) for m in LENGTHS[:k]]
        if all(end < 0 for end in ends):
            shown = n
    assert reach_of(nll)[:2] == (want, shown)


def test_failed_length_stops_testing():
    flat = curve(dict.fromkeys((64, 128, 512, 1024), 1.0), (UNITS,))
    assert reach_of(flat, failed=[256])[0] == 512
    del flat[1024]
    reach, _, text, _ = reach_of(flat, failed=[1024])
    assert reach is None
    assert "longest" not in text


@pytest.mark.parametrize(
    "shape",
    [
        (5,),
        (2, UNITS),
        (SEEDS, 5),
    ],
)
def test_few_units_or_seeds_give_gains_per_doubling_only(shape):
    nll = curve(dict(zip((64, 128, 1024), (1.0, 0.9, 0.6), strict=True)), shape, sd=1e-9)
    reach, shown, _, table = reach_of(nll)
    assert (reach, shown) == (None, None)
    rows = select(table, "gain_per_doubling")
    assert [(row.length, round(row.value, 6)) for row in rows] == [(128, 0.1), (1024, 0.1)]
    assert all(math.isnan(row.low) for row in rows)
