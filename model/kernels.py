"""softmax(q·k·scale + bias) v over a set of pairs. The only file that knows attention kernels.

Three lowerings of one meaning, chosen by `attend`:

- ``sdpa``: PyTorch's fused causal kernel, when nothing but plain causality is asked for;
- ``flex``: FlexAttention, on GPUs, for every other rule and bias, with heads of 16 features or more;
- ``blocks``: blocks of queries, each through the fused kernel with an additive mask; memory is linear in
  the number of keys. Where the mask depends on distance alone it is a strided view of one vector of
  H·(S + block) numbers, so that a window or a distance bias costs what plain causal attention costs.

`dense` is their slow twin: every score at once, in the dtype given. Tests compare all of them with it.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with G dividing H; T queries are compared with S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

# Arguments are INDICES (batch row, head, query, key), as in FlexAttention; what they index is captured.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # may this pair be compared?
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # what is added to its logit
Distance = Callable[[Tensor, Tensor], Tensor]  # (head, distance) -> what is added to the logit

QUERY_BLOCK = 256
FLEX_FEATURES = 16  # the narrowest heads FlexAttention takes on a GPU
KERNELS = ("auto", "sdpa", "flex", "blocks", "dense")


@cache
def _compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """Compiled on first use: torch.compile loads Inductor, seconds that a run on the CPU need not pay."""
    return torch.compile(function, dynamic=dynamic)


def _fused(function: Callable, device: torch.device, dynamic: bool | None = None) -> Callable:
    """Compiled by itself on a GPU; as it is on the CPU, and inside a model that is compiled as a whole."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function
    return _compiled(function, dynamic)


@dataclass(frozen=True)
class Band:
    """Visibility known on the host: query i sees keys j with i + offset − window < j ≤ i + offset."""

    offset: int
    window: int | None = None

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """The range of keys that any query in [start, stop) may see."""
        low = 0 if self.window is None else max(0, start + self.offset - self.window + 1)
        return low, stop + self.offset


@dataclass(frozen=True)
class Pairs:
    """Which queries meet which keys in one pass, and what is added to their logits.

    `rule` and `bias` are elementwise over indices. For speed, `band` repeats the rule for the host where the
    layout is plain, and `distance` repeats the bias where it depends on unit-step distance alone.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device
    rule: Rule
    bias: Bias | None = None
    band: Band | None = None
    distance: Distance | None = None
    # Lowered forms, made once per pass; functools.cached_property takes a lock, which torch.compile refuses.
    _lowered: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_causal_only(self) -> bool:
        """Nothing but causality is asked for, so the fused causal kernel applies."""
        if self.band is None or self.bias is not None:
            return False
        return self.band.window is None or self.band.window >= self.keys

    def by_distance(self) -> Tensor:
        """(H or 1, N) additive mask by falling distance: entry m is for d = S − 1 − m, −inf where hidden.

        The trailing QUERY_BLOCK − 1 entries stand for keys in the future of a block's earlier queries.
        """
        if "by_distance" not in self._lowered:
            self._lowered["by_distance"] = self._by_distance()
        return self._lowered["by_distance"]

    def _by_distance(self) -> Tensor:
        assert self.band is not None
        d = self.keys - 1 - torch.arange(self.keys + QUERY_BLOCK - 1, device=self.device)
        hidden = d < 0 if self.band.window is None else (d < 0) | (d >= self.band.window)
        if self.distance is None:
            values = torch.zeros(1, len(d), device=self.device)
        else:
            heads = torch.arange(self.heads, device=self.device)
            values = self.distance(heads[:, None], d.clamp(min=0)[None, :])
        return values.masked_fill(hidden, -math.inf)

    def block_mask(self) -> BlockMask:
        """FlexAttention's form of the rule."""
        if "block_mask" not in self._lowered:
            self._lowered["block_mask"] = self._block_mask()
        return self._lowered["block_mask"]

    def _block_mask(self) -> BlockMask:
        make = _fused(create_block_mask, self.device)
        # The mask has one row per sequence only where visibility differs between sequences.
        rows = None if self.band is not None else self.batch
        return make(self.rule, rows, None, self.queries, self.keys, device=self.device)

    def mask(self, start: int, stop: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """(B or 1, H or 1, stop − start, high − low) additive mask of one block, evaluated elementwise."""
        b = torch.arange(self.batch if self.band is None else 1, device=self.device)[:, None, None, None]
        h = torch.arange(self.heads, device=self.device)[None, :, None, None]
        i = torch.arange(start, stop, device=self.device)[None, None, :, None]
        j = torch.arange(low, high, device=self.device)[None, None, None, :]
        seen = self.rule(b, h[:, :1], i, j)
        if self.bias is None:
            return torch.zeros((), dtype=dtype, device=self.device).masked_fill(~seen, -math.inf)
        all_rows = torch.arange(self.batch, device=self.device)[:, None, None, None]
        return self.bias(all_rows, h, i, j).to(dtype).masked_fill(~seen, -math.inf)


@dataclass(frozen=True)
class View:
    """Queries and keys in the form in which a scheme wants these pairs compared."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    pairs: Pairs


def attend(views: list[View], v: Tensor, scale: float, kernel: str = "auto") -> Tensor:
    """Softmax attention over one or several views of disjoint pairs.

    Args:
        views: each pair of query and key must be allowed by at most one view.
        v: (B, G, S, D) values.
        scale: factor on q·k, before any bias.
        kernel: one of KERNELS; ``auto`` chooses by device and by what the pairs ask for.

    Returns:
        (B, H, T, D) in the dtype of `v`.
    """
    first = views[0]
    if kernel == "auto":
        kernel = _choose(views)
    if kernel == "dense":
        return _dense(views, v, scale)
    if len(views) > 1:
        return _blocks_of_views(views, v, scale)
    q, k = first.q.to(v.dtype), first.k.to(v.dtype)
    if kernel == "sdpa":
        if first.pairs.queries == 1:  # the last query sees every key
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    if kernel == "flex":
        return _flex(q, k, v, first.pairs, scale)
    return _blocks(q, k, v, first.pairs, scale)


def _choose(views: list[View]) -> str:
    pairs = views[0].pairs
    if len(views) > 1:
        return "blocks"
    # `is_causal` aligns top-left: right only when every key is also a query, or for a single, last query.
    if pairs.is_causal_only and pairs.queries in (pairs.keys, 1):
        return "sdpa"
    q = views[0].q
    fits = q.shape[-1] >= FLEX_FEATURES and q.dtype != torch.float64  # Triton's products stop at float32
    return "flex" if pairs.device.type == "cuda" and fits else "blocks"


def _flex(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> Tensor:
    bias = pairs.bias
    score_mod = None if bias is None else (lambda score, b, h, i, j: score + bias(b, h, i, j).to(score.dtype))
    run = _fused(flex_attention, q.device, dynamic=True)
    gqa = q.shape[1] != k.shape[1]
    return run(q, k, v, score_mod=score_mod, block_mask=pairs.block_mask(), scale=scale, enable_gqa=gqa)


def _blocks(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> Tensor:
    """Blocks of queries through the fused kernel, each with only the keys it may see."""
    by_distance = pairs.band is not None and (pairs.bias is None or pairs.distance is not None)
    outputs = []
    for start in range(0, pairs.queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, pairs.queries)
        low, high = (0, pairs.keys) if pairs.band is None else pairs.band.keys(start, stop)
        block = q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]
        if by_distance:
            outputs.append(_distance_block(*block, pairs, start, low, scale))
        elif torch.is_grad_enabled():
            # Recomputing the mask in the backward pass keeps memory linear in T.
            args = (*block, pairs, start, low, scale)
            outputs.append(checkpoint(_masked_block, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_masked_block(*block, pairs, start, low, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    # Autocast would round the mask as well, and copy the strided view; q, k and v are of v's dtype already.
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _mask_dtype(q: Tensor) -> torch.dtype:
    """Biases stay float32 beside half-precision queries: in bfloat16 distances collapse past 256."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _masked_block(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, start: int, low: int, scale: float
) -> Tensor:
    mask = pairs.mask(start, start + q.shape[2], low, low + k.shape[2], _mask_dtype(q))
    mask = mask.expand(-1, -1, q.shape[2], k.shape[2])
    return _masked_attention(q, k, v, mask, scale)


