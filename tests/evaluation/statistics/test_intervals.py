import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import interval, unit_means


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


@pytest.mark.parametrize("effect, low, high", [("normal", 0.935, 0.965), ("gamma", 0.915, 0.975)])
def test_coverage_in_4000_draws(effect, low, high):
    rng = np.random.default_rng([7, len(effect)])
    x = rng.normal(size=(4000, 20))
    if effect == "gamma":
        x += 3 * (rng.gamma(2.0, size=(4000, 20)) - 2) / math.sqrt(2)
    intervals = [interval(row) for row in x]
    assert low <= np.mean([each.low <= 0 <= each.high for each in intervals]) <= high
