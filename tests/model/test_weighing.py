"""Schemes that compute attention weights, against loops over pairs, published code and closed
forms."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import XLNetConfig
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from model import TokenPositions
from model.position import PositionalScheme
from tests.model.alone import (
    LAYOUTS,
    B,
    S,
    attended,
    by_head,
    close_for_tokens,
    drawn,
    every_layout,
    scheme_of,
    visible,
    weighted,
    windows,
)
from tests.model.zoo import C, D, H, close

Q = 7
SCALE = D**-0.5
PLAIN = LAYOUTS["plain"]


def distances_of(positions: TokenPositions, queries: int) -> Tensor:
    """(B, Q, S) distances of the last queries to all keys; 0 in the future."""
    position = positions.position.expand(B, -1)
    return (position[:, -queries:, None] - position[:, None]).clamp(min=0)


def by_loops(weights_of, positions: TokenPositions, q: Tensor, k: Tensor, v: Tensor, **window):
    """Attention from weights_of(query, keys), the weights of one query's visible keys."""
    k = by_head(k)
    v = by_head(v)
    seen = visible(positions, q.shape[2], **window)
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = seen[b, 0, i].nonzero()[:, 0]
        weights = weights_of(q[b, h, i], k[b, h, keys])
        out[b, h, i] = torch.stack(weights) @ v[b, h, keys]
    return out


@windows
@every_layout
@pytest.mark.parametrize("gate", ["scaled", "unscaled"])
@torch.no_grad()
def test_cope_matches_loops(gate, layout, window):
    """Counts of visible keys only; four rows, so that many counts are clamped and many are not."""
    scheme = scheme_of("cope", spread=0.6, positions=4, gate=gate, **window)
    rows = scheme.weight
    clamped = []

    def weights_of(q, keys):
        scores = keys @ q * SCALE
        gates = (scores if gate == "scaled" else scores / SCALE).sigmoid()
        logits = []
        for m, score in enumerate(scores):
            p = min(float(gates[m:].sum()), 3.0)
            clamped.append(p == 3.0)
            low = math.floor(p)
            high = math.ceil(p)
            share = p - low
            logits.append(score + (1 - share) * (q @ rows[low]) + share * (q @ rows[high]))
        return [*torch.stack(logits).softmax(0)]

    tensors = drawn(Q, S)
    expected = by_loops(weights_of, LAYOUTS[layout], *tensors, **window)
    close_for_tokens(attended(scheme, LAYOUTS[layout], *tensors), expected, LAYOUTS[layout])
    assert not all(clamped)
    assert any(clamped) or window == {"window": 4}


@windows
@every_layout
@pytest.mark.parametrize("remainder", ["self", "drop"])
@torch.no_grad()
def test_stick_breaking_matches_product(remainder, layout, window):
    scheme = scheme_of("stick_breaking", remainder=remainder, **window)

    def weights_of(q, keys):
        # the last visible key is the query's
        shares = (keys[:-1] @ q * SCALE).sigmoid()
        weights = [share * (1 - shares[m + 1 :]).prod() for m, share in enumerate(shares)]
        rest = (1 - shares).prod()
        assert math.isclose(sum(weights) + rest, 1)
        return [*weights, rest if remainder == "self" else 0 * rest]

    tensors = drawn(Q, S)
    expected = by_loops(weights_of, LAYOUTS[layout], *tensors, **window)
    close_for_tokens(attended(scheme, LAYOUTS[layout], *tensors), expected, LAYOUTS[layout])


@windows
@every_layout
@pytest.mark.parametrize("values", [False, True])
@torch.no_grad()
def test_shaw_adds_vectors_to_each_key_and_value(values, layout, window):
    scheme = scheme_of("shaw", spread=0.6, clip=3, values=values, **window)
    positions = LAYOUTS[layout]
    q, k, v = drawn(Q, S)
    index = distances_of(positions, Q).clamp(max=3)
    keys = by_head(k)[:, :, None] + scheme.key[index][:, None]  # (B, H, Q, S, D)
    logits = torch.einsum("bhqd,bhqsd->bhqs", q, keys) * SCALE
    weights = logits.masked_fill(~visible(positions, Q, **window), -math.inf).softmax(-1)
    expected = weights @ by_head(v)
    if values:
        expected += torch.einsum("bhqs,bqsd->bhqd", weights, scheme.value[index])
    # Eager FlexAttention takes most of a second.
    has_flex = not values and len(window) == list(LAYOUTS).index(layout) % 3
    for kernel in ("auto", "flex") if has_flex else ("auto",):
        close_for_tokens(attended(scheme, positions, q, k, v, kernel), expected, positions)


