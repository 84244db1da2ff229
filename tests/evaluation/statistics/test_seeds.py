import math

import numpy as np
import pytest
from scipy import stats

from errors import EvaluationError
from evaluation.statistics.seeds import compare, needed, pool, upper

RNG = np.random.default_rng(17)
A = RNG.normal(2.0, 0.3, (4, 9))
B = RNG.normal(1.9, 0.1, (3, 9))


def by_hand(parts, p, family=1):
    """Half-width from [(variance of a mean, df)], with scipy's t."""
    total = sum(v for v, _ in parts)
    power = 2 if family == 1 else 4 / 3
    df = total**power / sum(v**power / n for v, n in parts)
    return stats.t.ppf(p, df) * math.sqrt(total), df


def parts_of(a, b):
    sa, sb = (stats.sem([row.mean() for row in one]) ** 2 for one in (a, b))
    doc = stats.sem([a[:, j].mean() - b[:, j].mean() for j in range(a.shape[1])]) ** 2
    return [(sa, len(a) - 1), (sb, len(b) - 1), (doc, a.shape[1] - 1)]


@pytest.mark.parametrize("family", [1, 6])
def test_two_schemes_are_compared_by_the_three_variances(family):
    got = compare(A, B, family=family)
    half, df = by_hand(parts_of(A, B), 1 - 0.025 / family, family)
    assert got.estimate == pytest.approx(A.mean() - B.mean())
    assert (got.low, got.high) == pytest.approx(
        (got.estimate - half, got.estimate + half), rel=1e-9
    )
    assert got.df == pytest.approx(df) and got.half == pytest.approx(half)
    assert (got.seeds, got.units, got.family) == ((4, 3), 9, family)
    assert got.level == pytest.approx(1 - 0.05 / family)
    assert got.few and got.claimed


def test_pooling_is_one_seed_variance_with_all_degrees_of_freedom():
    c = RNG.normal(2.1, 0.2, (5, 9))
    variance, df = pool([A, B, c, A[:1]])
    sums = sum(((one.mean(axis=1) - one.mean()) ** 2).sum() for one in (A, B, c))
    assert df == 9 and variance == pytest.approx(sums / 9)
    got = compare(A, B, pooled_variance=(variance, df))
    half, total = by_hand([(variance * (1 / 4 + 1 / 3), 9), parts_of(A, B)[2]], 0.975)
    assert got.half == pytest.approx(half) and got.df == pytest.approx(total)
    with pytest.raises(EvaluationError, match="two seeds"):
        pool([A[:1], B[:1]])


@pytest.mark.parametrize("a, b", [(A[:2], B), (A, B[:2]), (A[:1], B[:1]), (A[:, :5], B[:, :5])])
def test_too_few_seeds_or_units_are_points(a, b):
    got = compare(a, b)
    assert got.estimate == pytest.approx(a.mean() - b.mean())
    assert math.isnan(got.low) and math.isnan(got.high) and not got.claimed
    # a claim needs seeds of its own
    assert math.isnan(compare(a, b, pooled_variance=(0.01, 30.0)).low)
    assert math.isnan(upper(A[:2])) and math.isnan(upper(A[:, :5]))


@pytest.mark.parametrize("family", [1, 5])
@pytest.mark.parametrize("factor", [0.9, 0.7])
def test_needed_seeds_and_units_reach_half_width(family, factor):
    # A spread where both parts matter, so that either can be bought with the other.
    unit = RNG.normal(0, 0.3, 12)
    a = unit + RNG.normal(0, 0.05, (4, 1)) + RNG.normal(0, 0.02, (4, 12))
    b = RNG.normal(0, 0.05, (4, 1)) + RNG.normal(0, 0.02, (4, 12))
    got = compare(a, b, family=family)
    expected = factor * got.half
    seeds, units = needed(got, expected)
    va, vb, vd = (v * n for (v, _), n in zip(parts_of(a, b), (4, 4, 12), strict=True))

    def half(s, d):
        return by_hand(
            [(va / s, s - 1), (vb / s, s - 1), (vd / d, d - 1)], 1 - 0.025 / family, family
        )[0]

    assert half(4, units) <= expected < half(4, units - 1)
    if seeds is None:
        assert half(10**4, 12) > expected
    else:
        assert half(seeds, 12) <= expected < half(seeds - 1, 12)
    assert needed(got, 10.0) == (3, 6)  # never fewer than a claim needs


