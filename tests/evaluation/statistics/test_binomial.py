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


@pytest.mark.parametrize(
    "hits, n, n_eff", [(1, 0, None), (5, 4, None), (-1, 4, None), (1, 4, 5), (1, 4, 0)]
)
def test_invalid_proportions_are_rejected(hits, n, n_eff):
    with pytest.raises(EvaluationError):
        wilson(hits, n, n_eff=n_eff)


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
