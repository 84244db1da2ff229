"""Verdicts against scipy.stats, and their rates on simulated claims."""

import numpy as np
import pytest
from scipy import stats

from studies.claims.claim_verdicts import (
    INCONCLUSIVE,
    REFUTED,
    REPRODUCED,
    SIGN_ONLY,
    PrimaryComparison,
    decide,
    detectable,
    enough_learned,
    holm,
    p_value,
    sd_bound,
)

CLAIMS = 2000
DELTA = 0.5


def comparison(*values: float, delta: float = DELTA, **more) -> PrimaryComparison:
    return PrimaryComparison(delta, np.array(values), **more)


def around(mean: float, spread: float = 0.01) -> list[float]:
    """Eight values with this mean."""
    return [mean + spread * k for k in (-3, -2, -1, 0, 0, 1, 2, 3)]


def solved(*counts: int, n: int = 16, delta: float = 0.25, **more) -> PrimaryComparison:
    arms = tuple(np.arange(n) < count for count in counts)
    return PrimaryComparison(delta, np.zeros(0), solved=arms, **more)


@pytest.mark.parametrize(
    ("means", "more", "verdict"),
    [
        ([0.6], {}, REPRODUCED),
        ([0.6, 0.7], {}, REPRODUCED),
        ([0.6, 0.4], {}, REFUTED),
        ([-0.6], {}, REFUTED),
        ([0.5], {}, SIGN_ONLY),
        ([0.6, 0.5], {}, SIGN_ONLY),
        ([0.1], {"difference": False}, REPRODUCED),
        ([-0.6], {"difference": False}, REFUTED),
        ([0.6], {"difference": False}, REFUTED),
        ([-0.5], {"difference": False}, INCONCLUSIVE),
        ([0.6], {"error": 1.0}, INCONCLUSIVE),  # the evaluation is too noisy
    ],
)
def test_verdicts(means, more, verdict):
    assert decide([comparison(*around(mean), **more) for mean in means]) == verdict


@pytest.mark.parametrize(
    ("counts", "delta", "verdict"),
    [
        ([16, 0], 0.25, REPRODUCED),
        ([16, 8], 0.25, INCONCLUSIVE),
        ([0, 16], 0.25, REFUTED),
        ([16], 0.75, REPRODUCED),
        ([8], 0.75, SIGN_ONLY),
        ([3], 0.75, REFUTED),
    ],
)
def test_verdicts_of_solved_seeds(counts, delta, verdict):
    assert decide([solved(*counts, delta=delta)]) == verdict


def test_p_values_are_those_of_a_t_test():
    values = around(0.6, spread=0.02)
    p = stats.ttest_1samp(values, DELTA).pvalue
    assert p_value([comparison(*values)]) == pytest.approx(p, rel=4e-4)
    both = [comparison(*values), comparison(*around(0.9))]
    assert p_value(both) == pytest.approx(2 * p, rel=4e-4)  # of the weaker one, by Bonferroni
    assert p_value([comparison(*around(0.5))]) == 1


def test_holm():
    assert holm([0.03, 0.01, 1.0, 0.016]) == [False, True, False, True]
    assert holm([0.02, 0.03]) == [True, True]
    assert holm([0.04, 0.03]) == [False, False]


def test_one_in_eight_runs_may_fail_to_learn():
    assert enough_learned([True] * 7 + [False])
    assert not enough_learned([True] * 6 + [False] * 2)
    assert enough_learned([True] * 14 + [False] * 2)
    assert not enough_learned([True, True, False])


@pytest.mark.parametrize(("n", "m"), [(8, 1), (8, 2), (16, 1)])
def test_detectable_effects_are_found_at_80_percent(n, m):
    """The first comparison decides; a second one is far from delta."""
    rng = np.random.default_rng(7)
    effect = DELTA + detectable(n, m)
    far = [PrimaryComparison(DELTA, rng.normal(50, 1, n))] * (m - 1)
    drawn = [PrimaryComparison(DELTA, rng.normal(effect, 1, n)) for _ in range(CLAIMS)]
    found = [decide([each, *far]) == REPRODUCED for each in drawn]
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)


def test_pilot_bounds_cover_the_sd():
    rng = np.random.default_rng(3)
    bounds = [sd_bound(rng.normal(size=5)) for _ in range(CLAIMS)]
    assert np.mean(np.array(bounds) > 1) == pytest.approx(0.8, abs=0.03)
