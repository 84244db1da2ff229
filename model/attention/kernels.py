"""Attention kernels: softmax(q·k·scale + bias) v over the pairs of an attention mask.

`attend` chooses one of these implementations:

- ``sdpa``: PyTorch's fused kernel for plain causal attention;
- ``flex``: FlexAttention, on GPUs, for all other masks and biases with head_dim of at least 16 and more
  than one query; several views are merged by their log-sum-exp;
- ``blocks``: blocks of queries through the fused kernel with an additive mask; memory is linear in the
  number of keys. A mask that depends on distance alone is a strided view of one vector of H·(S + block)
  numbers, so a window or a distance bias costs no more than plain causal attention;
- ``biased``: blocks of queries with gradients of the bias, on a CPU, for learned biases by distance and for
  differences of sums (`model/attention/biased.py`);
- ``single``: one query per row as batched matrix products. The CPU's fused kernel computes one head at a
  time; a GPU's takes a mask only with as many key/value heads as query heads;
- ``merged``: ``blocks`` for several views with masks by distance, merged by their log-sum-exp; on a CPU
  without gradients;
- ``explicit``: blocks of queries with materialized scores, for other views on a CPU, sink logits, and
  weights other than softmax(q·k + bias) (`AttentionView.weights_fn`).

`dense` is the reference implementation: all scores at once. Tests compare the others with it.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with G dividing H; T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from model.attention.biased import biased_attention
from model.attention.mask import (
    QUERY_BLOCK,
    AttentionMask,
    AttentionView,
    QueryBlock,
    mask_dtype,
    repeated,
    softmax,
)

FLEX_FEATURES = 16  # smallest head_dim that FlexAttention supports on a GPU
PRECISE = torch.float32, torch.float64
SCORES_AT_ONCE = 1 << 25  # B·H·t·S of a block with materialized scores or masks
KERNELS = ("auto", "single", "sdpa", "flex", "blocks", "biased", "merged", "explicit", "dense")
# Called with the arguments of `attend` (views, values, scale, sink logit) and its output.
AttentionHook = Callable[[list[AttentionView], Tensor, float, Tensor | None, Tensor], None]


@cache
def _compiled(function, dynamic: bool | None, variant: tuple):
    """`function` compiled on first use, with graphs and a recompile limit of its own for each `variant`.

    Past its recompile limit torch.compile runs eagerly, where FlexAttention and its block mask take O(T²)
    memory; with `fullgraph` it raises instead.
    """
    options: dict[str, Any] = {"isolate_recompiles": True}  # not in the type stubs of torch.compile
    return torch.compile(function, dynamic=dynamic, fullgraph=True, **options)


def _codes(function) -> tuple:
    """The code of a function and of the functions it captures."""
    if not hasattr(function, "__code__"):
        return (None,)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inner = [code for f in cells if hasattr(f, "__code__") for code in _codes(f)]
    return (function.__code__, *inner)


def _fused(function, mask: AttentionMask, dynamic: bool | None = None, *options: bool):
    """`function` compiled on a GPU; `function` itself on a CPU and inside a compiled model.

    Graphs differ by the code of mask and bias, by gradients and by `options`.
    """
    if mask.device.type != "cuda" or torch.compiler.is_compiling():
        return function
    variant = (*_codes(mask.mask_mod), *_codes(mask.flex_bias()), torch.is_grad_enabled(), *options)
    return _compiled(function, dynamic, variant)


def attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    kernel: str = "auto",
    sink: Tensor | None = None,
) -> Tensor:
    """Softmax attention over one or several views of disjoint pairs.

    Args:
        views: at most one view may allow each query-key pair.
        v: (B, G, S, D) values.
        scale: factor on q·k, applied before the bias.
        kernel: one of KERNELS; ``auto`` chooses by device, mask and bias.
        sink: (H,) logit of an extra softmax column without a value per head, as in gpt-oss.

    Returns:
        (B, H, T, D) in the dtype of `v`.
    """
    first = views[0]
    if kernel == "auto":
        kernel = choose(views, v, sink, first.mask.device.type)
    if kernel == "dense":
        return attention_details(
            views, v, scale, sink, 0, first.mask.queries, whole=True
        ).output.to(v.dtype)
    weighted = first.weights_fn is not None and not (kernel == "flex" and first.mask.has_flex_bias)
    if kernel == "explicit" or weighted:
        return _explicit(views, v, scale, sink)
    if kernel == "flex":
        return _flex(views, v, scale, sink)
    if kernel == "merged":
        return _merged(views, v, scale)
    if len(views) > 1 or sink is not None:
        return _explicit(views, v, scale, sink)
    q = first.q.to(v.dtype)
    k = first.k.to(v.dtype)
    if kernel == "single":
        return _single(q, k, v, first.mask, scale)
    if kernel == "biased":
        table = first.mask.by_distance()
        sums = first.mask.key_sums
        return biased_attention(q, k, v, table, sums, first.mask.network(), scale)[0]
    # The CPU's fused kernel requires values as wide as keys; its fallback materializes all T × S scores.
    whole = q.shape[-1] != v.shape[-1] and q.device.type == "cpu" and not torch.is_grad_enabled()
    if kernel == "sdpa" and not (whole and first.mask.queries > QUERY_BLOCK):
        if first.mask.queries == 1:  # the last query attends to every key
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return _blocks(q, k, v, first.mask, scale)


def choose(views: list[AttentionView], v: Tensor, sink: Tensor | None, device: str) -> str:
    """The kernel for these views and values on a device type."""
    first = views[0]
    mask = first.mask
    q = first.q
    # Triton matrix products are at least 16 wide and do not support float64. A single query is bound by
    # reading the keys, and needs no block mask.
    flex = device == "cuda" and q.shape[-1] >= FLEX_FEATURES and q.dtype != torch.float64
    flex = flex and mask.queries > 1
    if first.weights_fn is not None:
        return "flex" if flex and mask.has_flex_bias else "explicit"
    # `is_causal` aligns the mask top-left: correct only for T = S. A single, last query needs no mask.
    causal = mask.is_causal_only and mask.queries in (mask.keys, 1)
    single = first.k.dtype in PRECISE if device == "cpu" else not causal
    if single and mask.queries == 1 and len(views) == 1 and sink is None:
        return "single"
    if len(views) == 1 and sink is None and causal:
        # On a GPU, grouped queries in float32, or with keys wider than values, materialize all T × S scores.
        whole = q.shape[1] != v.shape[1] and (
            v.dtype == torch.float32 or q.shape[-1] != v.shape[-1]
        )
        return "flex" if whole and flex else "sdpa"
    if flex:
        return "flex"
    if sink is not None:
        return "explicit"
    if len(views) == 1:
        return "biased" if device == "cpu" and mask.has_biased_kernel else "blocks"
    same = device == "cpu" and all(view.k.shape[-1] == v.shape[-1] for view in views)
    by_distance = all(view.mask.is_by_distance for view in views)
    return "merged" if same and by_distance and not torch.is_grad_enabled() else "explicit"


def _single(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """One query per row: (B, H, 1, D)."""
    rows = q.shape[0]
    heads = q.shape[1]
    groups = k.shape[1]
    keys: slice | Tensor = slice(0, mask.keys)
    if not mask.is_causal_only:
        keys = mask.keys_of(0, 1)
        k = k[:, :, keys]
        v = v[:, :, keys]
    q = q.reshape(rows * groups, heads // groups, -1)  # (B·G, H / G, D)
    k = k.reshape(rows * groups, -1, k.shape[3])
    v = v.reshape(rows * groups, -1, v.shape[3])
    is_masked = not mask.is_causal_only
    bias = mask.last_query(keys, groups, mask_dtype(q)) if is_masked else q.new_zeros(())
    if q.dtype in PRECISE:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=int(is_masked), alpha=scale)
    else:  # in bfloat16 the bias would round distances above 256
        scores = torch.bmm(q, k.transpose(1, 2)).float() * scale + bias
    return torch.bmm(scores.softmax(-1).to(v.dtype), v).view(rows, heads, 1, -1)


def _flex(views: list[AttentionView], v: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    """Each view through FlexAttention, merged by log-sum-exp."""
    if len(views) == 1 and sink is None:
        return _flex_view(views[0], v, scale, None)
    outputs = []
    logs = []
    for view in views:
        out, aux = _flex_view(view, v, scale, AuxRequest(lse=True))
        outputs.append(out)
        logs.append(aux.lse.to(mask_dtype(v))[..., None])  # (B, H, T, 1)
    if sink is not None:
        logs.append(sink.to(logs[0].dtype)[None, :, None, None].expand_as(logs[0]))
    weights = torch.stack(logs).softmax(0)  # (views [+ 1], B, H, T, 1)
    # For a query without visible keys in a view, the lse is −inf and the output is undefined.
    parts = [torch.where(w > 0, w * out, 0.0) for w, out in zip(weights, outputs, strict=False)]
    return torch.stack(parts).sum(0).to(v.dtype)


def _flex_view(view: AttentionView, v: Tensor, scale: float, aux: AuxRequest | None) -> Any:
    """(B, H, T, D); with `aux`, a tuple with the requested auxiliary outputs."""
    q = view.q.to(v.dtype)
    k = view.k.to(v.dtype)
    mask = view.mask
    bias = view.mask.flex_bias()
    score_mod = (
        None
        if bias is None
        else (lambda score, b, h, i, j: score + bias(b, h, i, j).to(score.dtype))
    )
    run = _fused(flex_attention, mask, True, aux is not None)
    gqa = q.shape[1] != k.shape[1]
    block_mask = mask.block_mask(_fused(create_block_mask, mask))
    more: dict[str, Any] = {} if aux is None else {"return_aux": aux}
    if mask.kernel_options:
        more["kernel_options"] = mask.kernel_options
    return run(
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=gqa, **more
    )


def precompute_masks(mask: AttentionMask, device: str) -> None:
    """Create the mask tensors that layers share on a device type before the first layer runs. Layers that are
    recomputed or compiled separately must not create them."""
    biased = device == "cpu" and mask.has_biased_kernel
    if mask.is_by_distance or biased:
        mask.by_distance()
    if biased:
        mask.network()
    if device == "cuda":
        mask.flex_bias()
        mask.block_mask(_fused(create_block_mask, mask))


def _by_block(
    function: Callable[..., Tensor], queries: int, size: int, recompute: bool, *args
) -> Tensor:
    """The outputs of function(*args, start, stop) for blocks of `size` queries, concatenated.

    Args:
        recompute: recompute blocks in the backward pass to keep memory linear in T; a single block is kept.
    """
    recompute = recompute and queries > size and torch.is_grad_enabled()
    outputs = []
    # The block with the most keys first, so the allocator can reuse its memory.
    for start in range((queries - 1) // size * size, -1, -size):
        block = (*args, start, min(start + size, queries))
        if recompute:
            outputs.append(
                checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            outputs.append(function(*block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1], dim=2)


def query_block(rows: int, keys: int) -> int:
    """Number of queries per block with materialized scores (rows = B·H, t, S = keys)."""
    return min(QUERY_BLOCK, max(8, SCORES_AT_ONCE // (rows * keys)))


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Blocks of queries through the fused kernel, each with only its visible keys."""
    if mask.is_by_distance:
        learned = mask.by_distance().requires_grad
        return _by_block(
            _distance_block, mask.queries, mask.distance_block, learned, q, k, v, mask, scale
        )
    size = query_block(mask.batch * mask.heads, mask.keys)
    return _by_block(_masked_block, mask.queries, size, True, q, k, v, mask, scale)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads = q.shape[1]
    groups = k.shape[1]
    single = q.shape[2] == 1
    # the queries of a group become the queries of one key/value head
    if single and heads != groups:
        q = q.unflatten(1, (groups, -1)).squeeze(3)
        mask = mask.unflatten(1, (groups, -1)).squeeze(3) if mask.shape[1] == heads else mask
    dtype = v.dtype
    if q.device.type == "cuda":
        # The fused kernel with a mask requires equal numbers of heads, and a contiguous mask of q's dtype. In
        # bfloat16 the mask would round distances above 256.
        q, k, v = (repeated(x, q.shape[1]).to(mask.dtype) for x in (q, k, v))
        mask = mask.contiguous()
    # Autocast would round the mask and copy the strided view. q, k and v already have the dtype of v.
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        ).to(dtype)
    return out.flatten(1, 2).unsqueeze(2) if single else out


