import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.context_reach import context_reach

UNITS = 12
EACH = 5
UNIT = np.repeat(np.arange(UNITS), EACH)


def curve(means, sd=0.002, seed=0):
    """Per-target NLL by length: these means, units that differ from length to length by `sd`."""
    rng = np.random.default_rng(seed)
    level = rng.gamma(2.0, size=UNITS * EACH)
    return {
        n: level + mean + np.repeat(rng.normal(0, sd, UNITS), EACH) for n, mean in means.items()
    }


def bound(difference, tests):
    """Upper end of a one-sided interval over units, by scipy."""
    means = difference.reshape(UNITS, EACH).mean(axis=1)
    quantile = stats.t.ppf(1 - 0.025 / tests, UNITS - 1)
    return means.mean() + quantile * stats.sem(means)


@pytest.mark.parametrize(
    ("means", "sd", "reach", "shown"),
    [
        # falls to 512, flat from there
        ((1.0, 0.6, 0.3, 0.1, 0.1, 0.1), 0.002, 512, 512),
        # every doubling helps
        ((1.0, 0.8, 0.6, 0.4, 0.2, 0.0), 0.002, None, 2048),
        # nothing helps, or every doubling hurts
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 0.002, 64, 64),
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 0.002, 64, 64),
        # 2,048 is better than 1,024, and both are worse than 128
        ((1.0, 0.6, 0.7, 0.9, 1.4, 1.1), 0.002, 128, 128),
        # better than ever after a loss
        ((1.0, 0.6, 0.9, 0.9, 0.5, 0.5), 0.002, 1024, 1024),
        # gains too small or too uncertain to be shown
        ((1.0, 0.6, 0.599, 0.598, 0.598, 0.598), 0.004, 128, 128),
        ((1.0, 0.6, 0.61, 0.6, 0.6, 0.6), 0.1, None, 128),
    ],
)
def test_reach_is_a_property_of_the_best_context_so_far(means, sd, reach, shown):
    nll = curve(dict(zip((64, 128, 256, 512, 1024, 2048), means, strict=True)), sd=sd)
    got = context_reach("x", nll, UNIT, tolerance=0.02)
    assert (got.reach, got.shown, got.longest, got.points) == (reach, shown, 2048, False)


@pytest.mark.parametrize("seed", range(20))
def test_reach_matches_definition(seed):
    """Brute force: every L is tried by the words of the definition."""
    rng = np.random.default_rng(seed)
    nll = curve(
        {64 * 2**k: m for k, m in enumerate(np.cumsum(rng.normal(0, 0.012, 6)))},
        sd=0.008,
        seed=seed,
    )
    lengths = sorted(nll)
    good = {}
    for n in lengths:
        up_to = [m for m in lengths if m <= n]
        good[n] = all(
            any(bound(nll[m] - nll[longer], len(up_to)) < 0.02 for m in up_to)
            for longer in lengths
            if longer > n
        )
    want = [n for n in lengths[:-1] if all(good[m] for m in lengths if m >= n)]
    shown = [
        n
        for n in lengths[1:]
        if all(bound(nll[n] - nll[m], len(lengths) - 1) < 0 for m in lengths if m < n)
    ]
    got = context_reach("x", nll, UNIT, tolerance=0.02)
    assert got.reach == min(want, default=None) and got.shown == max(shown, default=64)


def test_failed_length_stops_testing():
    flat = curve(dict.fromkeys((64, 128, 512), 1.0))
    flat[1024] = flat[512]
    assert context_reach("x", flat, UNIT, tolerance=0.02, failed=[256]).reach == 512
    del flat[1024]
    got = context_reach("x", flat, UNIT, tolerance=0.02, failed=[1024])
    assert (got.reach, got.longest) == (None, 1024)


def test_few_units_give_point_estimates():
    few = np.repeat(np.arange(5), 12)
    got = context_reach("x", curve(dict.fromkeys((64, 128), 1.0)), few, tolerance=0.02)
    assert got.points and got.reach is None and math.isnan(got.doublings[0].gain.low)
