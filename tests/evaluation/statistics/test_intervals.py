import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import (
    interval,
    spans_needed,
    unit_means,
    units_needed,
)


def test_unit_means_weight_targets():
    means = unit_means(np.array([1.0, 2, 6, 10, 30]), np.array([4, 4, 4, 9, 0]))
    assert means.tolist() == [30, 3, 10]


@pytest.mark.parametrize("family", [1, 10])
def test_interval_by_hand(family):
    values = np.array([1.0, 2, 3, 4, 5, 9])
    result = interval(values, family=family)
    half = stats.t.ppf(1 - 0.025 / family, 5) * math.sqrt(8 / 6)  # sd = sqrt(40 / 5)
    found = (result.estimate, result.low, result.high)
    assert found == pytest.approx((4, 4 - half, 4 + half), rel=1e-9)
    assert result.level == pytest.approx(1 - 0.05 / family)
    few = interval(values[1:])
    assert few.estimate == 4.6
    assert math.isnan(few.low)


@pytest.mark.parametrize("sd, half, family", [(0.1, 0.02, 1), (0.3, 0.02, 12), (0.001, 0.02, 4)])
def test_units_needed_is_minimal(sd, half, family):
    units = units_needed(sd, half, alpha=0.05 / family)

    def width(units):
        return stats.t.ppf(1 - 0.025 / family, units - 1) * sd / math.sqrt(units)

    assert width(units) <= half
    assert units == 6 or width(units - 1) > half
    assert units_needed(1e9, 1e-9) == 10**7


def test_spans_needed_solves_the_two_variance_parts():
    rng = np.random.default_rng(5)
    between = 0.01
    within = 0.2
    half = 0.008
    x = rng.normal(0, between, (400, 1)) + rng.normal(0, within, (400, 4))
    alone = np.arange(400)
    # Clusters of one and of three documents: spans shrink their part of both, documents' part
    # stays.
    clusters = np.repeat(np.arange(200), np.tile([1, 3], 100))
    for unit, units, share, rel in ((alone, 400, 1, 0.15), (clusters, 200, 2 / 3, 0.2)):
        allowed = units * (half / stats.t.ppf(0.975, units - 1)) ** 2
        expected = within**2 * share / (allowed - between**2 * share)
        assert spans_needed(x, unit, half) == pytest.approx(expected, rel=rel)
    # Where documents differ too much no number of spans helps.
    wild = rng.normal(0, 1.0, (40, 1)) + rng.normal(0, 0.1, (40, 4))
    assert spans_needed(wild, np.arange(40), 0.02) is None
    assert spans_needed(x, alone % 5, half) is None  # five units have no interval


@pytest.mark.parametrize("effect, low, high", [("normal", 0.935, 0.965), ("gamma", 0.915, 0.975)])
def test_coverage_in_4000_draws(effect, low, high):
    rng = np.random.default_rng([7, len(effect)])
    x = rng.normal(size=(4000, 20))
    if effect == "gamma":
        x += 3 * (rng.gamma(2.0, size=(4000, 20)) - 2) / math.sqrt(2)
    intervals = [interval(row) for row in x]
    assert low <= np.mean([each.low <= 0 <= each.high for each in intervals]) <= high
