"""Causal attention on a CPU with biases that require gradients: memory is linear in the number of
keys.

The bias of a pair is a function of its distance, the difference c_i − c_j of numbers c of the keys,
or their sum. The forward pass is PyTorch's fused kernel by blocks of queries. The fused kernel has
no gradient of its mask, so the backward pass recomputes the weights of one tile of queries and keys
at a time from the log-sum-exp, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691), and reduces the
gradient of the bias at once. The plain form is `explicit_attend`.

torch.compile treats both passes as single operations, so the loops are not unrolled into its
graphs.

Shapes: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E); the last T keys are those of the queries.
`table` (H or 1, N) is `AttentionMask.by_distance()`: entry m is for distance S − 1 − m, −inf if
masked. `sums` (B, H, S) are c in float64, or None.
"""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import QUERY_BLOCK, AttentionMask, mask_dtype

# The name of this module: an exported copy of this file must not register its operators under the
# same names, as that would undo the first registration.
NAMESPACE = re.sub(r"\W", "_", __name__)
TILE = 128, 256  # queries and keys of a tile; the weights of 8 heads fit into a cache of 1 MiB


def biased_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """The output (B, H, T, E) in the dtype of v."""
    return biased_attention(q, k, v, mask.by_distance(), mask.forms.key_sums, scale)[0]


@torch.library.custom_op(f"{NAMESPACE}::biased_attention", mutates_args=())
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    sums: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, E) in the dtype of v and the log-sum-exp (B, H, T) of each query's
    logits."""
    bias = _Bias(q, k, table, sums)
    features = v.shape[3]
    # The fused kernel requires values as wide as keys.
    extra = features - q.shape[3]
    if extra > 0:
        q = F.pad(q, (0, extra))
        k = F.pad(k, (0, extra))
    elif extra < 0:
        v = F.pad(v, (0, -extra))
    out = q.new_empty(q.shape)
    logs = q.new_empty(q.shape[:3], dtype=bias.table.dtype)
    # The block with the most keys first, so the allocator can reuse its memory.
    for start in reversed(range(0, q.shape[2], QUERY_BLOCK)):
        stop = min(start + QUERY_BLOCK, q.shape[2])
        low, high = bias.keys_of(start, stop)
        block, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, start:stop].flip(2),
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=bias.tile(start, stop, low, high).expand(len(q), -1, -1, -1),
            scale=scale,
        )
        out[:, :, start:stop] = block.flip(2)
        logs[:, :, start:stop] = log.flip(2)
    return out[..., :features].contiguous(), logs


@biased_attention.register_fake
def _fake_biased_attention(q, k, v, table, sums, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=mask_dtype(q))


def distance_tile(table: Tensor, origin: int, queries: int, keys: int) -> Tensor:
    """(1, H or 1, queries, keys), a view of the table. Its entry `origin` is for the last query and
    the first key; with reversed queries i', the entry of pair (i', j) is `origin` + i' + j."""
    return table.as_strided(
        (1, len(table), queries, keys),
        (0, table.stride(0), 1, 1),
        origin,
    )


