"""softmax(q·k·scale + bias) v over a set of pairs. The only file that knows attention kernels.

Lowerings of one meaning, chosen by `attend`:

- ``sdpa``: PyTorch's fused causal kernel, when nothing but plain causality is asked for;
- ``flex``: FlexAttention, on GPUs, for every other rule and bias, with heads of 16 features or more; several
  views are merged by their log-sum-exp;
- ``blocks``: blocks of queries, each through the fused kernel with an additive mask; memory is linear in
  the number of keys. Where the mask depends on distance alone it is a strided view of one vector of
  H·(S + block) numbers, so that a window or a distance bias costs what plain causal attention costs;
- ``explicit``: blocks of queries with their scores spelled out, for several views on a CPU, for sink logits
  and for weights that are no softmax of q·k + bias (`View.weigh`).

`dense` is their slow twin: every score at once, in the dtype given. Tests compare all of them with it.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with G dividing H; T queries are compared with S keys.
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

from model.pairs import QUERY_BLOCK, Block, Pairs, View, mask_dtype, repeated, softmax

FLEX_FEATURES = 16  # the narrowest heads FlexAttention takes on a GPU
SCORES_AT_ONCE = 1 << 25  # B·H·t·S of one block where scores or masks are spelled out
KERNELS = ("auto", "sdpa", "flex", "blocks", "explicit", "dense")
# Told of an attention: (views, values, scale, sink logit) as `attend` was given them, and what came of it.
Watch = Callable[[list[View], Tensor, float, Tensor | None, Tensor], None]


@cache
def _compiled(function, dynamic: bool | None = None):
    """Compiled on first use: torch.compile loads Inductor, seconds that a run on the CPU need not pay."""
    return torch.compile(function, dynamic=dynamic)


def _fused(function, device: torch.device, dynamic: bool | None = None):
    """Compiled by itself on a GPU; as it is on the CPU, and inside a model that is compiled as a whole."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function
    return _compiled(function, dynamic)


def attend(
    views: list[View], v: Tensor, scale: float, kernel: str = "auto", sink: Tensor | None = None
) -> Tensor:
    """Softmax attention over one or several views of disjoint pairs.

    Args:
        views: each pair of query and key must be allowed by at most one view.
        v: (B, G, S, D) values.
        scale: factor on q·k, before any bias.
        kernel: one of KERNELS; ``auto`` chooses by device and by what the pairs ask for.
        sink: (H,) logit of one more column per head that has no value, as in gpt-oss: it takes weight away.

    Returns:
        (B, H, T, D) in the dtype of `v`.
    """
    first = views[0]
    if kernel == "auto":
        kernel = choose(views, sink, first.pairs.device.type)
    if kernel == "dense":
        return _explicit_block(views, v, scale, sink, 0, first.pairs.queries, whole=True)
    if kernel == "explicit" or first.weigh is not None:
        return _explicit(views, v, scale, sink)
    if kernel == "flex":
        return _flex(views, v, scale, sink)
    if len(views) > 1 or sink is not None:
        return _explicit(views, v, scale, sink)
    q, k = first.q.to(v.dtype), first.k.to(v.dtype)
    # The CPU's fused kernel wants values as wide as keys; what stands in for it makes all T × S scores.
    whole = q.shape[-1] != v.shape[-1] and q.device.type == "cpu" and not torch.is_grad_enabled()
    if kernel == "sdpa" and not (whole and first.pairs.queries > QUERY_BLOCK):
        if first.pairs.queries == 1:  # the last query sees every key
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return _blocks(q, k, v, first.pairs, scale)


def choose(views: list[View], sink: Tensor | None, device: str) -> str:
    """The lowering of these views on a kind of device."""
    first = views[0]
    pairs, q = first.pairs, first.q
    if any(view.weigh is not None for view in views):
        return "explicit"
    # `is_causal` aligns top-left: right only when every key is also a query, or for a single, last query.
    causal = pairs.is_causal_only and pairs.queries in (pairs.keys, 1)
    if len(views) == 1 and sink is None and causal:
        return "sdpa"
    # Triton's products are at least 16 wide and stop at float32.
    if device == "cuda" and q.shape[-1] >= FLEX_FEATURES and q.dtype != torch.float64:
        return "flex"
    return "blocks" if len(views) == 1 and sink is None else "explicit"


