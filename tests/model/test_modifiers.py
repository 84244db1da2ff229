"""Temperatures, attention sinks and sink logits, against other implementations and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from model import TokenPositions
from model.attention.kernels import attend
from model.attention.mask import AttentionView
from model.position import AttentionContext
from tests.model.zoo import D, G, H, T, build, close, ids, packed, settings_of

L0 = 7  # original length


def factors(temperature: dict, positions: TokenPositions, **keys) -> torch.Tensor:
    choice = settings_of({"name": "none", "temperature": temperature, **keys}).position
    found = choice.temperature.query_factors(positions, choice.max_visible, L0, torch.float64)
    assert found is not None
    return found[:, 0]  # one factor for all heads


def test_log_n_counts_the_query_itself_and_starts_at_the_original_length():
    found = factors({"name": "log_n"}, TokenPositions.plain(20))[0]
    expected = [max(1.0, math.log(n + 1) / math.log(L0)) for n in range(20)]
    close(found, torch.tensor(expected).double(), atol=1e-6)
    assert found[L0 - 1] == 1.0 < found[L0]  # 7 visible keys are the trained length, the 8th is new
    free = factors({"name": "log_n", "length": 5, "clip": False}, TokenPositions.plain(20))[0]
    expected = [math.log(n + 1) / math.log(5) for n in range(20)]
    close(free, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert free[0] == 0


def test_counts_include_visible_keys_only():
    """In a window, behind a cache offset, in packed documents, in padded rows."""
    ssmax = {"name": "ssmax"}
    inside = factors(ssmax, TokenPositions.plain(20), window=4, sinks=2)[0].exp()
    close(inside, torch.tensor([1.0, 2, 3, 4, 5] + [6] * 15).double(), atol=1e-9)
    close(
        factors(ssmax, TokenPositions.plain(3, offset=9))[0].exp(),
        torch.tensor([10.0, 11, 12]).double(),
        1e-9,
    )
    two = factors(ssmax, packed([[2, 3]]))[0].exp()
    close(two, torch.tensor([1.0, 2, 1, 2, 3]).double(), atol=1e-9)
    ragged = factors(ssmax, TokenPositions.left_padded([4, 2], 4)).exp()
    close(ragged[1, 2:], torch.tensor([1.0, 2]).double(), atol=1e-9)


def test_published_temperatures():
    positions = TokenPositions.plain(40_000)
    n = torch.arange(40_000)
    # modeling_llama4's line
    llama4 = torch.log1p(torch.floor((n.double() + 1.0) / 8192)) * 0.1 + 1.0
    close(factors({"name": "llama4"}, positions)[0], llama4, atol=1e-12)
    theirs = get_llama_4_attn_scale(n[None].double(), 0.1, 16)[0, 0, :, 0]
    close(factors({"name": "ministral3", "length": 16}, positions)[0], theirs, atol=1e-12)
    theirs = compute_attention_scaling(n[None])[0, 0, :, 0].double()
    close(factors({"name": "power"}, positions)[0], theirs, atol=1e-6)
    inkling = 1 + 0.1 * torch.log(torch.clamp((n.double() + 1) / 128, min=1.0))
    close(factors({"name": "inkling", "length": 128}, positions)[0], inkling, atol=1e-12)


@pytest.mark.parametrize("scheme", ["rope", "none", "path"])
@torch.no_grad()
def test_a_temperature_multiplies_the_scores(scheme):
    """A fixed factor equals query weights scaled by it; a learned head factor does so head by
    head."""
    tokens = ids(2, T)
    positions = TokenPositions.plain(T)
    plain = build({"name": scheme})
    fixed = torch.full((H,), 1.7, dtype=torch.float64)
    for temperature, scale in (({"name": "fixed", "value": 1.7}, fixed), ({"name": "head"}, None)):
        scaled = build({"name": scheme, "temperature": temperature})
        state = {k: v.clone() for k, v in scaled.state_dict().items()}
        for i in range(len(plain.layers)):
            factor = (
                scale if scale is not None else state.pop(f"layers.{i}.attention.position.scale")
            )
            key = f"layers.{i}.attention.wq.weight"
            state[key] = (state[key].unflatten(0, (H, D)) * factor[:, None, None]).flatten(0, 1)
        plain.load_state_dict(state)
        close(scaled(tokens, positions), plain(tokens, positions))
        assert (
            plain(tokens, positions) - build({"name": scheme})(tokens, positions)
        ).abs().max() > 1e-3


@torch.no_grad()
def test_a_temperature_does_not_scale_the_bias():
    """The factor is on q·k alone: with queries of zero, ALiBi's weights stay what they were."""
    a = build({"name": "alibi", "temperature": {"name": "fixed", "value": 3.0}}, layers=1)
    b = build("alibi", layers=1)
    for model in (a, b):
        model.layers[0].attention.wq.weight.zero_()
    close(a(ids(2, T), TokenPositions.plain(T)), b(ids(2, T), TokenPositions.plain(T)))


