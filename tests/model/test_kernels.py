"""Every attention kernel against the dense reference, and the reference against its definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import TokenPositions
from model.attention.biased import NAMESPACE
from model.attention.kernels import attend, choose, rounded_to_bfloat16, with_columns
from model.attention.mask import (
    SOFTMAX,
    AttentionMask,
    AttentionView,
    BiasForms,
    Normalizer,
)
from model.position import AttentionContext
from model.position.schemes.alibi import alibi_slopes
from tests.files import table
from tests.model import alone
from tests.model.alone import B, by_head, close_for_tokens, drawn, normal, visible, weighted
from tests.model.zoo import D, G, H, close, packed

SCALE = D**-0.5


def layout_of(name: str, length: int, first: int = 4) -> TokenPositions:
    """Rows of `length` tokens; documents of `first` tokens and of the others, in either order."""
    if name == "plain":
        return TokenPositions.plain(length)
    if name == "ragged":
        return TokenPositions.left_padded([length, first], length)
    return packed([[first, length - first], [length - first, first]])


def context_of(keys: TokenPositions, queries: int, window: int | None) -> AttentionContext:
    return alone.context_of(alone.scheme_of("none", window=window), keys.last(queries), keys)


def mask_of(
    keys: TokenPositions, queries: int, window: int | None = None, bias: str | None = None
) -> AttentionMask:
    context = context_of(keys, queries, window)
    slopes = alibi_slopes(H)
    before = keys.order.shape[1] - queries
    if bias == "distance":
        return context.distance_mask(lambda h, d: -slopes[h] * d)
    if bias == "elementwise":

        def wave(b, h, i, j):
            return 0.3 * torch.sin(1.0 + b + 2 * h + 0.1 * i * j)

        return context.mask(bias=wave, by_row=True)
    if bias == "sums":
        sums = torch.zeros(B, H, keys.count)
        return context.mask(bias=lambda b, h, i, j: 0.0 * j, forms=BiasForms(key_sums=sums))
    if bias == "mask_mod":
        return context.mask(mask_mod=lambda b, h, i, j: (j % 3 != 1) | (j == i + before))
    return context.mask()


def gradients_of(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * normal(*out.shape, seed=3)).sum(), leaves)


def check_gradients(out: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Outputs and gradients agree with those of the reference."""
    close(out, expected, atol=1e-12)
    slow = gradients_of(expected, leaves)
    for a, b in zip(gradients_of(out, leaves), slow, strict=True):
        assert b.abs().max() > 1e-3
        close(a, b, atol=1e-10)