def unit_effect(rng, effect, shape):
    if effect == "normal":
        return rng.normal(size=shape)
    return (rng.gamma(2.0, size=shape) - 2) / math.sqrt(2)


def scheme(rng, documents, effect, seeds, seed_sd, unit_sd):
    """(n, S, D): documents (n, 1, D) that every scheme sees, what this one makes of each, and its
    seeds."""
    n, _, units = documents.shape
    own = unit_sd * unit_effect(rng, effect, (n, 1, units))
    noise = 0.02 * rng.normal(size=(n, seeds, units))
    return documents + own + seed_sd * rng.normal(size=(n, seeds, 1)) + noise


def draws(n, units, effect, setting, rng):
    """Two schemes of 3 seeds with equal means, (n, 3, D) each; their difference has the setting's
    unit sd."""
    (sd_a, sd_b), unit_sd = SETTINGS[setting]
    documents = 3 * unit_effect(rng, effect, (n, 1, units))
    return scheme(rng, documents, effect, 3, sd_a, unit_sd), scheme(
        rng, documents, effect, 3, sd_b, 0.0
    )


def vectorised(a, b, family=1):
    """(estimate, half) of every draw at once, with scipy: the twin of `compare`."""
    parts = [a.mean(2).var(1, ddof=1) / a.shape[1], b.mean(2).var(1, ddof=1) / b.shape[1]]
    units = a.mean(1) - b.mean(1)
    power = 2 if family == 1 else 4 / 3
    parts.append(units.var(1, ddof=1) / units.shape[1])
    freedom = (a.shape[1] - 1, b.shape[1] - 1, a.shape[2] - 1)
    df = sum(parts) ** power / sum(v**power / n for v, n in zip(parts, freedom, strict=True))
    return units.mean(1), stats.t.ppf(1 - 0.025 / family, df) * np.sqrt(sum(parts))


# Standard deviations of the seeds of two schemes, and of what a document makes of their difference.
SETTINGS = {
    "seeds dominate": ((0.10, 0.05), 0.05),
    "alike": ((0.05, 0.025), 0.15),
    "units dominate": ((0.01, 0.004), 0.3),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("effect, least, most", [("normal", 0.935, 0.965), ("gamma", 0.915, 0.975)])
@pytest.mark.parametrize("units", [20, 60])
def test_coverage_in_4000_draws(units, effect, least, most, setting):
    """Unequal seed variances, 3 seeds of each scheme."""
    rng = np.random.default_rng([units, len(effect), len(setting)])
    a, b = draws(4000, units, effect, setting, rng)
    estimate, half = vectorised(a, b)
    for i in range(10):
        assert compare(a[i], b[i]).half == pytest.approx(half[i], rel=1e-9)
    covered = float(np.mean(np.abs(estimate) <= half))
    assert least <= covered <= most, covered


@pytest.mark.parametrize("effect, least", [("normal", 0.935), ("gamma", 0.9)])
@pytest.mark.parametrize("units", [20, 60])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_family_against_one_baseline_holds_jointly(setting, units, effect, least):
    """Six schemes of 3 seeds against one baseline; each interval at alpha/6."""
    (sd_a, sd_b), unit_sd = SETTINGS[setting]
    rng = np.random.default_rng([31, units, len(effect), len(setting)])
    documents = 3 * unit_effect(rng, effect, (4000, 1, units))
    baseline = scheme(rng, documents, effect, 3, sd_b, 0.3 * unit_sd)
    held = np.ones(4000, dtype=bool)
    for _ in range(6):
        other = scheme(rng, documents, effect, 3, sd_a, unit_sd)
        estimate, half = vectorised(other, baseline, 6)
        assert compare(other[0], baseline[0], family=6).half == pytest.approx(half[0], rel=1e-9)
        held &= np.abs(estimate) <= half
    assert held.mean() >= least, held.mean()
