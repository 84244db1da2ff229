"""FlexAttention: any mask and bias on a GPU, as one compiled kernel; views are merged by
log-sum-exp. Learned biases by distance, and FIRE's bias, get their gradients in a separate pass.

FlexAttention adds each pair's gradient to the indexed entry of a table; millions of additions to a
few thousand entries wait for each other. Here such a bias is detached in the kernel.
`LogitGradients` recomputes the weights of one diagonal of blocks after the other from the
log-sum-exp: all of its blocks have the same distances, so `table_gradient` adds their gradients
into one block, whose diagonals are summed. There are no atomic additions: the result is
deterministic. Memory is bounded, and the host never waits. torch.compile treats it as a single
operation.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from model.attention.biased import NAMESPACE, distance_tile, sum_diagonals
from model.attention.mask import AttentionMask, AttentionView, Normalizer, mask_dtype

FLEX_FEATURES = 16  # smallest head_dim that FlexAttention supports on a GPU


# Maximum number of graphs of one function, one for every mask and bias that a process uses. Beyond
# it torch.compile raises: eager FlexAttention and its block mask would take O(T²) memory.
RECOMPILE_LIMIT = 64


@cache
def _compiled(
    function,
    dynamic: bool | None,
    with_gradients: bool,
    with_lse: bool,
):
    # The option `recompile_limit` of torch.compile exists since torch 2.13 only.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


def fused(
    function,
    device: torch.device,
    dynamic: bool | None = None,
    with_lse: bool = False,
):
    """`function` compiled on a GPU; `function` itself on a CPU and inside a compiled model."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function
    return _compiled(function, dynamic, torch.is_grad_enabled(), with_lse)


def flex_attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
    normalizer: Normalizer,
) -> Tensor:
    """Each view through FlexAttention, merged by log-sum-exp. Learned biases with a separate
    gradient pass get their gradients there."""
    sink = normalizer.sink
    learned = [view for view in views if gradient_pass(view.mask) is not None]
    is_single = len(views) == 1 and sink is None
    if is_single and not learned:
        return flex_view(views[0], v, scale, None)
    outputs = []
    logs = []
    for view in views:
        out, aux = flex_view(view, v, scale, AuxRequest(lse=True))
        outputs.append(out)
        logs.append(aux.lse.to(mask_dtype(v))[..., None])  # (B, H, T, 1)
    if sink is not None:
        logs.append(sink.to(logs[0].dtype)[None, :, None, None].expand_as(logs[0]))
    merged = outputs[0] if is_single else merge_outputs(outputs, torch.stack(logs)).to(v.dtype)
    for view in learned:
        log = torch.stack(logs).logsumexp(0)[..., 0].detach()
        add = gradient_pass(view.mask)
        assert add is not None
        merged = add(merged, log, view, v, scale)
    return merged


def gradient_pass(mask: AttentionMask):
    """`BiasForms.add_gradient`; None: FlexAttention computes the gradient, or there is none."""
    return mask.forms.add_gradient if mask.learned_table() is None else add_table_gradient


def add_table_gradient(
    out: Tensor,
    log: Tensor,
    view: AttentionView,
    v: Tensor,
    scale: float,
) -> Tensor:
    mask = view.mask
    table = mask.learned_table()
    assert table is not None
    q = view.q.to(v.dtype)
    k = view.k.to(v.dtype)
    return with_table_gradient(out, log, q, k, v, table, mask.document, scale, mask.window)


def merge_outputs(outputs: list[Tensor], logs: Tensor) -> Tensor:
    """Merge the outputs of views into one, (B, H, T, D), by the log-sum-exps (views or views + 1,
    B, H, T, 1) of their logits and of the sink."""
    weights = logs.softmax(0)
    # For a query without visible keys in a view, the lse is −inf and the output is undefined.
    parts = [
        torch.where(w > 0, w * out, 0.0)
        for w, out in zip(weights[: len(outputs)], outputs, strict=True)
    ]
    return torch.stack(parts).sum(0)


def flex_view(
    view: AttentionView,
    v: Tensor,
    scale: float,
    aux: AuxRequest | None,
) -> Any:
    """The output (B, H, T, D) of one view; with `aux`, a tuple with the requested auxiliary
    outputs."""
    q = view.q.to(v.dtype)
    k = view.k.to(v.dtype)
    mask = view.mask
    bias = mask.flex_bias()
    score_mod = None
    if bias is not None:
        score_mod = lambda score, b, h, i, j: score + bias(b, h, i, j).to(score.dtype)  # noqa: E731
    gqa = q.shape[1] != k.shape[1]
    more: dict[str, Any] = {} if aux is None else {"return_aux": aux}
    if mask.forms.kernel_options:
        more["kernel_options"] = mask.forms.kernel_options
    run = fused(
        flex_attention,
        mask.device,
        dynamic=True,
        with_lse=aux is not None,
    )
    return run(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask(mask),
        scale=scale,
        enable_gqa=gqa,
        **more,
    )


