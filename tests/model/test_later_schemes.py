"""Clipped RoPE, Hard-ALiBi, relative logits, entmax and shifted keys against
independent formulas."""

import math

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from model import ModelError
from model.attention.mask import AttentionView, Normalizer
from tests.model.alone import bias_of, normal, scheme_of
from tests.model.test_scaling import spectrum
from tests.model.zoo import D, G, H, T, build, close, ids


def test_clipped_frequencies_taper_to_zero():
    """Values of the released code for 20 of 64 pairs at base 500,000."""
    theta = 500_000.0
    found = spectrum(128, theta=theta, scaling={"name": "clipped", "pairs_clipped": 20}).tolist()
    plain = [theta ** (-k / 64) for k in range(64)]
    assert found[:45] == pytest.approx(plain[:45], rel=1e-14)
    assert found[63] == 0
    for i in (1, 7, 18):
        taper = 0.5 * (1 + math.cos(math.pi * i / 19))
        assert found[44 + i] == pytest.approx(plain[44 + i] * taper, rel=1e-12)


def test_pairs_without_a_whole_turn_are_clipped_by_default():
    """Wavelengths 2π·10000^(k/32) above 512 tokens: pairs 16 to 31."""
    found = spectrum(64, length=512, scaling={"name": "clipped"}).tolist()
    plain = [10_000.0 ** (-k / 32) for k in range(32)]
    tapers = [0.5 * (1 + math.cos(math.pi * i / 15)) for i in range(16)]
    expected = [f * t for f, t in zip(plain, [1.0] * 16 + tapers, strict=True)]
    assert found == pytest.approx(expected, abs=1e-15)


def test_hard_alibi_windows():
    for keys, windows in (
        ({}, [1, 2, 3, 9, 9, 9]),
        ({"windows": [2, None, 4, 1, None, 7]}, [2, 9, 4, 1, 9, 7]),
    ):
        bias = bias_of(scheme_of("hard_alibi", **keys), 9)[0]
        for head, window in enumerate(windows):
            for query in range(9):
                seen = (bias[head, query, : query + 1] == 0).nonzero().flatten().tolist()
                assert seen == list(range(max(0, query - window + 1), query + 1))
    with pytest.raises(ModelError, match="one entry per head"):
        scheme_of("hard_alibi", windows=[3, None])


@torch.no_grad()
def test_relative_logits_match_inkling():
    """The logits added to each pair in the first layer."""
    model = build({"name": "relative_logits", "profiles": 3, "extent": 7}, layers=1)
    scheme = model.position["all-0"]
    x, view = first_attention(model, ids(2, T))
    theirs = InklingRelativeLogits(3, 7).double()
    theirs.proj.copy_(scheme.profiles)
    mixed = (x @ scheme.mix.T).unflatten(2, (H, 3))
    expected = theirs(mixed, torch.arange(T), torch.arange(T))  # (B, H, T, T)

    added = view.mask.bias(*view.mask.indices(0, T, slice(0, T)))
    close(added.tril(), expected.tril(), atol=1e-12)


def entmax(logits: torch.Tensor) -> torch.Tensor:
    return Normalizer(is_sparse=True)(logits)


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("count", [1, 2, 7, 3000])
def test_entmax_maximizes_its_objective(count, scale):
    """pᵀz + Σ (p − p^1.5)·4/3 over distributions p: its slope in p_i is the same where p_i > 0, and
    at most that elsewhere. Some logits are masked, some equal."""
    z = scale * normal(4, count, seed=count)
    z[:, count // 2] = z[:, 0]
    if count > 2:
        z[:, 1] = -torch.inf
    p = entmax(z)
    close(p.sum(-1), torch.ones(4).double(), atol=1e-9)
    slopes = z - 2 * p.sqrt()
    for row, weights in zip(slopes, p, strict=True):
        level = row[weights > 0]
        assert level.max() - level.min() < 1e-8
        assert row.max() < level.max() + 1e-8
    assert count < 7 or scale < 1 or (p == 0).any()


def test_gradient_of_entmax():
    z = 1.5 * normal(3, 9)
    z[0, 4] = -torch.inf
    finite = z.isfinite()
    assert torch.autograd.gradcheck(
        lambda x: entmax(torch.where(finite, x, -torch.inf)),
        torch.where(finite, z, 0.0).requires_grad_(),
    )


def first_attention(model, tokens: torch.Tensor) -> tuple[torch.Tensor, AttentionView]:
    """The input and the view of the attention of the first layer."""
    views = []
    model(tokens, hooks=[lambda found, *_: views.extend(found)])
    return model.layers[0].attention_norm(model.embed(tokens)), views[0]


@torch.no_grad()
def test_shifted_keys_are_those_of_the_released_code():
    """k[:, 1:, :, D // 2 :] = k[:, : −1, :, D // 2 :], with half of the features rotated."""
    position = {"name": "rope", "fraction": 0.6, "shifted_keys": 0.4}
    model = build(position, layers=1)
    x, view = first_attention(model, ids(2, T))
    weight = model.layers[0].mixer.wk.weight
    k = (x @ weight.T).unflatten(-1, (G, D))  # (B, T, G, D)
    theta = 10_000.0 ** (-torch.arange(3).double() / 3)
    angles = torch.arange(T)[:, None] * theta
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(k[..., :3], k[..., 3:6]) * turns
    k = torch.cat([turned.real, turned.imag, k[..., 6:]], dim=-1)
    k[:, 1:, :, 6:] = k[:, :-1, :, 6:].clone()
    close(view.k.transpose(1, 2), k, atol=1e-12)


@torch.no_grad()
def test_adaptive_temperature_is_that_of_asentmax():
    temperature = {"name": "adaptive", "delta": 0.5, "gamma_range": 1.5, "first_head": 2}
    model = build({"name": "none", "temperature": temperature}, layers=1)
    x, view = first_attention(model, ids(2, T))
    attention = model.layers[0].mixer
    w, u = attention.position.adaptive
    logs = torch.arange(2, T + 2).double().log()[:, None]
    factors = torch.ones(2, T, H, dtype=torch.float64)
    softplus = (1 + (x @ w.T).exp()).log()
    exponent = 1.5 * (x @ u.T).tanh()
    factors[..., 2:] = 0.5 + softplus * logs**exponent
    q = (x @ attention.wq.weight.T).unflatten(-1, (H, D))
    close(view.q.transpose(1, 2), q * factors[..., None], atol=1e-12)