@pytest.mark.parametrize("kernel", ["auto", "dense", "flex"])
@torch.no_grad()
def test_sink_logit_matches_gpt_oss(kernel):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, T, 8, generator=generator).double() for n in (H, G, G))
    sinks = torch.randn(H, generator=generator).double() * 2
    positions = TokenPositions.plain(T)
    for window in (None, 5):
        context = AttentionContext(
            positions, positions, positions, 2, H, torch.device("cpu"), window=window
        )
        found = attend([AttentionView(q, k, context.mask())], v, 0.4, kernel, sinks)

        class Layer(torch.nn.Module):
            num_key_value_groups = H // G

        layer = Layer()
        layer.sinks = sinks
        d = torch.arange(T)[:, None] - torch.arange(T)[None]
        hidden = (d < 0) if window is None else (d < 0) | (d >= window)
        mask = torch.zeros(T, T).double().masked_fill(hidden, -math.inf)[None, None]
        theirs, _ = eager_attention_forward(layer, q, k, v, mask, 0.4)
        close(found, theirs.transpose(1, 2), atol=1e-12)


@torch.no_grad()
def test_zero_sink_logit_is_softmax_plus_one():
    """softmax with a sink σ = softmax · sigmoid(lse − σ), published with gpt-oss."""
    q, k, v = (torch.randn(1, H, T, 8).double() for _ in range(3))
    positions = TokenPositions.plain(T)
    context = AttentionContext(positions, positions, positions, 1, H, torch.device("cpu"))
    views = [AttentionView(q, k, context.mask())]
    logits = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    expected = (logits.softmax(-1) * torch.sigmoid(lse)) @ v
    close(attend(views, v, 1.0, sink=torch.zeros(H)), expected, atol=1e-12)
    off_by_one = logits.exp() / (1 + logits.exp().sum(-1, keepdim=True)) @ v
    close(expected, off_by_one, atol=1e-12)


@torch.no_grad()
def test_flex_merges_views_by_logsumexp():
    """Also where a view has no pair at all for some queries, and with a sink beside them."""
    q, k, v = (torch.randn(2, n, T, 8).double() for n in (H, G, G))
    positions = TokenPositions.plain(T)
    context = AttentionContext(positions, positions, positions, 2, H, torch.device("cpu"))
    near = context.mask(mask_mod=lambda b, h, i, j: i - j < 4)
    far = context.mask(mask_mod=lambda b, h, i, j: i - j >= 4)
    views = [AttentionView(q, k, near), AttentionView(0.5 * q, k, far)]
    for sink in (None, torch.randn(H).double()):
        slow = attend(views, v, 0.4, "dense", sink)
        assert torch.isfinite(slow).all()
        for kernel in ("flex", "auto"):
            close(attend(views, v, 0.4, kernel, sink), slow, atol=1e-12)