def _masked_block(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, start: int, stop: int
) -> Tensor:
    keys = mask.keys_of(start, stop)
    q = q[:, :, start:stop]
    k = k[:, :, keys]
    v = v[:, :, keys]
    bias = mask.additive(start, stop, keys, mask_dtype(q))
    return _masked_attention(q, k, v, bias.expand(-1, -1, q.shape[2], k.shape[2]), scale)


def _distance_block(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, start: int, stop: int
) -> Tensor:
    """One block of queries with a mask by distance."""
    q, keys, strided = _distance_mask(q, mask, start, stop)
    return _masked_attention(q, k[:, :, keys], v[:, :, keys], strided, scale).flip(2)


def _distance_mask(
    q: Tensor, mask: AttentionMask, start: int, stop: int
) -> tuple[Tensor, slice, Tensor]:
    """Reversed queries, keys and mask of one block. The mask is a strided view: with reversed queries, the
    entry of pair (i', j) is at offset + i' + j, so strides of (1, 1) describe it without a copy."""
    band = mask.exact_band
    low, high = band.keys(start, stop)
    values = mask.by_distance().to(mask_dtype(q))
    farthest = stop - 1 + band.offset - low  # distance of the last query to the first key
    origin = mask.keys - 1 - farthest
    shape = (1, values.shape[0], stop - start, high - low)
    strided = values.as_strided(shape, (0, values.stride(0), 1, 1), origin)
    return q[:, :, start:stop].flip(2), slice(low, high), strided


