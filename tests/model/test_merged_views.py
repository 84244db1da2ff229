"""Views with masks by distance, merged by log-sum-exp, against the dense kernel."""

from __future__ import annotations

import pytest
import torch

from model import TokenPositions
from model.attention.kernels import attend, choose
from tests.model.dense_remap import D, T, context_of, drawn, scheme_of
from tests.model.zoo import close

KEPT = {"window": 6, "sinks": 3}
CASES = {
    "rerope": ({"name": "rerope", "distance": 4}, {}),
    "rerope-window": ({"name": "rerope", "distance": 4}, {"window": 7}),
    "rerope-window-inside": ({"name": "rerope", "distance": 9}, {"window": 7}),
    "leaky": ({"name": "leaky_rerope", "distance": 5, "factor": 3.0}, {}),
    "self_extend": ({"name": "self_extend", "neighbors": 6, "group": 3}, {}),
    "lambda": ({"name": "lambda"}, KEPT),
    "streaming": ({"name": "streaming"}, KEPT),
}
EXPLICIT = {
    "lambda with another limit": ({"name": "lambda", "limit": 4}, KEPT),
    "rerope with sinks": ({"name": "rerope", "distance": 4}, KEPT),
    "three views": ({"name": "dual_chunk", "chunk": 8, "local": 3}, {}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("model.attention.mask.QUERY_BLOCK", 4)
    monkeypatch.setattr("model.attention.mask.WIDE_BLOCK", 4)


def views_of(case, positions: TokenPositions, queries: int):
    remap, keys = case
    scheme = scheme_of(remap, **keys)
    (q, k, v) = drawn(T)
    plan = scheme.plan(context_of(scheme, positions, queries=queries))
    return plan.read(q[:, :, -queries:], plan.write(k)), v


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("queries", [T, 6])
@torch.no_grad()
def test_merged_views_equal_the_dense_kernel(case, queries):
    views, v = views_of(CASES[case], TokenPositions.plain(T), queries)
    assert choose(views, v, None, "cpu") == "merged"
    found = attend(views, v, D**-0.5)
    close(found, attend(views, v, D**-0.5, "dense"), atol=1e-12)
    single = [view.__class__(view.q.float(), view.k.float(), view.mask) for view in views]
    close(attend(single, v.float(), D**-0.5).double(), found, atol=1e-5)


@pytest.mark.parametrize("case", EXPLICIT)
@torch.no_grad()
def test_other_views_stay_explicit(case):
    views, v = views_of(EXPLICIT[case], TokenPositions.plain(T), T)
    assert choose(views, v, None, "cpu") == "explicit"


@torch.no_grad()
def test_gaps_gradients_and_sink_logits_stay_explicit():
    """Where distances in positions are not distances of keys, and where the kernel has no backward
    pass."""
    case = CASES["rerope"]
    views, v = views_of(case, TokenPositions.plain(T), T)
    assert choose(views, v, torch.zeros(6), "cpu") == "explicit"
    with torch.enable_grad():
        assert choose(views, v, None, "cpu") == "explicit"
    gaps = TokenPositions.plain(T)
    position = torch.where(gaps.order < 9, gaps.order, gaps.order + 5)
    gaps = TokenPositions(
        gaps.order, position, gaps.document, "plain", T + 5, (T + 5,), unit_steps=False
    )
    views, v = views_of(case, gaps, T)
    assert choose(views, v, None, "cpu") == "explicit"