def _distance_block(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, start: int, low: int, scale: float
) -> Tensor:
    """One block whose mask is a strided view: with the queries in reverse order, the entry of pair (i', j)
    lies at a fixed start + i' + j, and strides of +1 and +1 describe it without copying."""
    assert pairs.band is not None
    values = pairs.by_distance().to(_mask_dtype(q))
    n, keys = q.shape[2], k.shape[2]
    farthest = start + n - 1 + pairs.band.offset - low  # distance of the last query to the first key
    origin = pairs.keys - 1 - farthest
    mask = values.as_strided((1, values.shape[0], n, keys), (0, values.stride(0), 1, 1), origin)
    return _masked_attention(q.flip(2), k, v, mask, scale).flip(2)


def _scores(views: list[View], start: int, stop: int, low: int, high: int, scale: float) -> Tensor:
    """(B, H, stop − start, high − low) biased scores, −inf where no view allows the pair."""
    total = None
    for view in views:
        repeat = view.q.shape[1] // view.k.shape[1]
        k = view.k[:, :, low:high].repeat_interleave(repeat, dim=1)
        scores = view.q[:, :, start:stop] @ k.transpose(-1, -2) * scale
        scores = scores + view.pairs.mask(start, stop, low, high, scores.dtype)
        # Views are disjoint: where one allows a pair, the others hold −inf.
        total = scores if total is None else torch.maximum(total, scores)
    assert total is not None
    return total


def _weighted(scores: Tensor, v: Tensor) -> Tensor:
    repeat = scores.shape[1] // v.shape[1]
    return scores.softmax(-1) @ v.repeat_interleave(repeat, dim=1).to(scores.dtype)


def _blocks_of_views(views: list[View], v: Tensor, scale: float) -> Tensor:
    def block(start: int, stop: int) -> Tensor:
        return _weighted(_scores(views, start, stop, 0, views[0].pairs.keys, scale), v).to(v.dtype)

    outputs = []
    for start in range(0, views[0].pairs.queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, views[0].pairs.queries)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(block, start, stop, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(block(start, stop))
    return torch.cat(outputs, dim=2)


def _dense(views: list[View], v: Tensor, scale: float) -> Tensor:
    pairs = views[0].pairs
    return _weighted(_scores(views, 0, pairs.queries, 0, pairs.keys, scale), v).to(v.dtype)