class _Bias:
    """The bias of tiles: queries stop − 1, ..., start in reverse order, keys low, ..., high − 1.

    Attributes:
        table: the bias by distance, in float32 or float64.
        whole, rest: integer and fractional parts of the sums, if there are sums: their differences
            are exact to 1e-7 in float32.
        offset: index of the first query's own key.
        farthest: the largest visible distance.
    """

    def __init__(self, q: Tensor, k: Tensor, table: Tensor, sums: Tensor | None):
        dtype = mask_dtype(q)
        self.heads = q.shape[1]
        self.queries = q.shape[2]
        self.offset = k.shape[2] - q.shape[2]
        self.table = table.to(dtype).contiguous()
        self.sums = sums
        if sums is not None:
            whole = sums.floor()
            self.whole = whole.to(dtype)
            self.rest = (sums - whole).to(dtype)
        first_visible = int((self.table > -torch.inf).any(0).nonzero()[0])
        self.farthest = k.shape[2] - 1 - first_visible

    def keys_of(self, start: int, stop: int) -> tuple[int, int]:
        """The range of keys visible to any query in [start, stop)."""
        return max(0, start + self.offset - self.farthest), stop + self.offset

    def origin(self, stop: int, low: int) -> int:
        """The entry of the table for the last query and the first key of a tile."""
        return self.queries - stop + low

    def tile(self, start: int, stop: int, low: int, high: int) -> Tensor:
        """The bias of a tile, (B or 1, H, t, s); without sums a view of the table."""
        origin = int(self.table.storage_offset()) + self.origin(stop, low)
        bias = distance_tile(self.table, origin, stop - start, high - low)
        bias = bias.expand(-1, self.heads, -1, -1)
        if self.sums is None:
            return bias

        def difference(x: Tensor) -> Tensor:
            of_queries = x[:, :, start + self.offset : stop + self.offset].flip(2)
            return of_queries[..., None] - x[:, :, None, low:high]

        return difference(self.whole).add_(difference(self.rest)).add_(bias)


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
    scale: float,
    with_table: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, table and sums. The table's gradient is 0 without `with_table`; the
    gradient of sums is empty without sums."""
    dtype = mask_dtype(q)
    bias = _Bias(q, k, table, sums)
    grad = grad.to(dtype)
    keys = k.to(dtype)
    values = v.to(dtype)
    scaled = q.to(dtype) * scale  # products in bfloat16 would differ from the forward pass
    rows = (grad * out.to(dtype)).sum(-1)  # (B, H, T): Σ_j weight · its gradient
    of_q = scaled.new_zeros(q.shape)
    of_k = scaled.new_zeros(k.shape)
    of_v = scaled.new_zeros(v.shape)
    of_table = torch.zeros_like(bias.table)
    of_sums = bias.table.new_zeros((0,) if sums is None else sums.shape)
    batch, groups = k.shape[:2]
    # exp() of numbers below the smallest normal one is many times slower than of others.
    smallest = -80.0 if dtype == torch.float32 else -700.0
    buffers = q.new_empty(2, bias.heads * TILE[0] * TILE[1], dtype=dtype)
    diagonals = {}

    def by_group(x: Tensor) -> Tensor:
        """(H, t, D) → (G, H / G · t, D): queries of a key/value head are rows of one matrix."""
        return x.flip(1).reshape(groups, -1, x.shape[2])

    for start in range(0, bias.queries, TILE[0]):
        stop = min(start + TILE[0], bias.queries)
        low, high = bias.keys_of(start, stop)
        for first in range(low, high, TILE[1]):
            last = min(first + TILE[1], high)
            tile = bias.tile(start, stop, first, last)
            origin = bias.origin(stop, first)
            for b in range(batch):
                qs = by_group(scaled[b, :, start:stop])
                grads = by_group(grad[b, :, start:stop])
                log = logs[b, :, start:stop].flip(1)[..., None]
                row = rows[b, :, start:stop].flip(1)[..., None]
                here = (b, slice(None), slice(first, last))
                shape = (groups, qs.shape[1], last - first)
                size = math.prod(shape)
                weights = buffers[0, :size].view(shape)
                slopes = buffers[1, :size].view(shape)
                torch.bmm(qs, keys[here].mT, out=weights)
                torch.bmm(grads, values[here].mT, out=slopes)
                by_head = weights.view(bias.heads, stop - start, -1)
                by_head.add_(tile[b if sums is not None else 0]).sub_(log)
                by_head.clamp_(min=smallest).exp_()
                slope = slopes.view(by_head.shape)
                slope.sub_(row).mul_(by_head)  # gradients of the logits
                of_v[here].baddbmm_(weights.mT, grads)
                of_k[here].baddbmm_(slopes.mT, qs)
                update = torch.bmm(slopes, keys[here])
                of_q[b, :, start:stop] += update.view(bias.heads, stop - start, -1).flip(1)
                if sums is not None:
                    of_sums[here] -= slope.sum(1)
                if with_table:
                    by_distance = sum_diagonals(slope, diagonals)  # (H, t + s − 1)
                    if len(of_table) == 1:
                        by_distance = by_distance.sum(0, keepdim=True)
                    of_table[:, origin : origin + by_distance.shape[1]] += by_distance
    of_q.mul_(scale)
    return (
        of_q.to(q.dtype),
        of_k.to(k.dtype),
        of_v.to(v.dtype),
        of_table.to(table.dtype),
        of_sums.double(),
    )


def sum_diagonals(x: Tensor, buffers: dict[torch.Size, Tensor]) -> Tensor:
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
def _fake_biased_attention_backward(grad, q, k, v, out, logs, table, sums, scale, with_table):
    of_sums = table.new_empty((0,) if sums is None else sums.shape, dtype=torch.float64)
    empty = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, table)]
    return (*empty, of_sums)


def _save_biased_inputs(ctx, inputs, output) -> None:
    q, k, v, table, sums, scale = inputs
    ctx.save_for_backward(q, k, v, *output, table, sums)
    ctx.scale = scale


def _biased_backward(ctx, grad: Tensor, _: Tensor):
    *saved, sums = ctx.saved_tensors
    *gradients, of_sums = biased_attention_backward(
        grad.contiguous(),
        *saved,
        sums,
        ctx.scale,
        ctx.needs_input_grad[3],
    )
    return *gradients, None if sums is None else of_sums, None


biased_attention.register_autograd(_biased_backward, setup_context=_save_biased_inputs)
