"""Attention kernels: softmax(q·k·scale + bias) v, or entmax, over the pairs of an attention mask.

`attend` chooses a kernel by device, mask and bias.

With PyTorch's fused kernel:

- ``sdpa``: plain causal attention;
- ``columns``: training with differences of sums in bfloat16, on a GPU;
- ``blocks``: an additive mask, by blocks of queries, on a CPU;
- ``biased`` (`biased.py`): gradients of learned biases by distance, and differences of sums, on a
  CPU;
- ``merged``: several views, on a CPU without gradients.

With FlexAttention (`flex.py`):

- ``flex``: all other masks and biases on GPUs, for head_dim ≥ 16 and more than one query.

With materialized scores:

- ``single``: one query per row;
- ``explicit``: blocks of queries, for all other views, sink logits on a CPU, entmax, and weights
  other than those of q·k + bias (`AttentionView.weights_fn`);
- ``dense``: all scores at once. Tests compare the other kernels with it.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with G dividing H; T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attention.biased import biased_attend, distance_tile
from model.attention.flex import FLEX_FEATURES, block_mask, flex_attend, merge_outputs
from model.attention.mask import (
    PRECISE,
    QUERY_BLOCK,
    SOFTMAX,
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
    """The output (B, H, T, D), with scores in float32 or float64."""
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
    """The output (B, H, 1, D) of the last query of each row."""
    batch, heads = q.shape[:2]
    groups = k.shape[1]
    rows = batch * groups
    is_masked = not mask.is_causal_only
    bias = q.new_zeros((), dtype=mask_dtype(q))
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
        scores = torch.add(bias, torch.bmm(q, k), alpha=scale)
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights, v).view(batch, heads, 1, -1)


def causal_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """The output (B, H, T, D) for a mask that is causal only, of all T = S queries or of the last
    one."""
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


def columns_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """The output (B, H, T, D) of plain causal attention for T = S, with the bias c_i − c_j of
    `with_columns`."""
    sums = mask.forms.key_sums
    assert sums is not None
    q, k = with_columns(q, k, sums / scale)
    features = v.shape[3]
    # Of the fused kernels with grouped queries, not all take values narrower than keys.
    v = F.pad(v, (0, q.shape[3] - features))
    return causal_attend(q, k, v, mask, scale)[..., :features]


MOST_FEATURES = 192  # largest head_dim for which all GPUs have a fused backward pass
PARTS = 3  # number of bfloat16 terms whose sum has the digits of float32


def column_count(heads: int, groups: int) -> int:
    """Columns that `with_columns` adds in bfloat16, without padding."""
    return PARTS * (heads // groups) + 1


def rounded_to_bfloat16(x: Tensor) -> Tensor:
    """x (float32 or float64) rounded to the numbers of bfloat16, in float32. Inductor leaves out
    `.to(torch.bfloat16)` inside a kernel on a GPU, but not these operations on bits."""
    bits = x.detach().float().view(torch.int32)
    nearest_even = 0x7FFF + ((bits >> 16) & 1)
    return ((bits + nearest_even) & -0x10000).view(torch.float32)


def with_columns(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, H, T, ·) and k (B, G, T, ·) with columns that add c_i − c_j to q·k, padded to a
    multiple of 8, for c (B, H, T) in float64.

    Wu et al. 2025, FlashBias (arXiv:2505.12044), for a bias of rank two: [q, 1, c_i]·[k, −c_j, 1],
    where c is relative to the middle of its range R. In bfloat16, −c_j is the sum of three columns;
    their products with 1 are exact, and the error of their sum in float32 is below 2⁻²²·R. The
    column c_i is rounded: a term of the query alone cancels in the softmax, but keeps the
    log-sum-exp small. Heads that share keys have a 1 in columns of their own.

    The gradient of a key's c is that of its first column, rounded to `k.dtype`. The gradient of
    c_i, which is 0 except for rounding, is kept: a gate, whose gradient is a sum over many c, gets
    the difference of two sums with the same errors.
    """
    heads = q.shape[1]
    groups = k.shape[1]
    share = heads // groups
    rest = sums - (sums[..., :1] + sums[..., -1:]).detach() / 2
    of_query = rest.to(q.dtype)[..., None]
    parts = []
    for _ in range(PARTS if q.dtype == torch.bfloat16 else 1):
        parts.append(rest.to(q.dtype))
        rest = (rest - rounded_to_bfloat16(rest)).detach()
    of_keys = torch.stack(parts).unflatten(2, (groups, share))  # (parts, B, G, share, T)
    of_keys = of_keys.permute(1, 2, 4, 0, 3).flatten(3)  # (B, G, T, parts·share)
    own = torch.eye(share, dtype=q.dtype, device=q.device).repeat(groups, len(parts))
    own = own[:, None].expand(*q.shape[:3], -1)
    q = torch.cat([q, own, of_query], dim=-1)
    k = torch.cat([k, -of_keys, torch.ones_like(of_keys[..., :1])], dim=-1)
    padding = (0, -q.shape[3] % 8)
    return F.pad(q, padding), F.pad(k, padding)


