"""Utilities of schemes that act on query-key pairs: networks of pairs, sums along keys, distances,
and scores with a decay for each feature."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionMask, BiasForms, BiasFunction, QueryBlock, joined
from model.position.interface import AttentionContext

# `PositionalScheme.exempt` of schemes that compute weights per pair.
UNROLLED = {"graphs": "blocks of queries are unrolled when compiled: one graph per length"}
PAIRS_AT_ONCE = 8192  # pairs whose hidden features fit into a CPU cache
PAIRS_ON_A_GPU = 1 << 21


def pair_product(
    weight: Tensor,
    pairs: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """weight (O, I) times pairs (I, N), plus bias (O, 1). Batched, because selective activation
    checkpointing stores the outputs of matrix products that are not."""
    if bias is None:
        return torch.bmm(weight[None], pairs[None])[0]
    return torch.baddbmm(bias[None], weight[None], pairs[None])[0]


def over_pairs(network: Callable[..., Tensor], features: int, *inputs: Tensor) -> Tensor:
    """network(*inputs) (features, N), for inputs (·, N) whose columns, the pairs, are independent.

    Without gradients on a CPU, runs on blocks of columns, so that hidden features stay in the CPU
    cache.
    """
    if torch.is_grad_enabled() or inputs[0].device.type != "cpu":
        return network(*inputs)
    out = inputs[0].new_empty(features, inputs[0].shape[1])
    for part in pair_blocks(inputs[0]):
        out[:, part] = network(*(x[:, part] for x in inputs))
    return out


def pair_blocks(x: Tensor) -> list[slice]:
    """Blocks of the columns of x (·, N)."""
    size = PAIRS_AT_ONCE if x.device.type == "cpu" else PAIRS_ON_A_GPU
    return [slice(start, start + size) for start in range(0, x.shape[1], size)]


def two_layers(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor) -> Tensor:
    """outer (O, W) times relu(inner (W, I) times x (I, N) + bias (W, 1)), for each of the N pairs:
    (O, N)."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return TwoLayers.apply(x, inner, bias, outer)
    return pair_product(outer, pair_product(inner, x, bias).relu())


class TwoLayers(torch.autograd.Function):
    """`two_layers` in blocks of pairs whose hidden features stay in a CPU cache; the backward pass
    computes them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor) -> Tensor:
        ctx.save_for_backward(x, inner, bias, outer)
        out = x.new_empty(len(outer), x.shape[1])
        for part in pair_blocks(x):
            hidden = pair_product(inner, x[:, part], bias).relu_()
            out[:, part] = pair_product(outer, hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, inner, bias, outer = ctx.saved_tensors
        return two_layers_gradient(x, inner, bias, outer, gradients[0])


def two_layers_gradient(
    x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the four inputs of `two_layers` from that of its output, (O, N)."""
    of_x, of_inner, of_bias, of_outer = map(torch.zeros_like, (x, inner, bias, outer))
    for part in pair_blocks(x):
        hidden = pair_product(inner, x[:, part], bias).relu_()
        of_outer += pair_product(gradient[:, part], hidden.T)
        of_hidden = torch.ops.aten.threshold_backward(
            pair_product(outer.T, gradient[:, part]),
            hidden,
            0.0,
        )
        of_inner += pair_product(of_hidden, x[:, part].T)
        of_bias += of_hidden.sum(1, keepdim=True)
        of_x[:, part] = pair_product(inner.T, of_hidden)
    return of_x, of_inner, of_bias, of_outer


def sum_from(x: Tensor) -> Tensor:
    """(…, s) → the sum of each entry and all later ones. Within a document, keys are in temporal
    order, sinks before the window, so later keys are nearer to the query."""
    return x.flip(-1).cumsum(-1).flip(-1)


def sum_after(x: Tensor) -> Tensor:
    """(…, s) → the sum of all later entries; 0 for the last. `sum_from(x) − x` would suffer from
    cancellation."""
    return sum_from(F.pad(x[..., 1:], (0, 1)))


