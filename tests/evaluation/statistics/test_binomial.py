import numpy as np
import pytest
from scipy import stats

from errors import EvaluationError
from evaluation.statistics.binomial import effective, wilson


@pytest.mark.parametrize("hits, n", [(0, 10), (3, 10), (10, 10), (199, 200), (400, 400), (1, 1)])
@pytest.mark.parametrize("alpha", [0.05, 0.002])
def test_wilson_matches_scipy(hits, n, alpha):
    want = stats.binomtest(hits, n).proportion_ci(1 - alpha, method="wilson")
    assert wilson(hits, n, alpha=alpha) == pytest.approx((hits / n, want.low, want.high), abs=1e-12)


def test_effective_items_shrink_sample_size():
    assert wilson(150, 200, n_eff=40)[1:] == pytest.approx(wilson(30, 40)[1:])
    assert wilson(7, 7)[2] == 1.0 and wilson(0, 7)[1] == 0.0


@pytest.mark.parametrize(
    "hits, n, n_eff", [(1, 0, None), (5, 4, None), (-1, 4, None), (1, 4, 5), (1, 4, 0)]
)
def test_invalid_proportions_are_rejected(hits, n, n_eff):
    with pytest.raises(EvaluationError):
        wilson(hits, n, n_eff=n_eff)


def test_effective_items_by_hand():
    # Haystacks of 4 answered all or nothing are one item each, up to the n−1 of a variance: 10·9/10 = 9.
    assert effective(40, [4, 0] * 5, [4] * 10) == pytest.approx(9.0)
    # Unequal haystacks, p = 1/2: the ratio estimator H/(H−1) Σ(hits − p·items)²/n².
    hits = [3, 0, 1]
    items = [3, 4, 1]
    variance = 3 / 2 * ((3 - 0.5 * 3) ** 2 + (0 - 0.5 * 4) ** 2 + (1 - 0.5) ** 2) / 8**2
    assert effective(8, hits, items) == pytest.approx(0.25 / variance)
    assert effective(6, [1, 1, 1], [2, 2, 2]) == 6  # haystacks that agree are worth no more than n
    assert effective(5, [1, 0, 1, 1, 0], [1] * 5) == 5  # no haystack repeats
    assert effective(12, [4, 4, 4], [4, 4, 4]) == effective(12, [0, 0, 0], [4, 4, 4]) == 3
    assert effective(8, [5], [8]) == 1
    with pytest.raises(EvaluationError, match="12 items"):
        effective(12, [4, 4], [4, 4])


def test_effective_items_match_haystack_variance():
    """Beta-binomial: n_eff = n / (1 + (m−1)ρ), ρ = 1/(a+b+1), and Wilson with it covers."""
    rng = np.random.default_rng(4)
    haystacks = 60
    m = 8
    a = 3.0
    b = 1.0
    rate = rng.beta(a, b, size=(4000, haystacks))
    hits = rng.binomial(m, rate)
    found = [effective(haystacks * m, one, [m] * haystacks) for one in hits]
    want = haystacks * m / (1 + (m - 1) / (a + b + 1))
    assert np.mean(found) == pytest.approx(want, rel=0.06)
    truth = a / (a + b)

    def covered(n_effs):
        ends = [
            wilson(int(h.sum()), haystacks * m, n_eff=n) for h, n in zip(hits, n_effs, strict=True)
        ]
        return np.mean([low <= truth <= high for _, low, high in ends])

    assert 0.935 <= covered(found) <= 0.965
    assert covered([None] * len(hits)) < 0.85  # as if every item were independent
