"""Remaps of the tokens kept beside a window: LM-Infinite's distance limit, and StreamingLLM's positions."""

from __future__ import annotations

import pytest
import torch

from model import TokenPositions, check_override
from model.attention.kernels import attend
from tests.model.dense_remap import (
    D,
    T,
    context_of,
    dense,
    drawn,
    matrix_of,
    refused,
    scheme_of,
    shown_by,
    through,
)
from tests.model.zoo import build, cached, close, ids, packed, settings_of

WINDOW = 6
SINKS = 3


def lambda_shape(limit: int):
    return lambda n, m: min(n - m, limit) if m < SINKS else n - m


def streaming(n, m):
    return min(n, SINKS + WINDOW - 1) - m if m < SINKS else n - m


CASES = {
    "lambda": ({"name": "lambda", "limit": 4}, lambda_shape(4)),
    "lambda-default": ({"name": "lambda"}, lambda_shape(WINDOW)),
    "lambda-wide": ({"name": "lambda", "limit": 9}, lambda_shape(9)),
    "streaming": ({"name": "streaming"}, streaming),
}
every_case = pytest.mark.parametrize("case", CASES)
KEPT = {"window": WINDOW, "sinks": SINKS}


def seen(orders: list[int], window: int = WINDOW, sinks: int = SINKS) -> torch.Tensor:
    """(T, T): in the window, or among the sinks; orders of one document."""
    return torch.tensor(
        [[m <= n and (n - m < window or m < sinks) for m in orders] for n in orders]
    )


@every_case
@pytest.mark.parametrize("kernel", ["explicit", "dense"])
def test_scores_use_remapped_distances(case, kernel):
    remap, distance = CASES[case]
    (q, k, v), numbers = drawn(T), list(range(T))
    found = through(scheme_of(remap, **KEPT), TokenPositions.plain(T), q, k, v, kernel)
    close(found, dense(q, k, v, matrix_of(numbers, distance), seen(numbers)))


@every_case
@pytest.mark.parametrize(
    ("layout", "fraction", "rotated"), [("interleaved", 1.0, 14), ("half", 0.5, 6)]
)
def test_rotary_layouts_and_partial_rotation(case, layout, fraction, rotated):
    remap, distance = CASES[case]
    (q, k, v), numbers = drawn(T, 14), list(range(T))
    scheme = scheme_of(remap, features=14, layout=layout, fraction=fraction, **KEPT)
    keys = {"rotated": rotated, "layout": layout}
    expected = dense(q, k, v, matrix_of(numbers, distance), seen(numbers), **keys)
    close(through(scheme, TokenPositions.plain(T), q, k, v), expected)


@every_case
def test_last_query_over_retained_keys(case):
    """The sinks and the window, gathered as an evicting cache holds them, in the forms once written."""
    remap, distance = CASES[case]
    scheme, (q, k, v), numbers = scheme_of(remap, **KEPT), drawn(T), list(range(T))
    expected = dense(q, k, v, matrix_of(numbers, distance), seen(numbers))
    kept = [*range(SINKS), *range(T - WINDOW, T)]
    forms = scheme.plan(context_of(scheme, TokenPositions.plain(T))).write(k)[:, :, kept]
    order = torch.tensor([kept])
    keys = TokenPositions(order, order, torch.zeros_like(order), "plain", T, (T,), unit_steps=False)
    plan = scheme.plan(context_of(scheme, TokenPositions.plain(1, offset=T - 1, length=T), keys))
    close(attend(plan.read(q[:, :, -1:], forms), v[:, :, kept], D**-0.5), expected[:, :, -1:])


@every_case
def test_sinks_per_packed_document(case):
    remap, distance = CASES[case]
    scheme = scheme_of(remap, **KEPT)
    (q, k, v) = drawn(T)
    cuts = [[4, 19], [17, 6]]
    rows = [torch.block_diag(*[seen(list(range(n))) for n in row]) for row in cuts]
    shown = torch.cat(
        [matrix_of([n for count in row for n in range(count)], distance) for row in cuts]
    )
    close(
        through(scheme, packed(cuts), q, k, v),
        dense(q, k, v, shown, torch.stack(rows)[:, None].bool()),
    )


def test_streaming_matches_paper_figure():
    """Section 3.2: with tokens 0 1 2 3 6 7 8 kept, decoding token 9, positions are 0 1 2 3 4 5 6 7."""
    shown = shown_by({"name": "streaming"}, 10, window=4, sinks=4)[9]
    assert [round(x) for x in shown[:4].tolist()] == [7, 6, 5, 4]
    assert [round(x) for x in shown[6:].tolist()] == [3, 2, 1, 0]


@torch.no_grad()
def test_streaming_equals_full_attention_before_eviction():
    """Until sinks + window tokens, through the whole model; the next one pushes a token out."""
    ours = build({"name": "rope", "remap": {"name": "streaming"}, **KEPT})
    plain = build("rope")
    for count in range(1, 15):
        text = ids(2, count)
        apart = (
            (ours(text, TokenPositions.plain(count)) - plain(text, TokenPositions.plain(count)))
            .abs()
            .max()
        )
        assert (apart < 1e-10) == (count <= SINKS + WINDOW), count


@torch.no_grad()
def test_unreached_limit_equals_window_with_sinks():
    ours = build({"name": "rope", "remap": {"name": "lambda", "limit": 18}, **KEPT})
    shape = build({"name": "rope", **KEPT})
    close(ours(ids(2, 19), TokenPositions.plain(19)), shape(ids(2, 19), TokenPositions.plain(19)))
    nearer = build({"name": "rope", "remap": {"name": "lambda", "limit": 17}, **KEPT})
    assert (
        nearer(ids(2, 19), TokenPositions.plain(19)) - shape(ids(2, 19), TokenPositions.plain(19))
    ).abs().max() > 1e-6


@every_case
@torch.no_grad()
def test_long_token_by_token_decoding(case):
    """Long enough for the cache to let go of keys several times."""
    model = build({"name": "rope", "remap": CASES[case][0], **KEPT})
    text = ids(2, 47)
    close(cached(model, text, [1] * 47), model(text, TokenPositions.plain(47)))


def test_no_remapped_distance_exceeds_the_cache():
    """Streaming bounds all distances by sinks + window − 1, whatever the length; Λ bounds those of sinks."""
    n = torch.arange(80)
    kept = seen(n.tolist())
    assert shown_by({"name": "streaming"}, 80, **KEPT)[kept].max().round() == SINKS + WINDOW - 1
    assert shown_by({"name": "lambda"}, 80, **KEPT)[kept].max().round() == WINDOW


@pytest.mark.parametrize("name", ["lambda", "streaming"])
@pytest.mark.parametrize("kept", [{}, {"window": 4}])
def test_requires_window_and_sinks(name, kept):
    text = refused({"name": name}, **kept)
    assert f"remap '{name}'" in text and "window and sinks" in text
    assert "requires a window" in refused({"name": name}, sinks=4)


def test_limits_out_of_range_are_rejected():
    assert "limit" in refused({"name": "lambda", "limit": 0}, **KEPT)
    assert "limit" in refused({"name": "streaming", "limit": 3}, **KEPT)


def test_valid_overrides():
    trained = settings_of({"name": "rope"})
    for remap, _ in CASES.values():
        check_override(trained, settings_of({"name": "rope", "remap": remap, **KEPT}))
