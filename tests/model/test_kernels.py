"""Every attention kernel against the dense reference, and the reference against loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model.attention.kernels as kernels
from model import TokenPositions
from model.attention.kernels import attend, choose
from model.attention.mask import QUERY_BLOCK, AttentionMask, AttentionView, BiasForms
from model.fast.biased import NAMESPACE
from model.fast.network_bias import NetworkBias
from model.position import AttentionContext
from model.position.schemes.alibi import alibi_slopes
from tests.model.zoo import close, packed

B = 2
H = 6
G = 3
D = 8


def tensors(t: int, s: int, dtype=torch.float64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q (B, H, T, D), k and v (B, G, S, D) whose softmax is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, t, D), (B, G, s, D), (B, G, s, D))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return 2 * q, k, v


def context_of(keys: TokenPositions, queries: int, window: int | None) -> AttentionContext:
    new = keys.last(queries)
    return AttentionContext(new, new, keys, B, H, torch.device("cpu"), window=window)


def pairs_of(keys: TokenPositions, queries: int, window: int | None, bias: str | None):
    context = context_of(keys, queries, window)
    slopes = alibi_slopes(H)
    if bias == "distance":
        return context.distance_mask(lambda h, d: -slopes[h] * d)
    if bias == "elementwise":
        return context.mask(
            bias=lambda b, h, i, j: 0.3 * torch.sin(1.0 + b + 2 * h + 0.1 * i * j), by_row=True
        )
    if bias == "rule":
        return context.mask(
            mask_mod=lambda b, h, i, j: (j % 3 != 1) | (j == i + keys.order.shape[1] - queries)
        )
    return context.mask()


def by_loops(q, k, v, positions: TokenPositions, window: int | None, slopes=None) -> torch.Tensor:
    """(B, H, T, D): each query by itself, the seen keys listed by their own order and document."""
    out = torch.empty_like(q)
    t = q.shape[2]
    s = k.shape[2]
    order = positions.order.expand(B, -1)
    document = positions.document.expand(B, -1)
    position = positions.position.expand(B, -1)
    for b in range(B):
        for i in range(t):
            me = s - t + i
            seen = [
                j
                for j in range(s)
                if document[b, j] == document[b, me]
                and order[b, me] - order[b, j] >= 0
                and (window is None or order[b, me] - order[b, j] < window)
            ]
            for h in range(H):
                g = h // (H // G)
                logits = [float(q[b, h, i] @ k[b, g, j]) / math.sqrt(D) for j in seen]
                if slopes is not None:
                    away = [float(position[b, me] - position[b, j]) for j in seen]
                    logits = [x - float(slopes[h]) * d for x, d in zip(logits, away, strict=True)]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                mean = sum(w * v[b, g, j] for w, j in zip(weights, seen, strict=True))
                out[b, h, i] = mean / sum(weights)
    return out


@pytest.mark.parametrize("bias", [None, "distance"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", ["plain", "ragged", "packed"])
def test_reference_kernel_matches_loops(layout, window, bias):
    s = 11
    t = 7
    positions = {
        "plain": TokenPositions.plain(s),
        "ragged": TokenPositions.left_padded([s, s - 2], s),
        "packed": packed([[3, s - 3], [6, s - 6]]),
    }[layout]
    q, k, v = tensors(t, s)
    pairs = pairs_of(positions, t, window, bias)
    found = attend([AttentionView(q, k, pairs)], v, D**-0.5, "dense")
    close(
        found, by_loops(q, k, v, positions, window, alibi_slopes(H) if bias else None), atol=1e-12
    )


@settings(max_examples=6)
@given(
    t=st.integers(1, 40),
    before=st.integers(0, 30),
    window=st.none() | st.integers(1, 80),
    bias=st.sampled_from([None, "distance", "elementwise", "rule"]),
    layout=st.sampled_from(["plain", "ragged", "packed"]),
    block=st.sampled_from([1, 7, 16, 64]),
)
def test_all_lowerings_agree(t, before, window, bias, layout, block):
    """Small blocks of queries put many edges into few tokens."""
    s = t + before
    positions = TokenPositions.plain(s)
    if layout == "ragged":
        positions = TokenPositions.left_padded([s, max(1, s // 2)], s)
    elif layout == "packed":
        cut = [[s]] * B if s < 3 else [[2, s - 2], [s - 1, 1]]
        positions = packed(cut)
    if layout == "ragged" and bias == "rule":
        bias = None  # the rule above hides padding from itself
    q, k, v = tensors(t, s, seed=t)
    pairs = pairs_of(positions, t, window, bias)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("model.attention.explicit.QUERY_BLOCK", block)
        views = [AttentionView(q, k, pairs)]
        slow = attend(views, v, D**-0.5, "dense")
        for kernel in ("blocks", "flex"):
            close(attend(views, v, D**-0.5, kernel), slow, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("bias", [None, "distance", "elementwise"])
@pytest.mark.parametrize(("t", "s", "window"), [(300, 300, None), (270, 540, 257), (1, 400, 90)])
@torch.no_grad()
def test_lower_precision_is_close_to_float64(dtype, atol, bias, t, s, window):
    q, k, v = (x.to(dtype) for x in tensors(t, s))
    pairs = pairs_of(TokenPositions.plain(s), t, window, bias)
    exact = attend([AttentionView(q.double(), k.double(), pairs)], v.double(), D**-0.5, "dense")
    for kernel in ("auto", "blocks"):
        found = attend([AttentionView(q, k, pairs)], v, D**-0.5, kernel)
        assert found.dtype == dtype
        close(found.double(), exact, atol=atol)


@pytest.mark.parametrize("bias", [None, "distance", "elementwise"])
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize(("t", "s", "window"), [(530, 530, None), (270, 270, 256), (20, 290, 17)])
def test_blockwise_gradients_match_reference(layout, t, s, window, bias):
    positions = (
        TokenPositions.plain(s) if layout == "plain" else packed([[100, s - 100], [s - 9, 9]])
    )
    pairs = pairs_of(positions, t, window, bias)
    weight = torch.randn(B, H, t, D, generator=torch.Generator().manual_seed(3)).double()
    grads = []
    for kernel in ("dense", "blocks"):
        leaves = [x.requires_grad_() for x in tensors(t, s)]
        out = attend([AttentionView(leaves[0], leaves[1], pairs)], leaves[2], D**-0.5, kernel)
        grads.append(torch.autograd.grad((out * weight).sum(), leaves))
    for slow, fast in zip(*grads, strict=True):
        assert slow.abs().max() > 1e-3
        close(fast, slow, atol=1e-11)


def learned_pairs(
    t: int, s: int, window: int | None, form: str
) -> tuple[AttentionMask, list[torch.Tensor]]:
    """A mask with a bias by distance, of differences of sums or of a network, and what is
    learned."""
    generator = torch.Generator().manual_seed(5)
    context = context_of(TokenPositions.plain(s), t, window)
    if form == "distance":
        weight = torch.randn(H, s, generator=generator).double().requires_grad_()
        return context.distance_mask(lambda h, d: weight[h, d]), [weight]
    if form == "network":
        shapes = {"near": (s,), "far": (t,), "inner": (12,), "offset": (12,), "outer": (H, 12)}
        parts = {
            name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()
        }
        near = parts["near"].sigmoid()
        far = 1 + parts["far"].abs()
        network = NetworkBias(**{**parts, "near": near, "far": far})
        leaves = [x.requires_grad_() for x in network.tensors()]

        def bias(b, h, i, j):
            x = near[(i + s - t - j).clamp(min=0)] / far[i]
            hidden = (x[..., None] * network.inner + network.offset).relu()
            return (hidden * network.outer[h]).sum(-1)

        return context.mask(
            bias=bias, forms=BiasForms(make_network=lambda d: replace(network, near=near[d]))
        ), leaves
    sums = torch.rand(B, H, s, generator=generator).double().neg().cumsum(-1).requires_grad_()
    mask = context.mask(
        bias=lambda b, h, i, j: sums[b, h, i + s - t] - sums[b, h, j],
        forms=BiasForms(key_sums=sums),
        by_row=True,
    )
    return mask, [sums]


@pytest.mark.parametrize("form", ["distance", "sums", "network"])
@pytest.mark.parametrize(
    ("t", "s", "window", "wide"),
    [
        (23, 23, None, 0),
        (9, 30, None, 3),
        (23, 23, 6, 0),
        (17, 31, 14, 2),
        (16, 16, None, 0),
        (3, 20, 2, 0),
    ],
)
def test_gradients_of_learned_biases_match_reference(form, t, s, window, wide, monkeypatch):
    """Small blocks and tiles put many edges into few tokens; `wide` is by how much values exceed
    keys."""
    monkeypatch.setattr("model.fast.biased.QUERY_BLOCK", 8)
    monkeypatch.setattr("model.fast.biased.TILE", (4, 5))
    mask, weights = learned_pairs(t, s, window, form)
    q, k, v = tensors(t, s)
    v = torch.cat([v, v[..., :wide].square()], dim=-1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    views = [AttentionView(q, k, mask)]
    assert choose(views, v, None, "cpu") == "biased"
    slow, fast = (attend(views, v, D**-0.5, kernel) for kernel in ("dense", "auto"))
    close(fast, slow, atol=1e-12)
    factor = torch.randn(slow.shape, generator=torch.Generator().manual_seed(3)).double()
    expected, found = (
        torch.autograd.grad((x * factor).sum(), [*leaves, *weights]) for x in (slow, fast)
    )
    for a, b in zip(expected, found, strict=True):
        assert a.abs().max() > 1e-3
        close(b, a, atol=1e-11)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_sums_of_a_thousand_keep_the_precision_of_lower_dtypes(dtype, rtol):
    mask, _ = learned_pairs(700, 700, None, "sums")
    sums = mask.forms.key_sums * 3
    exact = replace(
        mask, forms=BiasForms(key_sums=sums), bias=lambda b, h, i, j: sums[b, h, i] - sums[b, h, j]
    )
    q, k, v = tensors(700, 700, dtype)
    with torch.no_grad():
        expected = attend(
            [AttentionView(q.double(), k.double(), exact)], v.double(), D**-0.5, "dense"
        )
        found = attend([AttentionView(q, k, exact)], v, D**-0.5)
    assert found.dtype == dtype and sums.min() < -900
    close(found.double(), expected, atol=float(rtol * expected.abs().max()))


@pytest.mark.parametrize("form", ["distance", "network"])
def test_learned_biases_are_one_operation_for_all_lengths(form):
    """As torch.compile requires: no aliases, correct shapes and strides without data, correct
    autograd."""
    mask, _ = learned_pairs(6, 9, None, form)
    q, k, v = (x.requires_grad_() for x in tensors(6, 9))
    table = mask.by_distance().detach().requires_grad_(form == "distance")
    network = [x.detach().requires_grad_() for x in mask.network()]
    arguments = (q, k, v, table, None, network, 0.3)
    torch.library.opcheck(getattr(torch.ops, NAMESPACE).biased_attention.default, arguments)


def test_several_views_share_one_softmax():
    """Disjoint views: even keys with one scale of the queries, odd keys with another."""
    t = 2 * QUERY_BLOCK + 9
    q, k, v = (x.requires_grad_() for x in tensors(t, t))
    context = context_of(TokenPositions.plain(t), t, None)
    even = context.mask(mask_mod=lambda b, h, i, j: j % 2 == 0)
    odd = context.mask(mask_mod=lambda b, h, i, j: j % 2 == 1)
    views = [AttentionView(q, k, even), AttentionView(0.3 * q, k, odd)]
    repeat = H // G
    kk = k.repeat_interleave(repeat, 1)
    vv = v.repeat_interleave(repeat, 1)
    j = torch.arange(t)
    scores = torch.where(j % 2 == 0, q @ kk.mT, 0.3 * q @ kk.mT) * D**-0.5
    expected = scores.masked_fill(j[None] > j[:, None], -math.inf).softmax(-1) @ vv
    for kernel in ("auto", "dense"):
        close(attend(views, v, D**-0.5, kernel), expected, atol=1e-12)
    a = torch.autograd.grad(attend(views, v, D**-0.5).square().sum(), (q, k, v))
    b = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for x, y in zip(a, b, strict=True):
        close(x, y, atol=1e-10)


# device, dtype, (T, S), window, bias, key features, key/value heads, layout, kernel
CHOICES = [
    ("cpu", torch.float64, (9, 9), None, None, 8, 3, "plain", "sdpa"),
    ("cpu", torch.float64, (9, 9), 9, None, 8, 3, "plain", "sdpa"),
    ("cpu", torch.float64, (1, 9), None, None, 8, 3, "plain", "single"),
    ("cpu", torch.float64, (1, 9), 3, "rule", 8, 3, "plain", "single"),
    ("cpu", torch.float64, (3, 9), None, None, 8, 3, "plain", "blocks"),
    ("cpu", torch.float64, (9, 9), 8, None, 8, 3, "plain", "blocks"),
    ("cpu", torch.float64, (9, 9), None, "distance", 8, 3, "plain", "blocks"),
    ("cpu", torch.float64, (9, 9), None, "rule", 8, 3, "plain", "blocks"),
    ("cpu", torch.float64, (9, 9), None, None, 8, 3, "ragged", "blocks"),
    # With grouped queries only the flash kernel is fused: no float32, keys as wide as values.
    ("cuda", torch.bfloat16, (9, 9), None, None, 16, 3, "plain", "sdpa"),
    ("cuda", torch.float32, (9, 9), None, None, 16, 6, "plain", "sdpa"),
    ("cuda", torch.float32, (9, 9), None, None, 16, 3, "plain", "flex"),
    ("cuda", torch.bfloat16, (9, 9), None, None, 32, 3, "plain", "flex"),
    ("cuda", torch.float32, (1, 9), None, None, 32, 3, "plain", "sdpa"),
    ("cuda", torch.float32, (1, 9), None, "distance", 16, 3, "plain", "single"),
    ("cuda", torch.float32, (9, 9), None, "distance", 8, 3, "plain", "blocks"),
    ("cuda", torch.float32, (9, 9), None, "distance", 16, 3, "plain", "flex"),
    ("cuda", torch.float64, (9, 9), None, "distance", 16, 3, "plain", "blocks"),
    ("cuda", torch.bfloat16, (9, 9), None, None, 16, 6, "packed", "flex"),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choice_of_the_kernel(choice):
    device, dtype, (t, s), window, bias, features, heads, layout, kernel = choice
    positions = {
        "plain": TokenPositions.plain(s),
        "ragged": TokenPositions.left_padded([s, 4], s),
        "packed": packed([[4, 5], [6, 3]]),
    }[layout]
    q = torch.zeros(B, H, t, features, dtype=dtype)
    k = torch.zeros(B, heads, s, features, dtype=dtype)
    v = torch.zeros(B, heads, s, 8 if device == "cpu" else 16, dtype=dtype)
    views = [AttentionView(q, k, pairs_of(positions, t, window, bias))]
    assert choose(views, v, None, device) == kernel


@pytest.mark.parametrize("kernel", ["flex", "explicit"])
def test_configured_kernel_runs(kernel, monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, f"{kernel}_attend", lambda *arguments: calls.append(arguments))
    q, k, v = tensors(9, 9)
    view = AttentionView(q, k, pairs_of(TokenPositions.plain(9), 9, None, None))
    attend([view], v, 0.3, kernel=kernel)
    assert len(calls) == 1