@pytest.mark.parametrize("bias", [None, "distance"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", ["plain", "ragged", "packed"])
def test_reference_kernel_matches_the_definition(layout, window, bias):
    positions = layout_of(layout, 11)
    q, k, v = drawn(7, 11)
    logits = q @ by_head(k).mT * SCALE
    if bias:
        position = positions.position.expand(B, -1)
        distance = position[:, -7:, None] - position[:, None]
        logits = logits - alibi_slopes(H)[:, None, None] * distance[:, None]
    out = attend([AttentionView(q, k, mask_of(positions, 7, window, bias))], v, SCALE, "dense")
    close_for_tokens(out, weighted(logits, v, visible(positions, 7, window)), positions)


@settings(max_examples=6)
@given(
    t=st.integers(1, 40),
    before=st.integers(0, 30),
    window=st.none() | st.integers(1, 80),
    bias=st.sampled_from([None, "distance", "elementwise", "mask_mod"]),
    layout=st.sampled_from(["plain", "ragged", "packed"]),
    block=st.sampled_from([1, 7, 16, 64]),
)
def test_all_lowerings_agree(t, before, window, bias, layout, block):
    """Small blocks of queries put many edges into few tokens."""
    s = t + before
    positions = layout_of(layout if s > 2 else "plain", s, first=max(1, s // 3))
    if layout == "ragged" and bias == "mask_mod":
        bias = None  # would mask padding from itself
    q, k, v = drawn(t, s, seed=t)
    views = [AttentionView(q, k, mask_of(positions, t, window, bias))]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("model.attention.kernels.QUERY_BLOCK", block)
        slow = attend(views, v, SCALE, "dense")
        for kernel in ("blocks", "flex"):
            close(attend(views, v, SCALE, kernel), slow, atol=1e-12)


@pytest.mark.parametrize("bias", [None, "distance", "elementwise"])
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize(
    ("t", "s", "window"),
    [
        (530, 530, None),
        (270, 270, 256),
        (20, 290, 17),
    ],
)
def test_blockwise_gradients_match_reference(layout, t, s, window, bias):
    mask = mask_of(layout_of(layout, s, first=100), t, window, bias)
    q, k, v = (x.requires_grad_() for x in drawn(t, s))
    views = [AttentionView(q, k, mask)]
    slow = attend(views, v, SCALE, "dense")
    check_gradients(attend(views, v, SCALE, "blocks"), slow, [q, k, v])


def learned_mask(
    t: int, s: int, window: int | None, form: str
) -> tuple[AttentionMask, list[Tensor]]:
    """A mask with a bias by distance or of differences of sums, and what is learned."""
    context = context_of(TokenPositions.plain(s), t, window)
    if form == "distance":
        weight = normal(H, s, seed=5).requires_grad_()
        return context.distance_mask(lambda h, d: weight[h, d]), [weight]
    sums = normal(B, H, s, seed=5).sigmoid().neg().cumsum(-1).requires_grad_()

    def difference(b, h, i, j):
        return sums[b, h, i + s - t] - sums[b, h, j]

    forms = BiasForms(key_sums=sums)
    return context.mask(bias=difference, forms=forms, by_row=True), [sums]


@pytest.mark.parametrize("form", ["distance", "sums"])
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
    monkeypatch.setattr("model.attention.biased.QUERY_BLOCK", 8)
    monkeypatch.setattr("model.attention.biased.TILE", (4, 5))
    mask, weights = learned_mask(t, s, window, form)
    q, k, v = drawn(t, s)
    v = torch.cat([v, v[..., :wide].square()], dim=-1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    views = [AttentionView(q, k, mask)]
    assert choose(views, v, SOFTMAX, "cpu") == "biased"
    slow = attend(views, v, SCALE, "dense")
    check_gradients(attend(views, v, SCALE), slow, [*leaves, *weights])


@pytest.mark.parametrize("groups", [1, 2, H])
def test_columns_match_reference(groups):
    """Values and gradients of q, k, v and c, for heads that share keys and for such that do not."""
    mask, (sums,) = learned_mask(23, 23, None, "sums")
    q = normal(B, H, 23, D).requires_grad_()
    k, v = (normal(B, groups, 23, D, seed=n).requires_grad_() for n in (1, 2))
    views = [AttentionView(q, k, mask)]
    slow = attend(views, v, SCALE, "dense")
    check_gradients(attend(views, v, SCALE, "columns"), slow, [q, k, v, sums])


def test_rounding_by_bits_is_that_of_bfloat16():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=generator) * 2.0 ** torch.arange(-20, 20, 0.0004)[:100_000]
    ties = (x.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    for each in (x, ties, -ties, torch.zeros(3)):
        assert rounded_to_bfloat16(each).equal(each.to(torch.bfloat16).float())
        assert rounded_to_bfloat16(each.double()).equal(each.to(torch.bfloat16).float())


@pytest.mark.parametrize("gate", [0.7, 20.0])
def test_columns_in_bfloat16_keep_the_digits_of_float32(gate, monkeypatch):
    """Sums of 1,024 tokens after 9,000 others. Each query's logits differ from the exact ones by a
    constant."""
    sums = (-gate * normal(1, H, 1024).exp()).cumsum(-1) - 9000 * gate
    q, k = (normal(1, n, 1024, 64, seed=n).bfloat16() for n in (H, G))
    exact = q.double() @ by_head(k).double().mT + sums[..., None] - sums[:, :, None]
    errors = []
    for parts in (3, 2):
        monkeypatch.setattr("model.attention.kernels.PARTS", parts)
        wide_q, wide_k = with_columns(q, k, sums)
        assert wide_q.shape[3] == wide_k.shape[3] == 72 and wide_q.dtype == torch.bfloat16
        error = wide_q.float() @ by_head(wide_k).float().mT - exact
        error -= error.diagonal(dim1=2, dim2=3)[..., None]
        errors.append(float(error.abs().max()))
    spread = float((sums[..., 0] - sums[..., -1]).max())
    assert errors[0] < 2 * 2**-22 * spread < errors[1]


@pytest.mark.parametrize("form", ["distance", "sums"])
def test_learned_biases_are_one_operation_for_all_lengths(form):
    """As torch.compile requires: no aliases, correct shapes and strides without data, correct
    autograd."""
    mask, _ = learned_mask(6, 9, None, form)
    q, k, v = (x.requires_grad_() for x in drawn(6, 9))
    table = mask.by_distance().detach().requires_grad_(form == "distance")
    sums = mask.forms.key_sums
    sums = None if sums is None else sums.detach().requires_grad_()
    operator = getattr(torch.ops, NAMESPACE).biased_attention.default
    torch.library.opcheck(operator, (q, k, v, table, sums, 0.3))


@pytest.mark.parametrize("sink", [None, normal(H)], ids=["", "sink"])
def test_several_views_share_one_softmax(sink, monkeypatch):
    """Disjoint views: even keys with one scale of the queries, odd keys with another; near keys and
    far ones, which some queries do not have."""
    monkeypatch.setattr("model.attention.kernels.QUERY_BLOCK", 16)
    t = 25
    context = context_of(TokenPositions.plain(t), t, None)
    q, k, v = (x.requires_grad_() for x in drawn(t))
    normalizer = Normalizer(sink)
    j = torch.arange(t)
    for covered, mask_mod in (
        (j % 2 == 0, lambda b, h, i, j: j % 2 == 0),
        (j[:, None] - j < 4, lambda b, h, i, j: i - j < 4),
    ):
        own = context.mask(mask_mod=mask_mod)
        others = context.mask(mask_mod=lambda b, h, i, j, first=mask_mod: ~first(b, h, i, j))
        views = [AttentionView(q, k, own), AttentionView(0.3 * q, k, others)]
        scores = q @ by_head(k).mT * SCALE
        scores = torch.where(covered, scores, 0.3 * scores)
        logits = scores.masked_fill(j[None] > j[:, None], -torch.inf)
        if sink is not None:
            column = sink[:, None, None].expand(B, -1, t, 1)
            logits = torch.cat([logits, column], dim=-1)
        expected = logits.softmax(-1)[..., :t] @ by_head(v)
        check_gradients(attend(views, v, SCALE, "auto", normalizer), expected, [q, k, v])
        # FlexAttention has no backward pass on a CPU.
        fixed = [replace(view, q=view.q.detach(), k=view.k.detach()) for view in views]
        for kernel in ("auto", "dense", "flex"):
            close(attend(fixed, v.detach(), SCALE, kernel, normalizer), expected, atol=1e-12)


def chosen(
    device: str,
    *,
    dtype: str = "float32",
    queries: int = 9,
    features: int = 16,
    heads: int = H,
    window: int | None = None,
    bias: str | None = None,
    layout: str = "plain",
    weights: str | None = None,
) -> str:
    """The kernel for queries of 9 tokens, with `heads` heads of keys and 16 features of values.

    Args:
        weights: the scheme computes weights of its own; "flex": FlexAttention can too.
    """
    sizes = ((H, queries, features), (heads, 9, features), (heads, 9, 16))
    q, k, v = (torch.zeros(B, *size, dtype=getattr(torch, dtype)) for size in sizes)
    mask = mask_of(layout_of(layout, 9), queries, window, bias)
    if weights == "flex":
        mask = replace(mask, forms=BiasForms(make_flex=lambda: None))
    views = [AttentionView(q, k, mask, weights_fn=None if weights is None else lambda block: None)]
    return choose(views, v, SOFTMAX, device)


CHOICES = table("model/kernels.yaml")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chosen_kernels(device):
    for kernel, case in CHOICES[device]:
        assert chosen(device, **case) == kernel, case
    with torch.no_grad():
        assert chosen("cuda", dtype="bfloat16", bias="sums") == "flex"
