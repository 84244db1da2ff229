import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.context_reach import context_reach
from evaluation.statistics.intervals import interval
from evaluation.statistics.seeds import change
from tests.studies.results.test_loss_comparison import half_width

LENGTHS = (64, 128, 256, 512, 1024, 2048)
UNITS = 12
SEEDS = 4


def curve(means, shape, sd=0.002, seed=0):
    """NLL of units, or of seeds and units, by length: these means, which differ by `sd`."""
    rng = np.random.default_rng(seed)
    level = rng.gamma(2.0, size=shape)
    return {n: level + mean + rng.normal(0, sd, shape) for n, mean in means.items()}


def reach_of(nll, failed=()):
    values = next(iter(nll.values()))
    return context_reach(
        sorted(nll),
        lambda a, b: nll[a] - nll[b],
        tolerance=0.02,
        failed=failed,
        interval=interval if values.ndim == 1 else change,
    )


def bound(values, tests):
    """Upper end of a one-sided interval over units, or over seeds and units."""
    parts = []
    for axis in range(values.ndim):
        means = values.mean(axis=1 - axis) if values.ndim == 2 else values
        parts.append((means.var(ddof=1) / len(means), len(means) - 1))
    if values.ndim == 2:
        return values.mean() + half_width(parts, tests)
    return values.mean() + stats.t.ppf(1 - 0.025 / tests, UNITS - 1) * math.sqrt(parts[0][0])


@pytest.mark.parametrize("shape", [(UNITS,), (SEEDS, UNITS)])
@pytest.mark.parametrize(
    ("means", "sd", "reach", "shown", "text"),
    [
        # falls to 512, flat from there
        ((1.0, 0.6, 0.3, 0.1, 0.1, 0.1), 0.002, 512, 512, "at most 512"),
        # every doubling helps
        ((1.0, 0.8, 0.6, 0.4, 0.2, 0.0), 0.002, None, 2048, "up to 2,048, the longest"),
        # nothing helps, or every doubling hurts
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 0.002, 64, 64, "at most 64"),
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 0.002, 64, 64, "at most 64"),
        # 2,048 is better than 1,024, and both are worse than 128
        ((1.0, 0.6, 0.7, 0.9, 1.4, 1.1), 0.002, 128, 128, "at most 128"),
        # better than ever after a loss
        ((1.0, 0.6, 0.9, 0.9, 0.5, 0.5), 0.002, 1024, 1024, "at most 1,024"),
        # gains too small or too uncertain to be shown
        ((1.0, 0.6, 0.599, 0.598, 0.598, 0.598), 0.004, 128, 128, "at most 128"),
        ((1.0, 0.6, 0.61, 0.6, 0.6, 0.6), 0.1, None, 128, "up to 128 and not excluded"),
        # a gain that is not excluded at 256 and would end the reach there
        ((1.0, 0.6, 0.59, 0.7, 0.7, 0.7), 0.024, 256, 128, "256; no gain is shown beyond 128"),
    ],
)
def test_reach_is_a_property_of_the_best_context_so_far(means, sd, reach, shown, text, shape):
    """The same function for one checkpoint and for the seeds of a study."""
    got = reach_of(curve(dict(zip(LENGTHS, means, strict=True)), shape, sd=sd))
    assert (got.reach, got.shown, got.longest, got.points) == (reach, shown, 2048, False)
    assert text in got.text


@pytest.mark.parametrize("shape", [(UNITS,), (SEEDS, UNITS)])
@pytest.mark.parametrize("seed", range(10))
def test_reach_matches_definition(seed, shape):
    """Brute force: every L is tried by the words of the definition."""
    means = np.cumsum(np.random.default_rng(seed).normal(0, 0.012, 6))
    nll = curve(dict(zip(LENGTHS, means, strict=True)), shape, sd=0.008, seed=seed)
    good = {}
    for n in LENGTHS:
        up_to = [m for m in LENGTHS if m <= n]
        good[n] = all(
            any(bound(nll[m] - nll[longer], len(up_to)) < 0.02 for m in up_to)
            for longer in LENGTHS
            if longer > n
        )
    want = [n for n in LENGTHS[:-1] if all(good[m] for m in LENGTHS if m >= n)]
    shown = [
        n
        for n in LENGTHS[1:]
        if all(bound(nll[n] - nll[m], len(LENGTHS) - 1) < 0 for m in LENGTHS if m < n)
    ]
    got = reach_of(nll)
    assert got.reach == min(want, default=None) and got.shown == max(shown, default=64)


def test_failed_length_stops_testing():
    flat = curve(dict.fromkeys((64, 128, 512, 1024), 1.0), (UNITS,))
    assert reach_of(flat, failed=[256]).reach == 512
    del flat[1024]
    got = reach_of(flat, failed=[1024])
    assert (got.reach, got.longest) == (None, 1024)


@pytest.mark.parametrize("shape", [(5,), (2, UNITS), (SEEDS, 5)])
def test_few_units_or_seeds_give_point_estimates(shape):
    got = reach_of(curve(dict.fromkeys((64, 128), 1.0), shape))
    assert got.points and got.reach is None and math.isnan(got.doublings[0].gain.low)
    assert "point" in got.text


def test_gains_are_per_doubling():
    nll = curve(dict(zip((64, 128, 1024), (1.0, 0.9, 0.6), strict=True)), (UNITS,), sd=1e-9)
    steps = [
        (one.shorter, one.longer, round(one.gain.estimate, 6)) for one in reach_of(nll).doublings
    ]
    assert steps == [(64, 128, 0.1), (128, 1024, 0.1)]
