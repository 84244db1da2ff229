import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data.preparation.summary import POINTS_ONLY_BELOW
from evaluation.fixed_target_loss import by_length
from evaluation.statistics.intervals import (
    effective,
    interval,
    interval_over_units,
    unit_means,
    wilson,
)


def test_unit_means_weight_targets():
    means = unit_means(np.array([1.0, 2, 6, 10, 30]), np.array([4, 4, 4, 9, 0]))
    assert means.tolist() == [30, 3, 10]


@pytest.mark.parametrize("family", [1, 10])
def test_interval_by_hand(family):
    values = np.array([1.0, 2, 3, 4, 5, 9])
    result = interval(values, np.full(6, 16), family=family)
    half = stats.t.ppf(1 - 0.025 / family, 5) * math.sqrt(8 / 6)  # sd = sqrt(40 / 5)
    found = (result.value, result.low, result.high)
    assert found == pytest.approx((4, 4 - half, 4 + half), rel=1e-9)
    assert (result.level, result.family) == (0.95, family)
    few = interval(values[1:], np.ones(5))
    assert few.value == 4.6
    assert math.isnan(few.low)


def jackknifed(values: np.ndarray, unit: np.ndarray) -> tuple[float, float]:
    """Mean over targets and its standard error, by leaving out the influence of one unit at a time:
    the linearized ratio, target by target in a loop."""
    mean = math.fsum(values) / len(values)
    units = sorted(set(unit.tolist()))
    influence = [math.fsum(v - mean for v in values[unit == u]) / len(values) for u in units]
    return mean, math.sqrt(len(units) / (len(units) - 1) * math.fsum(e**2 for e in influence))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=30),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_estimate_whatever_the_sizes_of_units(sizes, seed):
    """`nll`, `gain` and their ends for units of any size, in the table and in `by_length`."""
    rng = np.random.default_rng(seed)
    unit = np.repeat(np.arange(len(sizes)), sizes)
    short = rng.gamma(2.0, size=len(unit)) + rng.normal(size=len(sizes))[unit]
    long = short - 0.1 + rng.normal(size=len(unit))
    for values in (short, long, short - long):
        result = interval_over_units(values, unit)
        mean, error = jackknifed(values, unit)
        assert result.value == pytest.approx(mean, abs=1e-12)
        assert math.isnan(result.low) == (len(sizes) < POINTS_ONLY_BELOW)
        if not math.isnan(result.low):
            half = stats.t.ppf(0.975, len(sizes) - 1) * error
            assert result.low <= result.value <= result.high
            assert result.high - result.low == pytest.approx(2 * half, abs=1e-9)
    place = {"document": unit, "target": np.arange(len(unit))}
    frames = [pd.DataFrame(place | {"length": n, "nll": v}) for n, v in ((8, short), (16, long))]
    table = by_length(pd.concat(frames), trained_length=8)
    assert table.perplexity[16] == math.exp(table.nll[16])
    assert table.gain[16] == pytest.approx(table.nll[8] - table.nll[16], abs=1e-12)
    assert table.nll[16] == pytest.approx(interval_over_units(long, unit).value, abs=1e-12)


@pytest.mark.parametrize("units", [20, 60])
def test_coverage_with_units_of_unequal_size(units):
    """Units of 1 to 40 targets with effects of their own; the mean over targets of the population is
    0."""
    rng = np.random.default_rng(units)
    covered = 0
    for _ in range(1500):
        sizes = rng.integers(1, 41, units)
        unit = np.repeat(np.arange(units), sizes)
        values = rng.normal(size=units)[unit] + rng.normal(size=len(unit))
        result = interval_over_units(values, unit)
        covered += result.low <= 0 <= result.high
    assert 0.92 <= covered / 1500 <= 0.97


RNG = np.random.default_rng(17)
A = RNG.normal(2.0, 0.3, (4, 9))
B = RNG.normal(1.9, 0.1, (3, 9))


def half_width(variances, sizes, family):
    """From sample variances and their sizes, with scipy's t."""
    sizes = np.array(sizes)
    parts = np.array(variances) / sizes
    power = 2 if family == 1 else 4 / 3
    df = parts.sum() ** power / (parts**power / (sizes - 1)).sum()
    return stats.t.ppf(1 - 0.025 / family, df) * math.sqrt(parts.sum())


def variances(a, b):
    """Of the seed means of each scheme, and of the unit differences."""
    units = a.mean(axis=0) - b.mean(axis=0)
    values = (a.mean(axis=1), b.mean(axis=1), units)
    return [value.var(ddof=1) for value in values]


@pytest.mark.parametrize("family", [1, 6])
def test_two_schemes_are_compared_by_the_three_variances(family):
    result = interval(A, np.full(9, 64), minus=B, family=family)
    half = half_width(variances(A, B), [4, 3, 9], family)
    mean = A.mean() - B.mean()
    ends = (result.value, result.low, result.high)
    assert ends == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
    assert (result.seeds, result.units, result.family) == ("4 and 3", 9, family)
    assert (result.level, result.family) == (0.95, family)
    assert math.isfinite(result.low)


@pytest.mark.parametrize(
    "a, b",
    [
        (A[:2], B),
        (A, B[:2]),
        (A[:1], B[:1]),
        (A[:, :5], B[:, :5]),
    ],
)
def test_too_few_seeds_or_units_are_points(a, b):
    result = interval(a, np.ones(a.shape[1]), minus=b)
    assert result.value == pytest.approx(a.mean() - b.mean())
    assert math.isnan(result.low)
    assert math.isnan(result.high)
    assert math.isnan(result.low)


@pytest.mark.parametrize(
    "hits, n",
    [
        (0, 10),
        (10, 10),
        (199, 200),
        (1, 1),
    ],
)
@pytest.mark.parametrize("alpha", [0.05, 0.002])
def test_wilson_matches_scipy(hits, n, alpha):
    expected = stats.binomtest(hits, n).proportion_ci(1 - alpha, method="wilson")
    assert wilson(hits, n, alpha=alpha, n_eff=n) == pytest.approx(expected, abs=1e-12)


def test_effective_items_match_haystack_variance():
    """Beta-binomial: n_eff = n / (1 + (m−1)ρ), ρ = 1/(a+b+1), and Wilson with it covers."""
    rng = np.random.default_rng(4)
    items = np.full(60, 8)
    n = 480
    hits = rng.binomial(8, rng.beta(3.0, 1.0, size=(4000, 60)))
    sizes = [effective(row, items) for row in hits]
    assert np.mean(sizes) == pytest.approx(n / (1 + 7 / 5), rel=0.06)

    def coverage(sizes):
        ends = [wilson(row.sum(), n, n_eff=size) for row, size in zip(hits, sizes, strict=True)]
        return np.mean([low <= 0.75 <= high for low, high in ends])

    assert 0.935 <= coverage(sizes) <= 0.965
    assert coverage([n] * len(hits)) < 0.85  # as if every item were independent