def sinusoid(d: float) -> Tensor:
    angles = [d / 10_000 ** (2 * i / C) for i in range((C + 1) // 2)]
    waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(waves[:C], dtype=torch.float64)


@pytest.mark.parametrize("queries", [1, Q, S])
@torch.no_grad()
def test_transformer_xl_matches_xlnet_relative_shift(queries):
    """Also with cached keys before the queries, where the shift is easily off by one."""
    scheme = scheme_of("transformer_xl", spread=0.6)
    config = XLNetConfig(
        d_model=H * D,
        n_head=H,
        d_inner=8,
        n_layer=1,
        vocab_size=8,
        dropout=0.0,
    )
    theirs = XLNetRelativeAttention(config).double().eval()
    theirs.r_w_bias.copy_(scheme.u)
    theirs.r_r_bias.copy_(scheme.v)
    q, k, v = drawn(queries, S)
    # XLNet's order of the axes is (position, batch, head, feature); distances fall from S to 1 − Q.
    r = torch.stack([scheme.weight @ sinusoid(d) for d in range(S, -queries, -1)])
    expected = theirs.rel_attn_core(
        q.permute(2, 0, 1, 3),
        by_head(k).permute(2, 0, 1, 3),
        by_head(v).permute(2, 0, 1, 3),
        r.view(-1, 1, H, D).expand(-1, B, -1, -1),
        attn_mask=(~visible(PLAIN, queries)).permute(2, 3, 0, 1).double(),
    )
    close(attended(scheme, PLAIN, q, k, v), expected.permute(1, 2, 0, 3), atol=1e-12)


@windows
@every_layout
@pytest.mark.parametrize("base", ["kerple", "alibi"])
@torch.no_grad()
def test_dape_matches_linear_layers(base, layout, window):
    """Their second layer has a bias, drawn at random: the softmax cancels it."""
    scheme = scheme_of("dape", spread=0.6, base=base, width=5, **window)
    positions = LAYOUTS[layout]
    net = nn.Sequential(nn.Linear(2 * H, 5), nn.LeakyReLU(), nn.Linear(5, H)).double()
    net[0].weight.copy_(scheme.weight1)
    net[0].bias.copy_(scheme.bias1)
    net[2].weight.copy_(scheme.weight2)
    d = distances_of(positions, Q)[:, None].double()  # (B, 1, Q, S)
    if base == "alibi":
        bias = -_get_alibi_slopes(H, "cpu").double()[:, None, None] * d
    else:
        scheme.r1.abs_()[0] = -0.3  # below the floor of 0.01
        scheme.r2.abs_()
        r1 = scheme.r1.clamp(min=0.01)[:, None, None]
        r2 = scheme.r2.clamp(min=0.01)[:, None, None]
        bias = -r1 * torch.log(1 + r2 * d)
    q, k, v = drawn(Q, S)
    scores = q @ by_head(k).mT * SCALE
    features = torch.cat([scores, bias.expand_as(scores)], dim=1)
    adapted = net(features.movedim(1, -1)).movedim(-1, 1)
    expected = weighted(scores + bias + adapted, v, visible(positions, Q, **window))
    close_for_tokens(attended(scheme, positions, q, k, v), expected, positions)


@every_layout
@pytest.mark.parametrize("window", [{}, {"window": 4}], ids=str)
@torch.no_grad()
def test_dape_v2_convolves_along_the_visible_keys(layout, window):
    """Query by query: the network on the query's visible keys, with zeros before and after them and
    as many columns after its own key as the kernel reaches."""
    scheme = scheme_of("dape", spread=0.4, base="alibi", width=5, kernel=3, **window)
    positions = LAYOUTS[layout]
    first = nn.Conv2d(2 * H, 5, (1, 3), padding=(0, 1)).double()
    second = nn.Conv2d(5, H, (1, 3), padding=(0, 1)).double()
    first.weight.copy_(scheme.weight1.view(5, 2 * H, 1, 3))
    first.bias.copy_(scheme.bias1)
    second.weight.copy_(scheme.weight2.view(H, 5, 1, 3))
    net = nn.Sequential(first, nn.LeakyReLU(), second)
    d = distances_of(positions, Q)[:, None].double()
    bias = -_get_alibi_slopes(H, "cpu").double()[:, None, None] * d
    q, k, v = drawn(Q, S)
    scores = q @ by_head(k).mT * SCALE
    features = torch.cat([scores, bias.expand_as(scores)], dim=1)
    logits = scores + bias
    seen = visible(positions, Q, **window)
    for b, i in torch.cartesian_prod(torch.arange(B), torch.arange(Q)).tolist():
        keys = seen[b, 0, i].nonzero()[:, 0]
        row = nn.functional.pad(features[b, :, i, keys][None, :, None], (0, 1))
        logits[b, :, i, keys] += net(row)[0, :, 0, : len(keys)]
    expected = weighted(logits, v, seen)
    close_for_tokens(attended(scheme, positions, q, k, v), expected, positions)


@torch.no_grad()
def test_dape_v2_matches_the_released_code():
    """Logits that Alibi_DAPEV2 computed for these weights and scores; its last query differs."""
    scheme = scheme_of("dape", heads=2, groups=2, features=2, base="alibi", width=2, kernel=3)
    n = torch.arange(24.0).double()
    scheme.weight1.copy_(((n % 7 - 3) / 10).view(2, 12))
    scheme.bias1.copy_(torch.tensor([0.1, -0.2], dtype=torch.float64))
    scheme.weight2.copy_(((n[:12] % 5 - 2) / 5).view(2, 6))
    scores = ((torch.arange(32).double() * 5 % 11 - 5) / 4).view(1, 2, 4, 4)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).clamp(min=0).double()
    bias = -torch.tensor([2**-4, 2**-8])[:, None, None].double() * distance
    causal = torch.ones(4, 4).tril().bool()[None, None]
    found = scores + bias + scheme._along_keys(scores, bias[None].expand_as(scores), causal)
    published = [
        [[-1.3107], [1.06500625, -0.4224632812], [0.366246875, -1.1934765625, 0.0492953125]],
        [[-0.4022], [-1.1433898438, 0.42820625], [1.26675625, -0.1755710937, 0.9479265625]],
    ]
    for head, query in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        row = found[0, head, query, : query + 1].tolist()
        assert row == pytest.approx(published[head][query], abs=1e-9)


CASES = {
    "cope": {"positions": 4},
    "shaw": {"clip": 3, "values": True},
    "transformer_xl": {},
    "dape": {},
    "dape_v2": {"kernel": 3},
    "stick_breaking": {},
}


def with_gradients(scheme: PositionalScheme, positions: TokenPositions) -> list[Tensor]:
    """The output, and the gradients of its square."""
    leaves = [x.requires_grad_() for x in drawn(S)]
    out = attended(scheme, positions, *leaves)
    grads = torch.autograd.grad(out.square().sum(), [*leaves, *scheme.parameters()])
    return [out.detach(), *grads]


@windows
@pytest.mark.parametrize("layout", ["plain", "packed", "skipping"])
@pytest.mark.parametrize("name", CASES)
def test_small_blocks_match_one_block_with_gradients(name, layout, window, monkeypatch):
    if name == "dape_v2":  # it does not support sinks
        window = {key: value for key, value in window.items() if key == "window"}
    results = []
    for size in (S, 3):
        monkeypatch.setattr("model.attention.kernels.query_block", lambda *_, size=size: size)
        scheme = scheme_of(name.removesuffix("_v2"), spread=0.6, **CASES[name], **window)
        results.append(with_gradients(scheme, LAYOUTS[layout]))
    dense = attended(scheme, LAYOUTS[layout], *drawn(S), kernel="dense").detach()
    close(dense, results[0][0], atol=1e-12)
    for whole, parts in zip(*results, strict=True):
        assert whole.abs().max() > 1e-3
        close(parts, whole, atol=1e-10)
