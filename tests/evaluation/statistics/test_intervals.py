import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import (
    bootstrap_t,
    interval,
    max_t_alpha,
    spans_needed,
    t_quantile,
    unit_means,
    units_needed,
    upper_bound,
)

# Critical values of Student's t (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2).
T_TABLE = {
    1: {0.90: 3.078, 0.95: 6.314, 0.975: 12.706, 0.99: 31.821, 0.995: 63.657, 0.999: 318.313},
    2: {0.90: 1.886, 0.95: 2.920, 0.975: 4.303, 0.99: 6.965, 0.995: 9.925, 0.999: 22.327},
    5: {0.90: 1.476, 0.95: 2.015, 0.975: 2.571, 0.99: 3.365, 0.995: 4.032, 0.999: 5.893},
    10: {0.90: 1.372, 0.95: 1.812, 0.975: 2.228, 0.99: 2.764, 0.995: 3.169, 0.999: 4.144},
    19: {0.90: 1.328, 0.95: 1.729, 0.975: 2.093, 0.99: 2.539, 0.995: 2.861, 0.999: 3.579},
    30: {0.90: 1.310, 0.95: 1.697, 0.975: 2.042, 0.99: 2.457, 0.995: 2.750, 0.999: 3.385},
    100: {0.90: 1.290, 0.95: 1.660, 0.975: 1.984, 0.99: 2.364, 0.995: 2.626, 0.999: 3.174},
}


@pytest.mark.parametrize("df", T_TABLE)
def test_t_quantiles_match_published_tables(df):
    for p, value in T_TABLE[df].items():
        assert t_quantile(p, df) == pytest.approx(value, abs=0.0006 if value < 300 else 0.005)
        assert t_quantile(1 - p, df) == pytest.approx(-t_quantile(p, df), rel=1e-9)


def test_unit_means_weight_targets():
    means = unit_means(np.array([1.0, 2, 6, 10, 30]), np.array([4, 4, 4, 9, 0]))
    assert means.tolist() == [30, 3, 10]


def test_interval_by_hand():
    # mean 4, sd of (1, 2, 3, 4, 5, 9) = sqrt(40/5); t(5) at 97.5% = 2.570582
    got = interval(np.array([1.0, 2, 3, 4, 5, 9]))
    half = 2.570581835636 * math.sqrt(8) / math.sqrt(6)
    assert (got.estimate, got.units, got.few) == (4.0, 6, True)
    assert got.low == pytest.approx(4 - half, rel=1e-9) and got.high == pytest.approx(
        4 + half, rel=1e-9
    )
    assert got.half == pytest.approx(half)
    wider = interval(np.array([1.0, 2, 3, 4, 5, 9]), family=10)
    assert wider.half == pytest.approx(stats.t.ppf(1 - 0.05 / 20, 5) * math.sqrt(8 / 6))
    assert wider.level == pytest.approx(0.995)


def test_fewer_than_six_units_are_points_only():
    got = interval(np.array([1.0, 2, 3, 4, 9]))
    assert (
        got.estimate == 3.8
        and math.isnan(got.low)
        and math.isnan(got.bootstrap_high)
        and not got.disagrees
    )
    assert math.isnan(upper_bound(np.array([1.0, 2, 3, 4, 9])))
    assert interval(np.array([5.0])).estimate == 5.0
    assert not interval(np.arange(20.0)).few and interval(np.arange(19.0)).few


def test_studentized_bootstrap_matches_scipy_and_flags_skew():
    x = np.random.default_rng(1).gamma(2.0, size=30)
    low, high = bootstrap_t(x, resamples=40_000, seed=2)
    # Independent twin: plain loops over resamples.
    rng = np.random.default_rng(9)
    ts = []
    for _ in range(20_000):
        y = rng.choice(x, 30)
        ts.append((y.mean() - x.mean()) / (y.std(ddof=1) / math.sqrt(30)))
    scale = x.std(ddof=1) / math.sqrt(30)
    a, b = np.quantile(ts, [0.025, 0.975])
    assert low == pytest.approx(x.mean() - b * scale, abs=0.06 * scale)
    assert high == pytest.approx(x.mean() - a * scale, abs=0.06 * scale)
    assert high - x.mean() > x.mean() - low  # it leans to the long tail, as t cannot
    assert interval(np.r_[np.zeros(24), 30.0, 1.0]).disagrees
    assert not interval(np.random.default_rng(3).normal(size=150)).disagrees


def test_units_needed_is_minimal():
    for sd, half, family in [(0.1, 0.02, 1), (0.3, 0.02, 12), (0.001, 0.02, 4)]:
        n = units_needed(sd, half, family=family)

        def width(units, sd=sd, family=family):
            return stats.t.ppf(1 - 0.025 / family, units - 1) * sd / math.sqrt(units)

        assert width(n) <= half and (n == 6 or width(n - 1) > half)
    assert units_needed(1e9, 1e-9) == 10**7


