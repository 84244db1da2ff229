"""Causal attention on a CPU with biases that require gradients: memory is linear in the number of
keys.

The bias of a pair is a function of its distance, the difference c_i − c_j of numbers c of the keys,
a small network (`NetworkBias`), or a sum of these. The forward pass is PyTorch's fused kernel by
blocks of queries. The fused kernel has no gradient of its mask, so the backward pass recomputes the
weights of one tile of queries and keys at a time from the log-sum-exp, as in FlashAttention-2 (Dao
2023, arXiv:2307.08691), and reduces the gradient of the bias at once.

torch.compile treats both passes as single operations, so the loops are not unrolled into its
graphs.

Shapes: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E); the last T keys are those of the queries.
`table` (H or 1, N) is `AttentionMask.by_distance()`: entry m is for distance S − 1 − m, −inf if
masked. `sums` (B, H, S) are c in float64, or None. `network` are the tensors of a `NetworkBias`, or
none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import QUERY_BLOCK, AttentionMask, mask_dtype
from model.fast.network_bias import NetworkBias, NetworkTile

# Of this module: registering an operator again, in an exported copy of this file, would undo the
# first one.
NAMESPACE = re.sub(r"\W", "_", __name__)
TILE = 128, 256  # queries and keys of a tile, whose weights of 8 heads fit into a cache of 1 MiB


def biased_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """(B, H, T, E) in the dtype of v."""
    table = mask.by_distance()
    return biased_attention(
        q,
        k,
        v,
        table,
        mask.forms.key_sums,
        mask.network(),
        scale,
    )[0]


@torch.library.custom_op(f"{NAMESPACE}::biased_attention", mutates_args=())
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    sums: Tensor | None,
    network: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, E) in the dtype of v and the log-sum-exp (B, H, T) of each query's
    logits."""
    width = max(q.shape[3], v.shape[3])
    features = v.shape[3]
    bias = _Bias.of(q, k, table, sums, network)
    # The fused kernel requires values as wide as keys.
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    out = q.new_empty(q.shape)
    logs = q.new_empty(q.shape[:3], dtype=bias.table.dtype)
    for start in range(0, q.shape[2], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[2])
        outputs = []
        terms = []
        parts = bias.parts_of(start, stop)
        for low, high in parts:
            of_queries, of_keys = bias.terms(
                start,
                stop,
                low,
                high,
            )
            block, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, start:stop].flip(2),
                k[:, :, low:high],
                v[:, :, low:high],
                attn_mask=of_keys.expand(len(q), -1, stop - start, -1),
                scale=scale,
            )
            if of_queries is not None:
                log = log + of_queries[..., 0]
            # without a visible key in this part, output and log-sum-exp are undefined
            elif len(parts) > 1:
                log = log.masked_fill(of_keys.amax(-1) == -torch.inf, -torch.inf)
            outputs.append(block)
            terms.append(log)
        block, log = _merge_parts(outputs, terms)
        out[:, :, start:stop], logs[:, :, start:stop] = block.flip(2), log.flip(2)
    return out[..., :features].contiguous(), logs


@biased_attention.register_fake
def _(q, k, v, table, sums, network, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=mask_dtype(q))


