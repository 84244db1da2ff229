"""Every attention kernel against the dense reference, and the reference against loops."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model.attention.kernels as kernels
import model.attention.softmax
from model import TokenPositions
from model.attention.kernels import attend, choose
from model.attention.mask import QUERY_BLOCK, AttentionMask, AttentionView, CausalBand
from model.fast.biased import NAMESPACE
from model.fast.network_bias import NetworkBias
from model.position import AttentionContext
from model.position.schemes.alibi import alibi_slopes
from tests.model.zoo import build, close, every_case_and_layout, ids, packed, reach_of, shared

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
        return context.mask(distance=lambda h, d: -slopes[h] * d)
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


EDGES = [
    # queries, keys, window: around the block of queries, with a cache in front, and far from a multiple
    (QUERY_BLOCK, QUERY_BLOCK, None),
    (3 * QUERY_BLOCK - 1, 3 * QUERY_BLOCK - 1, QUERY_BLOCK + 1),
    (QUERY_BLOCK + 13, QUERY_BLOCK + 13, 1),
    (QUERY_BLOCK + 13, QUERY_BLOCK + 13, QUERY_BLOCK - 1),
    (300, 601, None),
    (QUERY_BLOCK, 2 * QUERY_BLOCK + 1, QUERY_BLOCK),
    (QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 3, QUERY_BLOCK + 1),
    (5, 600, 257),
    (1, 513, 256),
]


@pytest.mark.parametrize(
    ("t", "s", "window", "bias"),
    [  # half of the pairs of an edge and a bias are quick
        pytest.param(*edge, bias, marks=() if (n + m) % 2 == 0 else pytest.mark.slow)
        for n, edge in enumerate(EDGES)
        for m, bias in enumerate([None, "distance", "elementwise", "rule"])
    ],
)
@torch.no_grad()
def test_all_lowerings_agree_at_block_edges(t, s, window, bias):
    q, k, v = tensors(t, s)
    pairs = pairs_of(TokenPositions.plain(s), t, window, bias)
    views = [AttentionView(q, k, pairs)]
    slow = attend(views, v, D**-0.5, "dense")
    for kernel in ("blocks", "flex", "auto"):
        close(attend(views, v, D**-0.5, kernel), slow, atol=1e-12)


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
    """A mask with a bias by distance, of differences of sums or of a network, and what is learned."""
    generator = torch.Generator().manual_seed(5)
    context = context_of(TokenPositions.plain(s), t, window)
    if form == "distance":
        weight = torch.randn(H, s, generator=generator).double().requires_grad_()
        return context.mask(distance=lambda h, d: weight[h, d]), [weight]
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
            bias=bias, make_network=lambda d: replace(network, near=near[d])
        ), leaves
    sums = torch.rand(B, H, s, generator=generator).double().neg().cumsum(-1).requires_grad_()
    mask = context.mask(
        bias=lambda b, h, i, j: sums[b, h, i + s - t] - sums[b, h, j], key_sums=sums, by_row=True
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
    """Small blocks and tiles put many edges into few tokens; `wide` is by how much values exceed keys."""
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


@pytest.mark.parametrize("form", ["distance", "sums", "network"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gradients_of_learned_biases_in_lower_dtypes(form, dtype, error):
    """As under autocast: q, k and v are rounded, the bias is not. The gradient of what adds a constant to all
    logits of a query is a sum that cancels."""
    mask, weights = learned_pairs(140, 300, None, form)
    low = [x.to(dtype).requires_grad_() for x in tensors(140, 300)]
    exact = [x.detach().double().requires_grad_() for x in low]
    found = []
    for (q, k, v), kernel in ((exact, "dense"), (low, "auto")):
        out = attend([AttentionView(q, k, mask)], v, D**-0.5, kernel)
        factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).double()
        found.append(torch.autograd.grad((out * factor).sum(), [q, k, v, *weights]))
    for expected, grad in zip(*found, strict=True):
        close(grad.double(), expected, atol=error * float(expected.abs().max()))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_sums_of_a_thousand_keep_the_precision_of_lower_dtypes(dtype, rtol):
    mask, _ = learned_pairs(700, 700, None, "sums")
    exact = replace(mask, key_sums=mask.key_sums * 3)
    exact = replace(
        exact, bias=lambda b, h, i, j: exact.key_sums[b, h, i] - exact.key_sums[b, h, j]
    )
    q, k, v = tensors(700, 700, dtype)
    with torch.no_grad():
        expected = attend(
            [AttentionView(q.double(), k.double(), exact)], v.double(), D**-0.5, "dense"
        )
        found = attend([AttentionView(q, k, exact)], v, D**-0.5)
    assert found.dtype == dtype and exact.key_sums.min() < -900
    close(found.double(), expected, atol=float(rtol * expected.abs().max()))


@pytest.mark.parametrize("form", ["distance", "network"])
def test_learned_biases_are_one_operation_for_all_lengths(form):
    """As torch.compile requires: no aliases, correct shapes and strides without data, correct autograd."""
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


def test_sdpa_is_chosen_only_for_supported_masks():
    def chosen(t, s, window=None, bias=None, positions=None):
        pairs = pairs_of(positions or TokenPositions.plain(s), t, window, bias)
        q, k, v = tensors(t, s)
        return choose([AttentionView(q, k, pairs)], v, None, "cpu")

    assert chosen(9, 9) == chosen(9, 9, window=9) == "sdpa"
    assert chosen(1, 9) == chosen(1, 9, window=3) == chosen(1, 9, bias="rule") == "single"
    assert chosen(3, 9) == chosen(9, 9, window=8) == chosen(9, 9, bias="distance") == "blocks"
    assert (
        chosen(9, 9, bias="rule")
        == chosen(9, 9, positions=TokenPositions.left_padded([9, 4], 9))
        == "blocks"
    )


@every_case_and_layout
@torch.no_grad()
def test_every_kernel_gives_the_same_logits(case, layout, monkeypatch):
    small = shared(case)
    length = reach_of(small)
    positions = {
        "plain": TokenPositions.plain(length),
        "ragged": TokenPositions.left_padded([length, 4], length),
        "packed": packed([[4, length - 4], [length - 3, 3]]),
    }[layout]
    tokens = ids(2, length)
    real = positions.document.expand(2, -1) >= 0
    auto = small(tokens, positions)
    for kernel in ("dense", "flex"):
        monkeypatch.setattr(
            model.attention.softmax, "attend", functools.partial(attend, kernel=kernel)
        )
        close(small(tokens, positions)[real], auto[real])


@pytest.mark.parametrize(
    ("kernel", "called"),
    [("sdpa", []), ("flex", ["flex_attend"]), ("explicit", ["explicit_attend"]), ("blocks", [])],
)
def test_configured_kernel_runs(kernel, called, monkeypatch):
    found = []
    for name in ("flex_attend", "explicit_attend"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, n=name, f=real: (found.append(n), f(*a))[1])
    q, k, v = tensors(9, 9)
    attend(
        [AttentionView(q, k, pairs_of(TokenPositions.plain(9), 9, None, None))],
        v,
        0.3,
        kernel=kernel,
    )
    assert found == called


def test_kernel_choice_for_packing_and_windows(monkeypatch):
    """What lowers each layout is decided by the pairs alone, here as a GPU would be given them."""
    found = []

    def asked(views, v, scale, **more):
        found.append(choose(views, v, more.get("sink"), "cuda"))
        return attend(views, v, scale, **more)

    monkeypatch.setattr(model.attention.softmax, "attend", asked)
    small = build("rope", heads=3, kv_heads=3, dim=96, head_dim=32, dtype=torch.float32)
    for positions in (packed([[4, 5], [6, 3]]), TokenPositions.plain(9)):
        small(ids(2, 9), positions)
    assert set(found[: len(found) // 2]) == {"flex"} and set(found[len(found) // 2 :]) == {"sdpa"}


@pytest.mark.parametrize(("features", "expected"), [(8, "blocks"), (16, "flex")])
def test_small_head_dim_falls_back_to_blocks(features, expected):
    pairs = AttentionMask(
        batch=1,
        heads=1,
        queries=5,
        keys=5,
        device=torch.device("cpu"),
        mask_mod=lambda b, h, i, j: j <= i,
        separation=lambda b, i, j: i - j,
        bias=lambda b, h, i, j: (j - i) * 1.0,
        band=CausalBand(0),
    )
    q = torch.zeros(1, 1, 5, features)
    assert choose([AttentionView(q, q, pairs)], q, None, "cuda") == expected


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "key_features", "queries", "expected"),
    [
        (torch.bfloat16, 2, 16, 9, "sdpa"),
        (torch.float32, 4, 16, 9, "sdpa"),
        (torch.float32, 2, 16, 9, "flex"),
        (torch.bfloat16, 2, 32, 9, "flex"),
        (torch.float32, 2, 32, 1, "sdpa"),
    ],
)
def test_fused_causal_kernel_of_a_gpu_is_chosen_only_where_memory_stays_linear(
    dtype, kv_heads, key_features, queries, expected
):
    """With grouped queries only the flash kernel is fused: no float32, keys as wide as values."""
    q = torch.zeros(1, 4, queries, key_features, dtype=dtype)
    k, v = (torch.zeros(1, kv_heads, 9, width, dtype=dtype) for width in (key_features, 16))
    pairs = pairs_of(TokenPositions.plain(9), queries, None, None)
    assert choose([AttentionView(q, k, pairs)], v, None, "cuda") == expected


def test_single_query_avoids_flex():
    q, k, v = (x.float() for x in tensors(1, 9))
    q, k, v = (x.repeat(1, 1, 1, 2) for x in (q, k, v))  # at least 16 features
    pairs = pairs_of(TokenPositions.plain(9), 1, None, "distance")
    assert choose([AttentionView(q, k, pairs)], v, None, "cuda") == "single"