def test_spans_needed_solves_the_two_variance_parts():
    rng = np.random.default_rng(5)
    between = 0.01
    within = 0.2
    units = 400
    spans = 4
    x = rng.normal(0, between, (units, 1)) + rng.normal(0, within, (units, spans))
    half = 0.008
    alone = np.arange(units)
    want = within**2 / (units * (half / stats.t.ppf(0.975, units - 1)) ** 2 - between**2)
    assert spans_needed(x, alone, half) == pytest.approx(want, rel=0.15)
    # Clusters of one and of three documents: spans shrink their part of both, documents' part
    # stays.
    of = np.repeat(np.arange(200), np.tile([1, 3], 100))
    allowed = 200 * (half / stats.t.ppf(0.975, 199)) ** 2
    want = within**2 * np.mean([1, 1 / 3]) / (allowed - between**2 * np.mean([1, 1 / 3]))
    assert spans_needed(x, of, half) == pytest.approx(want, rel=0.2)
    # Where documents differ too much no number of spans helps.
    wild = rng.normal(0, 1.0, (40, 1)) + rng.normal(0, 0.1, (40, 4))
    assert spans_needed(wild, np.arange(40), 0.02) is None
    assert spans_needed(x[:, :1], alone, half) is None
    assert spans_needed(x, alone % 5, half) is None  # five units have no interval


def effects(rng, effect, shape):
    """Unit effects with mean 0 and variance 1."""
    return (
        rng.normal(size=shape)
        if effect == "normal"
        else (rng.gamma(2.0, size=shape) - 2) / math.sqrt(2)
    )


def t_of(x):
    """|t| of every column of units, (..., D, m) -> (..., m)."""
    return np.abs(x.mean(axis=-2)) / stats.sem(x, axis=-2)


@pytest.mark.parametrize("units", [20, 60])
@pytest.mark.parametrize("effect, low, high", [("normal", 0.935, 0.965), ("gamma", 0.915, 0.975)])
def test_coverage_in_4000_draws(units, effect, low, high):
    rng = np.random.default_rng([7, units, len(effect)])
    spans = rng.normal(0, 2.0, size=(4000, units, 4)).mean(axis=2)
    x = effects(rng, effect, (4000, units)) + spans
    covered = t_of(x[..., None])[:, 0] <= stats.t.ppf(0.975, units - 1)
    for i in range(40):  # the product's own intervals are those of the twin
        got = interval(x[i], resamples=0)
        assert (got.low <= 0 <= got.high) == covered[i]
    assert low <= covered.mean() <= high


@pytest.mark.parametrize("units", [20, 60])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
def test_bonferroni_holds_jointly_for_any_dependence(units, correlation):
    rng = np.random.default_rng([11, units])
    family = 8
    x = math.sqrt(correlation) * rng.normal(size=(4000, units, 1)) + math.sqrt(
        1 - correlation
    ) * rng.normal(size=(4000, units, family))
    covered = (t_of(x) <= stats.t.ppf(1 - 0.025 / family, units - 1)).all(axis=1)
    for i in range(10):
        got = [interval(x[i][:, j], family=family, resamples=0) for j in range(family)]
        assert all(one.low <= 0 <= one.high for one in got) == covered[i]
    assert covered.mean() >= 0.935


def joint_coverage(draws, units, effect, correlation, resamples, family=8):
    """Shares of draws whose `family` intervals all hold: (by max-t, by Bonferroni), and the mean
    ratio of their half-widths.
    """
    rng = np.random.default_rng([3, units, len(effect), int(10 * correlation)])
    plain = stats.t.ppf(1 - 0.025 / family, units - 1)
    held = 0
    held_plain = 0
    ratio = 0.0
    for _ in range(draws):
        x = math.sqrt(correlation) * effects(rng, effect, (units, 1))
        x = x + math.sqrt(1 - correlation) * effects(rng, effect, (units, family))
        critical = stats.t.ppf(1 - max_t_alpha(x, resamples=resamples) / 2, units - 1)
        held += t_of(x).max() <= critical
        held_plain += t_of(x).max() <= plain
        ratio += critical / plain
    return held / draws, held_plain / draws, ratio / draws


@pytest.mark.slow
@pytest.mark.parametrize("units", [20, 60])
@pytest.mark.parametrize("effect", ["normal", "gamma"])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_max_t_holds_jointly_in_4000_draws(units, effect, correlation):
    assert joint_coverage(4000, units, effect, correlation, 2000)[0] >= 0.935