@dataclass(frozen=True)
class _Bias:
    """The bias of tiles: queries stop − 1, ..., start in reverse order, keys low, ..., high − 1.

    Attributes:
        table: in float32 or float64.
        parts: integer and fractional parts of the sums, whose differences are exact to 1e-7 in
            float32.
        nearest, farthest: the smallest and the largest visible distance.
        is_mask: the table is 0 at all visible distances.
    """

    heads: int
    queries: int
    keys: int
    table: Tensor
    sums: Tensor | None
    parts: tuple[Tensor, ...]
    nearest: int
    farthest: int
    is_mask: bool
    network: NetworkBias | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, table: Tensor, sums: Tensor | None, network: list[Tensor]
    ) -> _Bias:
        keys = k.shape[2]
        dtype = mask_dtype(q)
        table = table.to(dtype).contiguous()
        parts = ()
        if sums is not None:
            sums = sums.contiguous()
            whole = sums.floor()
            parts = whole.to(dtype), (sums - whole).to(dtype)
        visible = table > -torch.inf
        entries = visible.any(0).nonzero()
        is_mask = not bool(table[visible].any())
        nearest = keys - 1 - int(entries[-1])
        farthest = keys - 1 - int(entries[0])
        pairs = NetworkBias(*(x.to(dtype).contiguous() for x in network)) if network else None
        return cls(
            q.shape[1], q.shape[2], keys, table, sums, parts, nearest, farthest, is_mask, pairs
        )

    def keys_of(self, start: int, stop: int) -> tuple[int, int]:
        """The range of keys visible to any query in [start, stop)."""
        offset = self.keys - self.queries
        return max(0, start + offset - self.farthest), max(1, stop + offset - self.nearest)

    def origin(self, stop: int, low: int) -> int:
        """The entry of the table for the last query and the first key of a tile. With reversed
        queries i', that of pair (i', j) is i' + j entries later."""
        return self.queries - stop + low

    def tile(
        self,
        start: int,
        stop: int,
        low: int,
        high: int,
    ) -> Tensor:
        """(B or 1, H, t, s); without sums a view of the table."""
        stride = self.table.stride(0) if len(self.table) > 1 else 0
        origin = self.table.storage_offset() + self.origin(stop, low)
        shape = (1, self.heads, stop - start, high - low)
        bias = self.table.as_strided(shape, (0, stride, 1, 1), origin)
        if self.network is not None:
            bias = self._add_network(bias, start, stop, low)
        if not self.parts:
            return bias
        first, second = (
            self._of_queries(x, start, stop) - x[:, :, None, low:high] for x in self.parts
        )
        return first.add_(second).add_(bias)

    def network_tile(
        self,
        start: int,
        stop: int,
        low: int,
        high: int,
    ) -> NetworkTile:
        assert self.network is not None
        return self.network.tile(
            self.origin(stop, low),
            start,
            stop,
            high - low,
        )

    def _add_network(
        self,
        bias: Tensor,
        start: int,
        stop: int,
        low: int,
    ) -> Tensor:
        """The sum of a bias (1, H, t, s) and the network's."""
        out = bias.new_empty(bias.shape)
        keys = bias.shape[3]
        width = max(1, TILE[0] * TILE[1] // bias.shape[2])
        for first in range(0, keys, width):
            last = min(first + width, keys)
            tile = self.network_tile(
                start,
                stop,
                low + first,
                low + last,
            )
            torch.add(
                tile.bias(),
                bias[0, :, :, first:last],
                out=out[0, :, :, first:last],
            )
        return out

    def terms(
        self,
        start: int,
        stop: int,
        low: int,
        high: int,
    ) -> tuple[Tensor | None, Tensor]:
        """Terms whose sum is the bias of a tile: of queries (B, H, t, 1) and keys (B, H, 1, s)
        where they are exact, else None and `tile`.

        They are if all keys precede all queries: with sums that decrease, both terms have the same
        sign.
        """
        first, last = self._between(start, stop)
        if not first <= low < high <= last:
            return None, self.tile(start, stop, low, high)
        assert self.sums is not None
        shared = self.sums[:, :, high - 1 : high, None]
        dtype = self.table.dtype
        of_queries = self._of_queries(self.sums, start, stop) - shared
        return of_queries.to(dtype), (shared - self.sums[:, :, None, low:high]).to(dtype)

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        """The keys before queries [start, stop) to which the table adds 0; an empty range without
        sums."""
        if self.sums is None or self.network is not None or not self.is_mask:
            return 0, 0
        offset = self.keys - self.queries
        return max(0, stop - 1 + offset - self.farthest), start + offset + min(0, 1 - self.nearest)

    def parts_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the visible keys, of which at most one has `terms` of queries."""
        low, high = self.keys_of(start, stop)
        first, last = self._between(start, stop)
        if first >= last:
            return [(low, high)]
        return [(a, b) for a, b in ((low, first), (first, last), (last, high)) if a < b]

    def tiles_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """`parts_of` in tiles."""
        parts = self.parts_of(start, stop)
        return [
            (a, min(a + TILE[1], high)) for low, high in parts for a in range(low, high, TILE[1])
        ]

    def row(self, b: int) -> _Bias:
        """The bias of one row."""
        if self.sums is None:
            return self
        return replace(
            self, sums=self.sums[b : b + 1], parts=tuple(x[b : b + 1] for x in self.parts)
        )

    def _of_queries(
        self,
        x: Tensor,
        start: int,
        stop: int,
    ) -> Tensor:
        """Entries of x (B, H, S) of the queries stop − 1, ..., start: (B, H, t, 1)."""
        offset = self.keys - self.queries
        return x[:, :, start + offset : stop + offset].flip(2)[..., None]


def _merge_parts(outputs: list[Tensor], logs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from that to disjoint parts of them and its log-sum-exp."""
    if len(outputs) == 1:
        return outputs[0], logs[0]
    total = torch.stack(logs).logsumexp(0)
    weights = [(log - total).exp().to(outputs[0].dtype)[..., None] for log in logs]
    parts = [torch.where(w > 0, w * out, 0.0) for w, out in zip(weights, outputs, strict=True)]
    return torch.stack(parts).sum(0), total


@torch.library.custom_op(f"{NAMESPACE}::biased_attention_backward", mutates_args=())
def biased_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    table: Tensor,
    sums: Tensor | None,
    network: list[Tensor],
    scale: float,
    with_table: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v, table, sums and network. That of the table is 0 without `with_table`;
    that of sums is empty without sums."""
    dtype = mask_dtype(q)
    bias = _Bias.of(q, k, table, sums, network)
    grad, scaled, keys, values = (x.to(dtype) for x in (grad, q, k, v))
    scaled = scaled * scale  # in float32: products in bfloat16 would differ from the forward pass
    rows = (grad * out.to(dtype)).sum(-1)  # (B, H, T): Σ_j weight · its gradient
    of_q, of_k, of_v = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    of_table = torch.zeros_like(bias.table)
    of_sums = bias.table.new_zeros((0,) if sums is None else sums.shape)
    of_network = [torch.zeros(x.shape, dtype=dtype) for x in network]
    for b in range(len(q)):
        results = _Results(
            of_k[b],
            of_v[b],
            of_table if with_table else None,
            None if sums is None else of_sums[b],
            NetworkBias(*of_network) if network else None,
        )
        of_q[b] = _backward_of_row(
            grad[b], scaled[b], keys[b], values[b], logs[b], rows[b], bias.row(b), results
        )
    of_q.mul_(scale)
    of_network = [grad.to(x.dtype) for grad, x in zip(of_network, network, strict=True)]
    of_k = of_k.to(k.dtype)
    of_v = of_v.to(v.dtype)
    of_table = of_table.to(table.dtype)
    return of_q.to(q.dtype), of_k, of_v, of_table, of_sums.double(), of_network


class _Results(NamedTuple):
    """Gradients to which those of one row are added; None: not needed."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    sums: Tensor | None
    network: NetworkBias | None


def _backward_of_row(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    rows: Tensor,
    bias: _Bias,
    results: _Results,
) -> Tensor:
    """The gradient of q, the queries of one row times the scale. Those of k, v, table and sums are
    added to `results`."""
    of_k, of_v, of_table, of_sums, of_network = results
    groups = len(k)
    of_q = torch.empty_like(q)
    by_table = replace(bias, network=None)
    # exp() of numbers below the smallest normal one is many times slower than of others.
    smallest = -80.0 if q.dtype == torch.float32 else -700.0
    buffers = q.new_empty(2, bias.heads * TILE[0] * TILE[1])
    diagonals = {}
    for start in range(0, bias.queries, TILE[0]):
        stop = min(start + TILE[0], bias.queries)
        count = stop - start
        # The queries of a key/value head are rows of one matrix.
        qs, grads = (x[:, start:stop].flip(1).reshape(groups, -1, x.shape[2]) for x in (q, grad))
        log, row = (x[:, start:stop].flip(1)[..., None] for x in (logs, rows))
        total = torch.zeros_like(qs)
        for first, last in bias.tiles_of(start, stop):
            shape = groups, qs.shape[1], last - first
            weights, slopes = (x[: bias.heads * count * shape[2]].view(shape) for x in buffers)
            torch.bmm(qs, k[:, first:last].transpose(1, 2), out=weights)
            torch.bmm(grads, v[:, first:last].transpose(1, 2), out=slopes)
            by_head, slope = (x.view(bias.heads, count, -1) for x in (weights, slopes))
            of_queries, of_keys = by_table.terms(
                start,
                stop,
                first,
                last,
            )
            if bias.network is not None:
                tile = bias.network_tile(
                    start,
                    stop,
                    first,
                    last,
                )
                by_head.add_(tile.bias())
            by_head.add_(of_keys[0]).sub_(log if of_queries is None else log - of_queries[0])
            by_head.clamp_(min=smallest).exp_()
            slope.sub_(row).mul_(by_head)  # gradients of the logits
            of_v[:, first:last].baddbmm_(weights.transpose(1, 2), grads)
            of_k[:, first:last].baddbmm_(slopes.transpose(1, 2), qs)
            total.baddbmm_(slopes, k[:, first:last])
            if of_sums is not None:
                of_sums[:, first:last] -= slope.sum(1)
            if of_network is not None:
                of_near = tile.add_gradients(
                    slope,
                    start,
                    stop,
                    of_network,
                )
                by_distance = _sum_diagonals(of_near[None], diagonals)[0]
                of_network.near[bias.origin(stop, first) :][: len(by_distance)] += by_distance
            if of_table is not None:
                by_distance = _sum_diagonals(slope, diagonals)  # (H, count + keys of the tile − 1)
                if len(of_table) == 1:
                    by_distance = by_distance.sum(0, keepdim=True)
                of_table[:, bias.origin(stop, first) :][:, : by_distance.shape[1]] += by_distance
        of_q[:, start:stop] = total.view(bias.heads, count, -1).flip(1)
    return of_q


def _sum_diagonals(x: Tensor, buffers: dict[torch.Size, Tensor]) -> Tensor:
    """x (H, t, s) → (H, t + s − 1), the sums of the entries with equal i + j.

    Args:
        buffers: reused between calls; their entries outside the diagonals are 0.
    """
    heads, rows, columns = x.shape
    width = rows + columns - 1
    if x.shape not in buffers:
        buffers[x.shape] = x.new_zeros(heads, rows, width)
    buffer = buffers[x.shape]
    # Row i of the view starts at column i of the buffer.
    buffer.as_strided(x.shape, (rows * width, width + 1, 1)).copy_(x)
    return buffer.sum(1)


@biased_attention_backward.register_fake
def _(
    grad,
    q,
    k,
    v,
    out,
    logs,
    table,
    sums,
    network,
    scale,
    with_table,
):
    of_sums = table.new_empty((0,) if sums is None else sums.shape, dtype=torch.float64)
    empty = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, table, *network)
    ]
    return (*empty[:4], of_sums, empty[4:])


def _save(ctx, inputs, output) -> None:
    q, k, v, table, sums, network, scale = inputs
    ctx.save_for_backward(
        q,
        k,
        v,
        *output,
        table,
        sums,
        *network,
    )
    ctx.scale = scale


def _backward(ctx, grad: Tensor, _: Tensor):
    q, k, v, out, logs, table, sums, *network = ctx.saved_tensors
    of_q, of_k, of_v, of_table, of_sums, of_network = biased_attention_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        logs,
        table,
        sums,
        network,
        ctx.scale,
        ctx.needs_input_grad[3],
    )
    return of_q, of_k, of_v, of_table, None if sums is None else of_sums, of_network, None


biased_attention.register_autograd(_backward, setup_context=_save)