def blocks_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """The output (B, H, T, D), by blocks of queries, each with only its visible keys."""

    def by_distance(start: int, stop: int) -> Tensor:
        low, high = mask.band_of(start, stop)
        rows = q[:, :, start:stop].flip(2)
        table = mask.by_distance().to(mask_dtype(q))
        bias = distance_tile(table, mask.queries - stop + low, stop - start, high - low)
        return _masked(rows, k[:, :, low:high], v[:, :, low:high], bias, scale).flip(2)

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
    """The output (B, H, T, D) of a softmax over several views on a CPU, without gradients, merged
    by log-sum-exp."""
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
            outputs.append(out)
            # The log-sum-exp of queries without a key in this view is undefined.
            has_keys = (bias > -math.inf).any(-1)
            logs.append(log.masked_fill(~has_keys, -math.inf)[..., None])
        return merge_outputs(outputs, torch.stack(logs)).to(v.dtype)

    return by_block(block, mask.queries, QUERY_BLOCK, recompute=False)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    # Autocast would round the mask and copy the strided view. q, k and v have the dtype of v.
    with no_autocast(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


# Kernels for a single view whose weights are the softmax over its keys alone.
PLAIN_KERNELS = {
    "single": single_attend,
    "sdpa": causal_attend,
    "blocks": blocks_attend,
    "biased": biased_attend,
    "columns": columns_attend,
}
KERNELS = {
    "merged": merged_attend,
    "flex": flex_attend,
    "explicit": explicit_attend,
    "dense": dense_attend,
}
# Called with the arguments of `attend` (views, values, scale, normalizer) and its output.
AttentionHook = Callable[[list[AttentionView], Tensor, float, Normalizer, Tensor], None]


def attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    kernel: str = "auto",
    normalizer: Normalizer = SOFTMAX,
) -> Tensor:
    """Attention over one or several views of disjoint pairs.

    Args:
        views: at most one view may allow each query-key pair.
        v: (B, G, S, D) values.
        scale: factor on q·k, applied before the bias.
        kernel: name of a kernel that supports the views; ``auto`` chooses by device, mask and bias.
        normalizer: maps the logits of a query to weights.

    Returns:
        (B, H, T, D) in the dtype of `v`.
    """
    if kernel == "auto":
        kernel = choose(views, v, normalizer, views[0].mask.device.type)
    if kernel in KERNELS:
        return KERNELS[kernel](views, v, scale, normalizer)
    (view,) = views
    q = view.q.to(v.dtype)
    return PLAIN_KERNELS[kernel](q, view.k.to(v.dtype), v, view.mask, scale)


def choose(
    views: list[AttentionView],
    v: Tensor,
    normalizer: Normalizer,
    device: str,
) -> str:
    """The kernel for these views and values on a device type."""
    first = views[0]
    mask = first.mask
    q = first.q
    is_cpu = device == "cpu"
    if normalizer.is_sparse:
        return "explicit"
    is_one_view = len(views) == 1 and normalizer.is_softmax
    # Triton matrix products are at least 16 wide and do not support float64. A single query is
    # bound by reading the keys, and needs no block mask.
    has_flex = device == "cuda" and q.shape[-1] >= FLEX_FEATURES and q.dtype != torch.float64
    has_flex = has_flex and mask.queries > 1
    if first.weights_fn is not None:
        return "flex" if has_flex and mask.has_flex_bias else "explicit"
    # `is_causal` aligns the mask top-left: correct only for T = S. A single, last query needs no
    # mask.
    is_causal = mask.is_causal_only and mask.queries in (mask.keys, 1)
    has_single = first.k.dtype in PRECISE if is_cpu else not is_causal
    if is_one_view and has_single and mask.queries == 1:
        return "single"
    if is_one_view and is_causal:
        # On a GPU, the fused kernel stores all T × S scores for grouped queries in float32, or with
        # keys wider than values.
        is_grouped = q.shape[1] != v.shape[1]
        stores_scores = is_grouped and (v.dtype == torch.float32 or q.shape[-1] != v.shape[-1])
        return "flex" if stores_scores and has_flex else "sdpa"
    if has_flex:
        # Without gradients FlexAttention has the exact bias, and adds nothing to captured tensors.
        width = q.shape[-1] + column_count(q.shape[1], v.shape[1])
        has_columns = mask.is_causal_sums and v.dtype == torch.bfloat16 and width <= MOST_FEATURES
        has_columns = has_columns and q.shape[-1] == v.shape[-1] and torch.is_grad_enabled()
        return "columns" if is_one_view and has_columns else "flex"
    if not is_one_view or device == "cuda":
        is_fused = is_cpu and normalizer.is_softmax and not torch.is_grad_enabled()
        return "merged" if is_fused and first.k.shape[-1] == v.shape[-1] else "explicit"
    return "biased" if is_cpu and mask.has_biased_kernel else "blocks"


def precompute_masks(mask: AttentionMask, device: str) -> None:
    """Create the mask tensors that layers share on a device type before the first layer runs.

    Layers that are recomputed or compiled separately must not create them.
    """
    if mask.is_by_distance or (device == "cpu" and mask.has_biased_kernel):
        mask.by_distance()
    if device == "cuda":
        mask.flex_bias()
        block_mask(mask)