def _merged(views: list[AttentionView], v: Tensor, scale: float) -> Tensor:
    """Blocks of queries through the CPU's fused kernel, view by view, merged by log-sum-exp."""
    size = max(view.mask.distance_block for view in views)
    return _by_block(_merged_block, views[0].mask.queries, size, False, views, v, scale)


def _merged_block(
    views: list[AttentionView], v: Tensor, scale: float, start: int, stop: int
) -> Tensor:
    """(B, H, stop − start, D): each view attends to its keys only; a view without keys has weight 0."""
    outputs = []
    logs = []
    for view in views:
        band = view.mask.exact_band
        low, high = band.keys(start, stop)
        if low >= high:
            continue
        q, keys, mask = _distance_mask(view.q.to(v.dtype), view.mask, start, stop)
        out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            view.k[:, :, keys].to(v.dtype),
            v[:, :, keys],
            attn_mask=mask.expand(*q.shape[:3], -1),
            scale=scale,
        )
        # of rows without a key, the result is undefined
        some = band.attending(start, stop, q.device).flip(0)
        outputs.append(torch.where(some[:, None], out, 0.0))
        logs.append(log.masked_fill(~some, -math.inf))
    if len(outputs) == 1:
        return outputs[0].flip(2)
    weights = torch.stack(logs).softmax(0)[..., None].to(v.dtype)  # (views, B, H, t, 1)
    return sum(w * out for w, out in zip(weights, outputs, strict=True)).flip(2)


