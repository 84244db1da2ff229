"""Sampling one token: each filter against a hand-computed case, and draws against the
probabilities."""

import math

import pytest
import torch

from generation.sampling import SamplingParams
from tests.files import table

# Five tokens of probability 0.40, 0.30, 0.15, 0.10, 0.05, in another order than by size.
P = {3: 0.40, 0: 0.30, 4: 0.15, 1: 0.10, 2: 0.05}
LOGITS = torch.tensor([[math.log(P[i]) for i in range(5)]], dtype=torch.float64)
TABLE = table("generation/filters.yaml")


@pytest.mark.parametrize(("sampling", "expected"), TABLE["filters"], ids=str)
def test_filters_by_hand(sampling, expected):
    """The probability of each token that is left."""
    p = SamplingParams(**{"temperature": 1} | sampling).probabilities(LOGITS)[0]
    left = {i: float(x / p.sum()) for i, x in enumerate(p) if x > 0}
    assert left == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("sampling", "logits", "kept"), TABLE["ties"], ids=str)
def test_ties_and_equal_values_are_kept(sampling, logits, kept):
    logits = torch.tensor([logits], dtype=torch.float64)
    p = SamplingParams(temperature=1, **sampling).probabilities(logits)[0]
    assert p.nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize(("top_p", "least"), [(0.5, 0.5), (0.75, 0.25), (0.76, 0.125)])
def test_a_nucleus_of_exactly_top_p_is_complete(top_p, least):
    """Powers of two, whose sums are exact."""
    p = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]], dtype=torch.float64)
    assert SamplingParams(top_p=top_p)._least_of_nucleus(p).item() == least


def test_the_ends_of_the_stretch_of_a_token():
    """A dropped first token is never drawn, and a stretch includes its start, not its end."""
    logits = torch.tensor([[-math.inf, 0.0, 0.0]], dtype=torch.float64).expand(3, -1)
    u = torch.tensor([[0.0], [0.5], [1 - 2**-32]], dtype=torch.float64)
    assert SamplingParams(temperature=1).choose(logits, None, u).tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.99)]
)
def test_sampling_uses_cumulative_probability(sampling):
    """Each token owns a stretch of [0, 1) as long as its probability: count over an even grid of
    chances."""
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    drawn = sampling.choose(LOGITS.expand(n, -1), None, u)
    shares = {i: (drawn == i).double().mean().item() for i in range(5)}
    assert shares == pytest.approx(P, abs=1e-4)


@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.95])
def test_top_p_matches_full_sort(top_p):
    """A peaked row ends within the tokens looked at first, a flat one far beyond: together and
    alone."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3001, generator=generator, dtype=torch.float64)
    logits *= torch.tensor([[6.0], [0.1]])
    sampling = SamplingParams(temperature=1, top_p=top_p)
    got = sampling.probabilities(logits) > 0
    for row, kept in zip(logits.softmax(-1), got, strict=True):
        values, order = row.sort(descending=True)
        before = values.cumsum(0) - values
        nucleus = order[before < top_p]
        assert set(kept.nonzero()[:, 0].tolist()) == set(nucleus.tolist())
    sizes = got.sum(-1).tolist()
    assert sizes[0] < 512
    assert (sizes[1] > 512) == (top_p > 0.1)
    assert torch.equal(sampling.probabilities(logits[:1])[0] > 0, got[0])


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0]])
    seen = torch.tensor([[True, True, False, False]])
    penalized = SamplingParams(repetition_penalty=2.0).penalized(logits, seen)
    assert penalized.tolist() == [[1.0, -4.0, 3.0, -3.0]]
