"""Temperatures and sink logits against other implementations and by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from model import TokenPositions
from model.attention.kernels import attend
from model.attention.mask import AttentionView, Normalizer
from tests.model.alone import context_of, doubles, drawn, normal, scheme_of, visible
from tests.model.zoo import D, G, H, T, build, close, ids, packed, settings_of

L0 = 7  # original length
LONG = TokenPositions.plain(40_000)
COUNTS = torch.arange(1, 40_001).double()  # visible keys


def factors(positions: TokenPositions, temperature: dict, **window) -> Tensor:
    """(B or 1, T): one factor for all heads."""
    choice = settings_of({"name": "none", "temperature": temperature, **window}).position
    of_queries = choice.temperature.query_factors(positions, choice.max_visible, L0, torch.float64)
    return of_queries[:, 0]


# Settings, expected factors, and the accuracy of the reference.
PUBLISHED = [
    ({"name": "log_n"}, (COUNTS.log() / math.log(L0)).clamp(min=1), 1e-12),
    ({"name": "log_n", "length": 5, "clip": False}, COUNTS.log() / math.log(5), 1e-12),
    # modeling_llama4's line
    ({"name": "llama4"}, torch.log1p(torch.floor(COUNTS / 8192)) * 0.1 + 1.0, 1e-12),
    (
        {"name": "ministral3", "length": 16},
        get_llama_4_attn_scale(COUNTS[None] - 1, 0.1, 16)[0, 0, :, 0],
        1e-12,
    ),
    ({"name": "power"}, compute_attention_scaling(COUNTS[None] - 1)[0, 0, :, 0].double(), 1e-6),
    (
        {"name": "ministral3"},
        get_llama_4_attn_scale(COUNTS[None] - 1, 0.1, L0)[0, 0, :, 0],
        1e-12,
    ),
    ({"name": "inkling"}, 1 + 0.1 * (COUNTS / L0).clamp(min=1).log(), 1e-12),
    ({"name": "inkling", "length": 128}, 1 + 0.1 * (COUNTS / 128).clamp(min=1).log(), 1e-12),
]


@pytest.mark.parametrize(("temperature", "expected", "atol"), PUBLISHED)
def test_published_temperatures(temperature, expected, atol):
    close(factors(LONG, temperature)[0], expected, atol=atol)


@pytest.mark.parametrize(
    ("positions", "window", "counts"),
    [
        (TokenPositions.plain(9), {"window": 4, "sinks": 2}, [[1, 2, 3, 4, 5, 6, 6, 6, 6]]),
        (TokenPositions.plain(3, offset=9), {}, [[10, 11, 12]]),
        (packed([[2, 3]]), {}, [[1, 2, 1, 2, 3]]),
        (TokenPositions.left_padded([4, 2], 4), {}, [[1, 2, 3, 4], [1, 1, 1, 2]]),
    ],
)
def test_counts_include_visible_keys_only(positions, window, counts):
    close(factors(positions, {"name": "ssmax"}, **window).exp(), doubles(counts), atol=1e-9)


@pytest.mark.parametrize("scheme", ["rope", "none", "path"])
@pytest.mark.parametrize("value", [[1.7] * H, [1.0 + h / 4 for h in range(H)], None])
@torch.no_grad()
def test_a_temperature_multiplies_the_scores(scheme, value):
    """Fixed factors of the heads, the same for all written as one number, and learned ones (None)
    equal query weights scaled by them."""
    temperature = {"name": "head"}
    if value is not None:
        temperature = {"name": "fixed", "value": value if len(set(value)) > 1 else value[0]}
    tokens = ids(2, T)
    plain = build({"name": scheme})
    unscaled = plain(tokens)
    scaled = build({"name": scheme, "temperature": temperature})
    state = {name: weight.clone() for name, weight in scaled.state_dict().items()}
    for i in range(len(plain.layers)):
        factor = state.pop(f"layers.{i}.attention.position.scale", value and doubles(value))
        weight = state[f"layers.{i}.attention.wq.weight"]
        weight.unflatten(0, (H, D)).mul_(factor[:, None, None])
    plain.load_state_dict(state)
    close(scaled(tokens), plain(tokens))
    assert (plain(tokens) - unscaled).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", ["auto", "dense", "flex"])
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_sink_logit_matches_gpt_oss(kernel, window):
    sinks = normal(H) * 2
    q, k, v = drawn(T)
    positions = TokenPositions.plain(T)
    seen = visible(positions, T, window)
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)
    layer = SimpleNamespace(num_key_value_groups=H // G, sinks=sinks, training=False)
    theirs, _ = eager_attention_forward(layer, q, k, v, mask, 0.4)
    context = context_of(scheme_of("none", window=window), positions)
    views = [AttentionView(q, k, context.mask())]
    ours = attend(views, v, 0.4, kernel, Normalizer(sinks))
    close(ours, theirs.transpose(1, 2), atol=1e-12)


def test_stretch_follows_the_declared_length_of_each_row():
    rows = replace(TokenPositions.plain(L0), lengths=(L0, 57))
    found = factors(rows, {"name": "stretch"})[:, -1]
    assert found.tolist() == pytest.approx([1, 1 + 0.412 * math.log(57 / L0)])