def block_mask(mask: AttentionMask) -> BlockMask:
    """The mask as FlexAttention's BlockMask, created once per pass."""
    if "block_mask" not in mask.shared:
        rows = None if mask.mask_rows == 1 else mask.batch
        make = fused(create_block_mask, mask.device)
        mask.shared["block_mask"] = make(
            mask.mask_mod, rows, None, mask.queries, mask.keys, device=mask.device
        )
    return mask.shared["block_mask"]


BLOCK = 256  # queries and keys of a block
PAIRS_AT_ONCE = 1 << 27  # B·H·m·b² scores in float32


@torch.library.custom_op(f"{NAMESPACE}::with_table_gradient", mutates_args=())
def with_table_gradient(
    out: Tensor,
    log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    document: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """A copy of the output (B, H, T, E) of attention, from which the table gets its gradient.

    Args:
        log: (B, H, T) log-sum-exp of each query's logits.
    """
    return out.clone()


@with_table_gradient.register_fake
def _fake_with_table_gradient(out, log, q, k, v, table, document, scale, window):
    return torch.empty_like(out)


class DiagonalPart(NamedTuple):
    """Blocks on one diagonal.

    Attributes:
        back_by: number of blocks by which the keys precede their queries.
        queries, keys: ranges of blocks of queries and of keys, the last block first.
    """

    back_by: int
    queries: slice
    keys: slice


class LogitGradients:
    """Gradients of the logits of one view, for one diagonal of blocks of queries and keys after the
    other, from the gradient of the output (B, H, T, E).

    Blocks and the queries in a block are reversed, so that entries of equal distance have equal
    sums of indices. Vectors by distance are (·, L): entry e is for distance `farthest` − e. Masked
    pairs have distances below 0 or from `window` on.
    """

    def __init__(
        self,
        grad: Tensor,
        out: Tensor,
        log: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document: Tensor,
        scale: float,
        window: int | None,
    ):
        self.window = window
        dtype = mask_dtype(q)
        self.groups = k.shape[1]
        before = k.shape[2] - q.shape[2]
        front = -before % BLOCK  # padding before the first key: aligns blocks of queries and keys
        self.back = -q.shape[2] % BLOCK

        def of_keys(x: Tensor) -> Tensor:
            """(B, G, S, ·) → (m, B, G, b, ·)."""
            blocks = F.pad(x, (0, 0, front, self.back)).unflatten(2, (-1, BLOCK)).flip(2)
            return blocks.permute(2, 0, 1, 3, 4).contiguous()

        def of_documents(x: Tensor, front: int, fill: int) -> Tensor:
            """(B or 1, ·) → (n or m, B or 1, b)."""
            blocks = F.pad(x, (front, self.back), value=fill).unflatten(1, (-1, BLOCK))
            return blocks.flip(1).transpose(0, 1)

        # Σ_j weight · its gradient
        mean = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        self.q = self.of_queries(q)
        self.grads = self.of_queries(grad)
        self.logs = self.of_queries(log.to(dtype)[..., None])
        self.means = self.of_queries(mean)
        self.k = of_keys(k)
        self.v = of_keys(v)
        self.q_documents = of_documents(document[:, before:], 0, -3).flip(2)
        self.k_documents = of_documents(document, front, -2)
        self.farthest = len(self.k) * BLOCK - 1
        d = self.farthest - torch.arange(self.farthest + BLOCK, device=q.device)
        self.hidden = d < 0 if window is None else (d < 0) | (d >= window)
        self.distances = d
        self.scale = mean.new_full((), scale)
        self.run = fused(_tile, q.device, dynamic=True)
        self.at_once = max(1, PAIRS_AT_ONCE // (q.shape[0] * q.shape[1] * BLOCK * BLOCK))

    def of_queries(self, x: Tensor) -> Tensor:
        """(B, H, T, ·) → (n, B, G, H / G · b, ·): the queries of a key/value head are rows of one
        matrix."""
        blocks = F.pad(x, (0, 0, 0, self.back)).unflatten(2, (-1, BLOCK)).flip(2, 3)
        return blocks.unflatten(1, (self.groups, -1)).permute(3, 0, 1, 2, 4, 5).flatten(3, 4)

    def by_distance(self, table: Tensor) -> Tensor:
        """Vectors (·, N) by increasing distance from 0 → vectors by distance (·, L)."""
        return table.to(self.scale.dtype)[:, self.distances.clamp(0, table.shape[1] - 1)]

    def of_distances(self, x: Tensor, count: int) -> Tensor:
        """Vectors by distance (·, L) → vectors (·, count) by increasing distance from 0."""
        x = x.flip(1)[:, BLOCK - 1 :]
        return F.pad(x, (0, count - x.shape[1]))

    def parts(self) -> Iterator[DiagonalPart]:
        for back_by in range(len(self.k)):
            if self.window is not None and (back_by - 1) * BLOCK + 1 >= self.window:
                return
            count = min(len(self.q), len(self.k) - back_by)
            for first in range(0, count, self.at_once):
                last = min(first + self.at_once, count)
                yield DiagonalPart(
                    back_by, slice(first, last), slice(first + back_by, last + back_by)
                )

    def _origin(self, part: DiagonalPart) -> int:
        return (len(self.k) - 1 - part.back_by) * BLOCK

    def tile(self, x: Tensor, part: DiagonalPart) -> Tensor:
        """Vectors by distance (·, L) → the entries (1, ·, b, b) of the pairs of a block."""
        return distance_tile(x, self._origin(part), BLOCK, BLOCK)

    def add_diagonals(
        self, x: Tensor, tile: Tensor, part: DiagonalPart, buffers: dict[torch.Size, Tensor]
    ) -> None:
        """Add the entries of tile (·, b, b) to the entries of the same distances in x (·, L)."""
        sums = sum_diagonals(tile, buffers)
        origin = self._origin(part)
        x[:, origin : origin + sums.shape[1]].add_(sums)  # += would copy the result to itself

    def of(self, part: DiagonalPart, bias: Tensor, by_block: bool = False) -> Tensor:
        """Gradients of the logits of one diagonal: (H, b, b), summed over rows and blocks, or (m,
        H, b, b) `by_block`.

        Args:
            bias: (1 or m, H, b, b), −inf if masked.
        """
        queries = part.queries
        keys = part.keys
        return self.run(
            _product(self.q[queries], self.k[keys].mT),
            _product(self.grads[queries], self.v[keys].mT),
            self.scale,
            bias,
            self.logs[queries],
            self.means[queries],
            self.q_documents[queries],
            self.k_documents[keys],
            by_block,
        )


@torch.library.custom_op(f"{NAMESPACE}::table_gradient", mutates_args=())
def table_gradient(
    grad: Tensor,
    out: Tensor,
    log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    document: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """The gradient (H, N) of the table, from the gradient of the output (B, H, T, E)."""
    logits = LogitGradients(grad, out, log, q, k, v, document, scale, window)
    bias = logits.by_distance(table).masked_fill(logits.hidden, -math.inf)
    of_bias = torch.zeros_like(bias)
    buffers: dict[torch.Size, Tensor] = {}
    for part in logits.parts():
        by_pair = logits.of(part, logits.tile(bias, part))
        logits.add_diagonals(of_bias, by_pair, part, buffers)
    return logits.of_distances(of_bias, table.shape[1])


@table_gradient.register_fake
def _fake_table_gradient(grad, out, log, q, k, v, table, document, scale, window):
    return table.new_empty(table.shape, dtype=mask_dtype(q))


def _tile(
    scores: Tensor,
    slopes: Tensor,
    scale: Tensor,
    bias: Tensor,
    logs: Tensor,
    means: Tensor,
    q_documents: Tensor,
    k_documents: Tensor,
    by_block: bool,
) -> Tensor:
    """See `LogitGradients.of`.

    Args:
        scores, slopes: (m, B, G, H / G · b, b) q·k, and gradients of the weights.
        bias: (1 or m, H, b, b).
        logs, means: (m, B, G, H / G · b, 1).
        q_documents, k_documents: (m, B or 1, b).
    """
    size = bias.shape[-1]
    groups = scores.shape[2]

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(3, (-1, size))

    is_same = q_documents[..., None] == k_documents[:, :, None]  # (m, B or 1, b, b)
    logits = by_head(scores) * scale + bias.unflatten(1, (groups, -1))[:, None]
    logits = logits.masked_fill(~is_same[:, :, None, None], -math.inf)
    weights = (logits - by_head(logs)).exp()
    by_pair = weights * (by_head(slopes) - by_head(means))
    return by_pair.sum(1 if by_block else (0, 1)).flatten(-4, -3)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, in float32 for half precision."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        dtype = mask_dtype(x)
        return x.to(dtype) @ y.to(dtype)
    flat = torch.bmm(x.flatten(0, 2), y.flatten(0, 2), out_dtype=torch.float32)
    return flat.unflatten(0, x.shape[:3])


def _save_table_inputs(ctx, inputs, output) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors)
    ctx.sizes = scale, window


def _table_backward(ctx, grad: Tensor):
    of_table = table_gradient(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes)
    table = ctx.saved_tensors[5]
    return grad, None, None, None, None, of_table.to(table.dtype), None, None, None


with_table_gradient.register_autograd(_table_backward, setup_context=_save_table_inputs)
