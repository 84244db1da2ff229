"""The explicit kernel: blocks of queries with materialized scores, for weights of any form.

With all queries and keys in one block it is the reference that the other kernels are tested
against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attention.mask import (
    PRECISE,
    QUERY_BLOCK,
    AttentionMask,
    AttentionView,
    Normalizer,
    QueryBlock,
    joined,
    mask_dtype,
    no_autocast,
    repeated,
)

SCORES_AT_ONCE = 1 << 25  # B·H·t·S of a block with materialized scores or masks


def by_block(
    attend_block: Callable[[int, int], Tensor],
    queries: int,
    size: int,
    recompute: bool,
) -> Tensor:
    """attend_block(start, stop) for blocks of `size` queries, concatenated: (B, H, T, D).

    Args:
        recompute: recompute blocks in the backward pass to keep memory linear in T; a single block
            is kept.
    """
    recompute = recompute and queries > size and torch.is_grad_enabled()
    outputs = []
    # The block with the most keys first, so the allocator can reuse its memory.
    for start in range((queries - 1) // size * size, -1, -size):
        stop = min(start + size, queries)
        if recompute:
            out = checkpoint(
                attend_block,
                start,
                stop,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out = attend_block(start, stop)
        outputs.append(out)
    return joined(outputs[::-1], 2)


def query_block(rows: int, keys: int) -> int:
    """Number of queries per block with materialized scores (rows = B·H, t, S = keys)."""
    return min(QUERY_BLOCK, max(8, SCORES_AT_ONCE // (rows * keys)))


def explicit_attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    normalizer: Normalizer,
) -> Tensor:
    """(B, H, T, D), with scores in float32 or float64."""
    mask = views[0].mask

    def block(start: int, stop: int) -> Tensor:
        details = attention_details(views, v, scale, normalizer, start, stop)
        return details.output.to(v.dtype)

    size = query_block(mask.batch * mask.heads, mask.keys)
    return by_block(block, mask.queries, size, recompute=True)


def dense_attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    normalizer: Normalizer,
) -> Tensor:
    """`explicit_attend` with all scores at once."""
    queries = views[0].mask.queries
    details = attention_details(views, v, scale, normalizer, 0, queries, whole=True)
    return details.output.to(v.dtype)


@dataclass(frozen=True)
class AttentionDetails:
    """Logits, weights and outputs of a range of queries, in float32 or float64.

    Attributes:
        keys: index of the keys visible to any of the queries.
        logits: (B, H, t, s) softmax input, −inf if masked; q·k·scale if the weights are not a
            softmax. None unless requested.
        weights: (B, H, t, s); a row sums to 1, or to less with a sink or if no key is visible.
        output: (B, H, t, D).
    """

    keys: slice | Tensor
    logits: Tensor | None
    weights: Tensor
    output: Tensor


def attention_details(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    normalizer: Normalizer,
    start: int,
    stop: int,
    whole: bool = False,
    logits: bool = False,
) -> AttentionDetails:
    """The explicit kernel's intermediate results for queries start, ..., stop − 1. See `attend`.

    Args:
        whole: include all keys of the pass, not only those visible to these queries.
        logits: also return the logits.
    """
    mask = views[0].mask
    first = views[0]
    keys = slice(0, mask.keys) if whole else mask.keys_of(start, stop)
    with no_autocast(v):
        values = repeated(v[:, :, keys].to(mask_dtype(v)), mask.heads)
        if first.weights_fn is not None:
            block = QueryBlock(first, start, stop, keys, scale, normalizer, logits)
            weights = first.weights_fn(block)
            out = weights @ values
            if first.extra_output is not None:
                out = out + first.extra_output(block, weights)
            kept = block.logits
            if logits and kept is None:
                kept = block.scores.masked_fill(~block.visible, -math.inf)
            return AttentionDetails(keys, kept, weights, out)
        total: Tensor | None = None
        for view in views:
            block = QueryBlock(view, start, stop, keys, scale, normalizer)
            scores = block.scores + block.additive
            # Views are disjoint: where one allows a pair, all others have −inf.
            total = scores if total is None else torch.maximum(total, scores)
        assert total is not None
        weights = normalizer(total)
        return AttentionDetails(keys, total if logits else None, weights, weights @ values)


def single_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """(B, H, 1, D) of the last query of each row."""
    batch, heads = q.shape[:2]
    groups = k.shape[1]
    rows = batch * groups
    is_masked = not mask.is_causal_only
    bias = q.new_zeros(())
    if is_masked:
        keys = mask.keys_of(0, 1)
        k = k[:, :, keys]
        v = v[:, :, keys]
        (bias,) = mask.by_query(keys, groups, mask_dtype(q))
    q = q.reshape(rows, heads // groups, -1)  # (B·G, H / G, D)
    k = k.reshape(rows, -1, k.shape[3]).transpose(1, 2)
    v = v.reshape(rows, -1, v.shape[3])
    if q.dtype in PRECISE:
        scores = torch.baddbmm(bias, q, k, beta=int(is_masked), alpha=scale)
    else:  # in bfloat16 the bias would round distances above 256
        scores = torch.bmm(q, k).float() * scale + bias
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights, v).view(batch, heads, 1, -1)
