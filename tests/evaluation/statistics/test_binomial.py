import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import effective, wilson


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
