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


def bound(difference):
    """Upper end of a 95% interval over units, by scipy."""
    means = difference.reshape(UNITS, EACH).mean(axis=1)
    return means.mean() + stats.t.ppf(0.975, UNITS - 1) * stats.sem(means)


def test_reach_is_where_gains_end():
    # Falls to 512, flat from there.
    falling = {64: 1.0, 128: 0.6, 256: 0.3, 512: 0.1, 1024: 0.1, 2048: 0.1}
    got = context_reach("x", curve(falling), UNIT, tolerance=0.02)
    assert (got.reach, got.longest, got.points) == (512, 2048, False)
    gains = {(one.shorter, one.longer): one.gain for one in got.doublings}
    assert list(gains) == [(64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)]
    assert gains[64, 128].estimate == pytest.approx(0.4, abs=0.005)
    assert gains[512, 1024].low < 0 < gains[512, 1024].high


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
    good = {n: all(bound(nll[n] - nll[m]) < 0.02 for m in lengths if m > n) for n in lengths}
    want = [n for n in lengths[:-1] if all(good[m] for m in lengths if m >= n)]
    assert context_reach("x", nll, UNIT, tolerance=0.02).reach == min(want, default=None)


def test_gains_are_per_doubling_with_an_interval():
    nll = curve({64: 1.0, 1024: 0.6}, sd=0.03)
    (one,) = context_reach("x", nll, UNIT, tolerance=0.02).doublings
    # 64 to 1024 is four doublings
    means = (nll[64] - nll[1024]).reshape(UNITS, EACH).mean(axis=1) / 4
    assert one.gain.estimate == pytest.approx(means.mean())
    assert one.gain.half == pytest.approx(stats.t.ppf(0.975, UNITS - 1) * stats.sem(means))


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
