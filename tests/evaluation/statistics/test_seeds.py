import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import interval

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
    ends = (result.estimate, result.low, result.high)
    assert ends == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
    assert (result.seeds, result.units, result.family) == ((4, 3), 9, family)
    assert result.level == pytest.approx(1 - 0.05 / family)
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
    assert result.estimate == pytest.approx(a.mean() - b.mean())
    assert math.isnan(result.low)
    assert math.isnan(result.high)
    assert math.isnan(result.low)


# Standard deviations of the seeds of a scheme and of the baseline, and of what a document makes of
# their difference.
SETTINGS = {
    "seeds dominate": (0.10, 0.05, 0.05),
    "alike": (0.05, 0.025, 0.15),
    "units dominate": (0.01, 0.004, 0.3),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("family", "least", "most"), [(1, 0.93, 0.97), (6, 0.9, 1)])
def test_coverage_of_simulated_claims(family, least, most, setting):
    """`family` schemes of 3 seeds on 20 units with skewed effects, against one baseline with another
    seed variance, jointly."""
    draws = 1500
    rng = np.random.default_rng([len(setting), family])
    documents = 3 * rng.normal(size=(draws, 1, 20))

    def scheme(seed_sd, unit_sd):
        own = unit_sd * (rng.gamma(2.0, size=(draws, 1, 20)) - 2) / math.sqrt(2)
        noise = 0.02 * rng.normal(size=(draws, 3, 20))
        return documents + own + seed_sd * rng.normal(size=(draws, 3, 1)) + noise

    seed_sd, baseline_sd, unit_sd = SETTINGS[setting]
    baseline = scheme(baseline_sd, 0.3 * unit_sd if family > 1 else 0.0)
    covered = np.ones(draws, dtype=bool)
    for _ in range(family):
        pairs = zip(scheme(seed_sd, unit_sd), baseline, strict=True)
        results = [
            interval(ours, np.ones(20), minus=theirs, family=family) for ours, theirs in pairs
        ]
        covered &= [result.low <= 0 <= result.high for result in results]
    assert least <= covered.mean() <= most