def _explicit(views: list[AttentionView], v: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    mask = views[0].mask
    size = query_block(mask.batch * mask.heads, mask.keys)
    return _by_block(_explicit_block, mask.queries, size, True, views, v, scale, sink)


def _explicit_block(
    views: list[AttentionView], v: Tensor, scale: float, sink: Tensor | None, start: int, stop: int
) -> Tensor:
    """(B, H, stop − start, D): outputs of these queries, with materialized scores in float32 or float64."""
    return attention_details(views, v, scale, sink, start, stop).output.to(v.dtype)


@dataclass(frozen=True)
class AttentionDetails:
    """Logits, weights and outputs of a range of queries, in float32 or float64.

    Attributes:
        keys: index of the keys visible to any of the queries.
        logits: (B, H, t, s) softmax input, −inf if masked; q·k·scale if the weights are not a softmax. None
            unless requested.
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
    sink: Tensor | None,
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
    with torch.autocast(v.device.type, enabled=False):
        values = repeated(v[:, :, keys].to(mask_dtype(v)), mask.heads)
        if first.weights_fn is not None:
            block = QueryBlock(first, start, stop, keys, scale, sink, keep_logits=logits)
            weights = first.weights_fn(block)
            out = weights @ values
            out = out if first.extra_output is None else out + first.extra_output(block, weights)
            kept = block.logits
            if logits and kept is None:
                kept = block.scores.masked_fill(~block.visible, -math.inf)
            return AttentionDetails(keys, kept, weights, out)
        total: Tensor | None = None
        for view in views:
            block = QueryBlock(view, start, stop, keys, scale)
            scores = block.scores + view.mask.additive(start, stop, keys, block.scores.dtype)
            # Views are disjoint: where one allows a pair, all others have −inf.
            total = scores if total is None else torch.maximum(total, scores)
        assert total is not None
        weights = softmax(total, sink)
        return AttentionDetails(keys, total if logits else None, weights, weights @ values)