def _flex(views: list[View], v: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    """Each view through FlexAttention, merged by log-sum-exp."""
    if len(views) == 1 and sink is None:
        return _flex_view(views[0], v, scale, None)
    outputs, logs = [], []
    for view in views:
        out, aux = _flex_view(view, v, scale, AuxRequest(lse=True))
        outputs.append(out)
        logs.append(aux.lse.to(mask_dtype(v))[..., None])  # (B, H, T, 1)
    if sink is not None:
        logs.append(sink.to(logs[0].dtype)[None, :, None, None].expand_as(logs[0]))
    weights = torch.stack(logs).softmax(0)  # (views [+ 1], B, H, T, 1)
    # A view without a pair for some query has an lse of −inf there, and an output that means nothing.
    parts = [torch.where(w > 0, w * out, 0.0) for w, out in zip(weights, outputs, strict=False)]
    return torch.stack(parts).sum(0).to(v.dtype)


def _flex_view(view: View, v: Tensor, scale: float, aux: AuxRequest | None) -> Any:
    """(B, H, T, D); with `aux` the pair of that and what was asked for."""
    q, k, pairs, bias = view.q.to(v.dtype), view.k.to(v.dtype), view.pairs, view.pairs.bias
    score_mod = None if bias is None else (lambda score, b, h, i, j: score + bias(b, h, i, j).to(score.dtype))
    run, gqa = _fused(flex_attention, q.device, dynamic=True), q.shape[1] != k.shape[1]
    mask = pairs.block_mask(_fused(create_block_mask, pairs.device))
    more: dict[str, Any] = {} if aux is None else {"return_aux": aux}
    return run(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=gqa, **more)


def lower_ahead(pairs: Pairs) -> None:
    """Make what layers share of these pairs now, where no single layer may: one that is computed twice, or
    compiled by itself, would find it there the second time."""
    if pairs.is_by_distance:
        pairs.by_distance()
    if pairs.device.type == "cuda" and not pairs.is_causal_only:
        pairs.block_mask(_fused(create_block_mask, pairs.device))


def _recomputed(function, several: bool, *args) -> Tensor:
    """Recomputing blocks in the backward pass keeps memory linear in T; a single one has nothing to gain."""
    if several and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


def query_block(rows: int, keys: int) -> int:
    """Queries of a block whose scores (rows = B·H, t, S = keys) are spelled out."""
    return min(QUERY_BLOCK, max(8, SCORES_AT_ONCE // (rows * keys)))


def _blocks(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> Tensor:
    """Blocks of queries through the fused kernel, each with only the keys it may see."""
    by_distance = pairs.is_by_distance
    learned = by_distance and pairs.by_distance().requires_grad
    size = QUERY_BLOCK if by_distance else query_block(pairs.batch * pairs.heads, pairs.keys)
    several = pairs.queries > size
    outputs = []
    for start in _last_first(pairs.queries, size):
        stop = min(start + size, pairs.queries)
        queries = q[:, :, start:stop]
        if by_distance:
            assert pairs.band is not None
            low, high = pairs.band.keys(start, stop)
            args = (queries, k[:, :, low:high], v[:, :, low:high], pairs, start, low, scale)
            outputs.append(_recomputed(_distance_block, several and learned, *args))
        else:
            keys = pairs.keys_of(start, stop)
            args = (queries, *_taken(k, v, keys), pairs, start, keys, scale)
            outputs.append(_recomputed(_masked_block, several, *args))
    return _in_order(outputs)


def _last_first(queries: int, size: int) -> range:
    """Starts of the blocks, that of the most keys first: what it leaves free is large enough for all others,
    where memory that grows block by block would be taken anew each time."""
    return range((queries - 1) // size * size, -1, -size)


def _in_order(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1], dim=2)


def _taken(k: Tensor, v: Tensor, keys: slice | Tensor) -> tuple[Tensor, Tensor]:
    return k[:, :, keys], v[:, :, keys]


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    # Autocast would round the mask as well, and copy the strided view; q, k and v are of v's dtype already.
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _masked_block(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, start: int, keys: slice | Tensor, scale: float
) -> Tensor:
    mask = pairs.mask(start, start + q.shape[2], keys, mask_dtype(q))
    return _masked_attention(q, k, v, mask.expand(-1, -1, q.shape[2], k.shape[2]), scale)


def _distance_block(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, start: int, low: int, scale: float
) -> Tensor:
    """One block whose mask is a strided view: with the queries in reverse order, the entry of pair (i', j)
    lies at a fixed start + i' + j, and strides of +1 and +1 describe it without copying."""
    assert pairs.band is not None
    values = pairs.by_distance().to(mask_dtype(q))
    n, keys = q.shape[2], k.shape[2]
    farthest = start + n - 1 + pairs.band.offset - low  # distance of the last query to the first key
    origin = pairs.keys - 1 - farthest
    mask = values.as_strided((1, values.shape[0], n, keys), (0, values.stride(0), 1, 1), origin)
    return _masked_attention(q.flip(2), k, v, mask, scale).flip(2)


def _explicit(views: list[View], v: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    pairs = views[0].pairs
    size = query_block(pairs.batch * pairs.heads, pairs.keys)
    outputs = [
        _recomputed(
            _explicit_block, pairs.queries > size, views, v, scale, sink, i, min(i + size, pairs.queries)
        )
        for i in _last_first(pairs.queries, size)
    ]
    return _in_order(outputs)


def _explicit_block(
    views: list[View],
    v: Tensor,
    scale: float,
    sink: Tensor | None,
    start: int,
    stop: int,
    whole: bool = False,
) -> Tensor:
    """(B, H, stop − start, D): outputs of these queries, every score spelled out in float32 or float64."""
    return spell_out(views, v, scale, sink, start, stop, whole).output.to(v.dtype)


@dataclass(frozen=True)
class Spelled:
    """Some queries of a pass with every pair spelled out, in float32 or float64.

    Attributes:
        keys: index of the keys that any of the queries may see, among all keys of the pass.
        logits: (B, H, t, s) what the softmax was taken of, −inf where hidden; of weights that are no softmax
            q·k·scale. None unless asked for.
        weights: (B, H, t, s); a row sums to 1, or to less where a sink, or nothing, takes the rest.
        output: (B, H, t, D).
    """

    keys: slice | Tensor
    logits: Tensor | None
    weights: Tensor
    output: Tensor


def spell_out(
    views: list[View],
    v: Tensor,
    scale: float,
    sink: Tensor | None,
    start: int,
    stop: int,
    whole: bool = False,
    logits: bool = False,
) -> Spelled:
    """What the explicit kernel makes of the queries start, ..., stop − 1, with its weights, whichever kernel
    the model uses. Arguments are those of `attend`.

    Args:
        whole: with every key of the pass, not only those that these queries may see.
        logits: keep the logits too.
    """
    pairs, first = views[0].pairs, views[0]
    keys = slice(0, pairs.keys) if whole else pairs.keys_of(start, stop)
    with torch.autocast(v.device.type, enabled=False):
        values = repeated(v[:, :, keys].to(mask_dtype(v)), pairs.heads)
        if first.weigh is not None:
            block = Block(first, start, stop, keys, scale, sink, keep_logits=logits)
            weights = first.weigh(block)
            out = weights @ values
            out = out if first.extra is None else out + first.extra(block, weights)
            kept = block.logits
            if logits and kept is None:
                kept = block.scores.masked_fill(~block.seen, -math.inf)
            return Spelled(keys, kept, weights, out)
        total: Tensor | None = None
        for view in views:
            block = Block(view, start, stop, keys, scale)
            scores = block.scores + view.pairs.mask(start, stop, keys, block.scores.dtype)
            # Views are disjoint: where one allows a pair, the others hold −inf.
            total = scores if total is None else torch.maximum(total, scores)
        assert total is not None
        weights = softmax(total, sink)
        return Spelled(keys, total if logits else None, weights, weights @ values)
