"""Linear attention against its definition, in every precision."""

import pytest
import torch
from torch import Tensor

from model import TokenPositions
from model.mixers.linear import positive
from model.mixers.mixer import AttentionPass
from tests.model.alone import context_of, normal
from tests.model.zoo import C, D, G, H, build, close, ids

every_form = pytest.mark.parametrize("form", ["numerator", "cosine"])
OFFSET = 37


def rotated(x: Tensor) -> Tensor:
    """R(nθ) of the features (n, n + D/2) of x (B, H, T, D), as complex numbers."""
    positions = OFFSET + torch.arange(x.shape[2], dtype=x.dtype)
    theta = 10_000 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angles = positions[:, None] * theta
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


@every_form
@pytest.mark.parametrize("chunk", [1, 3, 64])
@torch.no_grad()
def test_layers_equal_sums_over_all_pairs(form, chunk):
    model = build("rope", layers=1, mixer={"name": "linear", "form": form, "chunk": chunk})
    attention = model.layers[0].mixer
    x = normal(2, 11, C, seed=7)
    positions = TokenPositions.plain(11, offset=OFFSET)
    scheme = model.position["all"]
    context = context_of(scheme, positions)
    out = attention(x, AttentionPass(context, scheme.plan(context), None), None)

    def heads_of(layer):
        features = (x @ layer.weight.T).unflatten(2, (-1, D))
        return features.transpose(1, 2)

    q = heads_of(attention.wq)
    k = heads_of(attention.wk).repeat_interleave(H // G, dim=1)
    v = heads_of(attention.wv).repeat_interleave(H // G, dim=1)
    if form == "numerator":
        q, k = (torch.nn.functional.elu(each) + 1 for each in (q, k))
        scores = rotated(q) @ rotated(k).mT
        total = (q @ k.mT).tril().sum(-1, keepdim=True)
    else:
        q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
        scores = 1 + rotated(q) @ rotated(k).mT
        total = scores.tril().sum(-1, keepdim=True)
    heads = scores.tril() @ v / total
    close(out, heads.transpose(1, 2).flatten(2) @ attention.wo.weight.T)


@torch.no_grad()
def test_feature_map_is_elu_plus_one_without_underflow():
    x = torch.linspace(-40, 9, 99, dtype=torch.float64)
    expected = torch.where(x > 0, x + 1, x.exp())
    torch.testing.assert_close(positive(x.float()).double(), expected, rtol=1e-5, atol=0)


@every_form
@torch.no_grad()
def test_sums_stay_float32_under_autocast(form):
    """bfloat16 has 8 bits: a sum over 300 tokens in it would stop growing. Projections alone are
    rounded."""
    model = build("rope", mixer={"name": "linear", "form": form}, dtype=torch.float32)
    tokens = ids(2, 300)
    exact = model(tokens, TokenPositions.plain(300))
    cache = model.make_cache(2, 300, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [
            model(tokens[:, s : s + 100], TokenPositions.plain(100, offset=s), cache=cache)
            for s in (0, 100, 200)
        ]
    assert all(layer.last.memory.dtype == torch.float32 for layer in cache.layers)
    assert (torch.cat(parts, 1) - exact).abs().mean() < 0.05