def mask_per_row(
    context: AttentionContext,
    make_flex: Callable[[], BiasFunction] | None = None,
) -> AttentionMask:
    """The visible pairs, such that `QueryBlock.distance` is correct per row even if rows differ in
    positions only."""
    rows = max(context.queries.position.shape[0], context.keys.position.shape[0])
    return context.mask(forms=BiasForms(make_flex=make_flex), by_row=rows > 1)


def distances(block: QueryBlock, last: int) -> Tensor:
    """(B, H, t, s) distances as indices, at most `last`; 0 for future keys, which are masked."""
    d = block.distance.clamp(0, last).long()
    return d.expand(*block.q.shape[:3], block.k.shape[2])


QUERIES = 16  # block size for pairwise scores: QUERIES² · D numbers per head


def decayed_scores(
    block: QueryBlock,
    q_decay: Tensor,
    k_decay: Tensor,
) -> Tensor:
    """(B, H, t, s) Σ_c q_c k_c e^(P_c − P'_c) for visible pairs; any finite number for masked ones.

    No factor exceeds 1 if P does not increase along a document. For keys before its block of 16, a
    query uses e^(P − P0) and a key e^(P0 − P'), where P0 is P of the block's first query that
    attends to such keys: a factor underflows only if the score does. Keys inside the block are
    computed pair by pair.

    Args:
        block: the last keys of the block are those of its queries; if it has all keys, the keys at
            the queries' index are.
        q_decay: P, the logarithm of the decay up to each query, (B or 1, H or 1, t, D).
        k_decay: P' of the keys, (B or 1, H or 1, s, D).
    """
    queries = q_decay.shape[2]
    keys = k_decay.shape[2]
    visible = block.visible  # (R, 1, t, s)
    # Queries are the last tokens of the pass, and a band's keys end with the block's queries.
    whole = block.mask.keys - block.mask.queries + block.start
    own = whole if keys == block.mask.keys else keys - queries
    rows = []
    for start in range(0, queries, QUERIES):
        here = slice(start, min(start + QUERIES, queries))
        near = slice(own + here.start, own + here.stop)
        far = slice(0, near.start)
        q = block.q[:, :, here]
        q_log = q_decay[:, :, here]
        seen = visible[:, :, here]
        parts = []
        if near.start > 0:
            parts.append(
                _far(
                    q,
                    block.k[:, :, far],
                    q_log,
                    k_decay[:, :, far],
                    seen[..., far],
                )
            )
        parts.append(
            _near(
                q,
                block.k[:, :, near],
                q_log,
                k_decay[:, :, near],
                seen[..., near],
            )
        )
        if near.stop < keys:  # future keys
            parts.append(q.new_zeros(*q.shape[:3], keys - near.stop))
        rows.append(torch.cat(parts, dim=-1))
    return joined(rows, 2)


def _near(
    q: Tensor,
    k: Tensor,
    q_decay: Tensor,
    k_decay: Tensor,
    visible: Tensor,
) -> Tensor:
    """Scores pair by pair. Masked pairs, whose difference can be any number, use 0."""
    difference = q_decay[:, :, :, None] - k_decay[:, :, None]  # (B or 1, H or 1, t, s, D)
    decay = torch.where(visible[..., None], difference, 0.0).to(q.dtype).exp()
    return torch.einsum("bhtsc,bhsc->bhts", q[:, :, :, None] * decay, k)


def _far(
    q: Tensor,
    k: Tensor,
    q_decay: Tensor,
    k_decay: Tensor,
    visible: Tensor,
) -> Tensor:
    """Scores with keys before all queries, relative to the first query that attends to any of them.

    Queries without such keys (their document starts in this block) and keys without queries (their
    document has ended) do not affect the base and get the factor 1.
    """
    has_keys = visible.any(3)[..., None]  # (R, 1, t, 1)
    has_queries = visible.any(2)[..., None]  # (R, 1, s, 1)
    base = torch.where(has_keys, q_decay, -math.inf).amax(2, keepdim=True)
    base = base.nan_to_num(neginf=0.0).detach()  # it cancels, also in the gradients
    q = q * torch.where(has_keys, q_decay - base, 0.0).to(q.dtype).exp()
    k = k * torch.where(has_queries, base - k_decay, 0.0).to(k.dtype).exp()
    return q @ k.transpose(-1, -2)
