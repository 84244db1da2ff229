"""PyTorch's fused kernel: causal attention at once, other masks by blocks of queries.

A mask that depends on distance alone is a strided view of one vector of H·(S + block) numbers, so a
window or a distance bias costs no more than plain causal attention. Memory is linear in the number
of keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.explicit import by_block, query_block
from model.attention.mask import (
    QUERY_BLOCK,
    AttentionMask,
    AttentionView,
    Normalizer,
    mask_dtype,
    no_autocast,
    repeated,
)


def causal_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """(B, H, T, D) of a mask that is causal only, for all T = S queries or the last one."""
    is_wide = q.shape[-1] != v.shape[-1] and q.device.type == "cpu"
    if is_wide and mask.queries > QUERY_BLOCK and not torch.is_grad_enabled():
        # The CPU's fused kernel requires values as wide as keys; its fallback stores all T × S
        # scores.
        return blocks_attend(q, k, v, mask, scale)
    # The last query attends to every key. In a compiled graph the comparison itself is a symbol.
    is_causal = True if mask.queries > 1 else False  # noqa: SIM210
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )


def blocks_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """(B, H, T, D) by blocks of queries, each with only its visible keys."""

    def by_distance(start: int, stop: int) -> Tensor:
        rows, keys, strided = distance_mask(q, mask, start, stop)
        return _masked(rows, k[:, :, keys], v[:, :, keys], strided, scale).flip(2)

    def by_pair(start: int, stop: int) -> Tensor:
        keys = mask.keys_of(start, stop)
        rows = q[:, :, start:stop]
        visible_k = k[:, :, keys]
        bias = mask.additive(start, stop, keys, mask_dtype(q))
        bias = bias.expand(-1, -1, rows.shape[2], visible_k.shape[2])
        return _masked(rows, visible_k, v[:, :, keys], bias, scale)

    if mask.is_by_distance:
        is_learned = mask.by_distance().requires_grad
        return by_block(
            by_distance,
            mask.queries,
            mask.distance_block,
            recompute=is_learned,
        )
    size = query_block(mask.batch * mask.heads, mask.keys)
    return by_block(by_pair, mask.queries, size, recompute=True)


def merged_attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    normalizer: Normalizer,
) -> Tensor:
    """(B, H, T, D) of a softmax over several views on a CPU, without gradients, merged by
    log-sum-exp."""
    mask = views[0].mask

    def block(start: int, stop: int) -> Tensor:
        keys = mask.keys_of(start, stop)
        outputs = []
        logs = []
        for view in views:
            q = view.q[:, :, start:stop].to(v.dtype)
            bias = view.mask.additive(start, stop, keys, mask_dtype(v))
            out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q,
                view.k[:, :, keys].to(v.dtype),
                v[:, :, keys],
                attn_mask=bias.expand(*q.shape[:3], -1),
                scale=scale,
            )
            # The result of queries without a key in this view is undefined.
            has_keys = (bias > -math.inf).any(-1)
            outputs.append(torch.where(has_keys[..., None], out, 0.0))
            logs.append(log.masked_fill(~has_keys, -math.inf))
        weights = torch.stack(logs).softmax(0)[..., None].to(v.dtype)  # (views, B, H, t, 1)
        return (weights * torch.stack(outputs)).sum(0)

    return by_block(block, mask.queries, QUERY_BLOCK, recompute=False)


def distance_mask(
    q: Tensor,
    mask: AttentionMask,
    start: int,
    stop: int,
) -> tuple[Tensor, slice, Tensor]:
    """Reversed queries, keys and mask of one block.

    The mask is a strided view: with reversed queries, the entry of pair (i', j) is at offset + i' +
    j, so strides of (1, 1) describe it without a copy.
    """
    low, high = mask.band_of(start, stop)
    values = mask.by_distance().to(mask_dtype(q))
    farthest = high - 1 - low  # distance of the last query to the first key
    origin = mask.keys - 1 - farthest
    shape = (1, values.shape[0], stop - start, high - low)
    strided = values.as_strided(shape, (0, values.stride(0), 1, 1), origin)
    return q[:, :, start:stop].flip(2), slice(low, high), strided


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    dtype = v.dtype
    if q.device.type == "cuda":
        # The fused kernel with a mask requires equal numbers of heads, and a contiguous mask of q's
        # dtype. In bfloat16 the mask would round distances above 256.
        q = q.to(mask.dtype)
        k = repeated(k, q.shape[1]).to(mask.dtype)
        v = repeated(v, q.shape[1]).to(mask.dtype)
        mask = mask.contiguous()
    # Autocast would round the mask and copy the strided view. q, k and v have the dtype of v.
    with no_autocast(q):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.to(dtype)
