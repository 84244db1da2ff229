"""Temperatures, attention sinks and sink logits, against other implementations and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from model import ModelError, TokenPositions, check_override
from model.attention.kernels import attend
from model.attention.mask import AttentionView
from model.position import AttentionContext
from tests.model.zoo import D, G, H, T, build, close, ids, packed, settings_of

L0 = 7  # original length


def row_of(positions: TokenPositions, row: int) -> TokenPositions:
    keep = slice(row, row + 1)
    return replace(
        positions,
        order=positions.order[keep],
        position=positions.position[keep],
        document=positions.document[keep],
        lengths=positions.lengths[keep],
    )


def factors(temperature: dict, positions: TokenPositions, **keys) -> torch.Tensor:
    choice = settings_of({"name": "none", "temperature": temperature, **keys}).kinds["all"]
    found = choice.temperature.query_factors(positions, choice.max_visible, L0, torch.float64)
    assert found is not None
    return found[:, 0]  # one factor for all heads


def test_no_temperature_adds_no_operations():
    choice = settings_of({"name": "none"}).kinds["all"]
    assert (
        choice.temperature.query_factors(
            TokenPositions.plain(4), choice.max_visible, L0, torch.float64
        )
        is None
    )


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


def test_stretch_temperature_uses_declared_length_per_row():
    found = factors({"name": "stretch"}, TokenPositions.left_padded([28, 7, 3], 28))
    expected = [[1 + 0.412 * math.log(4)], [1.0], [1.0]]
    close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert build({"name": "none", "temperature": {"name": "stretch"}}).depends_on_length


@pytest.mark.parametrize("scheme", ["rope", "none", "path"])
@torch.no_grad()
def test_a_temperature_multiplies_the_scores(scheme):
    """A fixed factor equals query weights scaled by it; a learned head factor does so head by head."""
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
def test_constant_head_factors_equal_frozen_learned_factors():
    """HeadScale found elsewhere: legal on a trained checkpoint, and the same function."""
    values = [0.5, 1.0, 1.3, 0.9, 2.0, 1.1]
    learned = build({"name": "none", "temperature": {"name": "head"}})
    state = learned.state_dict()
    for i in range(len(learned.layers)):
        state[f"layers.{i}.attention.position.scale"] = torch.tensor(values).double()
    learned.load_state_dict(state)
    given = {"name": "none", "temperature": {"name": "fixed", "value": values}}
    check_override(settings_of({"name": "none"}), settings_of(given))
    fixed = build(given)
    fixed.load_state_dict({k: v for k, v in state.items() if not k.endswith("position.scale")})
    close(
        fixed(ids(2, T), TokenPositions.plain(T)),
        learned(ids(2, T), TokenPositions.plain(T)),
        atol=1e-6,
    )
    with pytest.raises(ModelError, match=r"temperature\.value .*\(6\), got 2"):
        build({"name": "none", "temperature": {"name": "fixed", "value": [1.0, 2.0]}})


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


@pytest.mark.parametrize("scheme", ["none", "rope", "alibi", "sinusoidal"])
@torch.no_grad()
def test_window_with_sinks_attends_to_its_keys_only(scheme):
    """One layer: the query at t reads tokens 0 ... sinks − 1 of its document and t − w + 1 ... t."""
    model = build({"name": scheme, "window": 4, "sinks": 2}, layers=1)
    t = T - 2
    for positions, first in (
        (TokenPositions.plain(T), 0),
        (row_of(TokenPositions.left_padded([T - 3, T], T), 0), 3),
        (packed([[5, T - 5]]), 5),
    ):
        tokens = ids(1, T)
        whole = model(tokens, positions)[0, t]
        for at in range(first, T - 1):
            changed = tokens.clone()
            changed[0, at] = (changed[0, at] + 1) % 37
            moved = (model(changed, positions)[0, t] - whole).abs().max()
            assert (moved > 1e-9) == (at - first < 2 or t - 4 < at <= t), (
                f"{positions.layout}: token {at}"
            )


@torch.no_grad()
def test_sinks_have_no_effect_within_window():
    tokens = ids(2, T)
    positions = TokenPositions.plain(T)
    close(
        build({"name": "rope", "window": T, "sinks": 3})(tokens, positions),
        build("rope")(tokens, positions),
    )


ILLEGAL = [
    ({}, {"temperature": {"name": "ssmax"}}, "'ssmax' is learned"),
    ({"temperature": {"name": "head"}}, {}, "'head' is learned"),
    ({"temperature": {"name": "head"}}, {"temperature": {"name": "ssmax"}}, "is learned"),
    ({}, {"sink_logit": "learned"}, "sink_logit cannot be changed"),
]


@pytest.mark.parametrize(("trained", "asked", "message"), ILLEGAL)
def test_learned_modifiers_cannot_be_overridden(trained, asked, message):
    with pytest.raises(ModelError, match=message):
        check_override(
            settings_of({"name": "none", **trained}), settings_of({"name": "none", **asked})
        )


def test_parameter_free_temperatures_can_be_overridden():
    for name in ("fixed", "log_n", "llama4", "ministral3", "inkling", "power", "stretch", "none"):
        asked = settings_of(
            {"name": "alibi", "temperature": {"name": name}, "sinks": 4, "window": 9}
        )
        check_override(settings_of({"name": "alibi"}), asked)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": {"name": "hot"}},
        {"temperature": {"name": "fixed", "value": 0}},
        {"temperature": {"name": "log_n", "length": 1}},
        {"temperature": {"name": "ssmax", "init": -1}},
        {"sinks": -1},
        {"sinks": 4},  # beside no window
        {"sink_logit": "one"},
    ],
)
def test_options_out_of_range_are_rejected(wrong):
    with pytest.raises(ValidationError):
        settings_of({"name": "none", **wrong})
