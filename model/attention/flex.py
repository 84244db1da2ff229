"""FlexAttention: any mask and bias on a GPU, as one compiled kernel; views are merged by
log-sum-exp. Learned biases by distance get their gradients in a pass of their own.

FlexAttention adds each pair's gradient to the indexed entry of a table; millions of additions to a
few thousand entries wait for each other. Here such a bias is detached in the kernel.
`table_gradient` recomputes the weights of one diagonal of blocks after the other from the
log-sum-exp: all of its blocks have the same distances, so their gradients are added into one block,
whose diagonals are summed at the end. There are no atomic additions: the result is deterministic.
Memory is linear in the number of keys. torch.compile treats it as a single operation.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from model.attention.biased import NAMESPACE, sum_diagonals
from model.attention.mask import AttentionMask, AttentionView, Normalizer, mask_dtype

FLEX_FEATURES = 16  # smallest head_dim that FlexAttention supports on a GPU


# Graphs of one function, for every mask and bias that a process uses. Past the limit torch.compile
# raises: eager FlexAttention and its block mask would take O(T²) memory.
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
    """Each view through FlexAttention, merged by log-sum-exp. Learned biases by distance get their
    gradients in `table_gradient`."""
    sink = normalizer.sink
    learned = [view for view in views if view.mask.learned_table() is not None]
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
        mask = view.mask
        merged = with_table_gradient(
            merged,
            torch.stack(logs).logsumexp(0)[..., 0].detach(),
            view.q.to(v.dtype),
            view.k.to(v.dtype),
            v,
            mask.learned_table(),
            mask.document,
            scale,
            mask.window,
        )
    return merged


def merge_outputs(outputs: list[Tensor], logs: Tensor) -> Tensor:
    """(B, H, T, D) of the outputs of views, from the log-sum-exps of their logits and of the sink
    (views or views + 1, B, H, T, 1)."""
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
    """(B, H, T, D); with `aux`, a tuple with the requested auxiliary outputs."""
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
def _(out, log, q, k, v, table, document, scale, window):
    return torch.empty_like(out)


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
    """(H, N), from the gradient of the output (B, H, T, E)."""
    dtype = mask_dtype(q)
    groups = k.shape[1]
    count = q.shape[2]
    before = k.shape[2] - count
    front = -before % BLOCK  # keys in front of the first, so that the blocks of queries are keys'
    back = -count % BLOCK
    older = (before + front) // BLOCK  # blocks of keys before the first query's
    table = table.to(dtype)

    def of_queries(x: Tensor) -> Tensor:
        """(B, H, T, ·) → (B, G, n, H / G · b, ·): the queries of a key/value head are rows of one
        matrix."""
        blocks = F.pad(x, (0, 0, 0, back)).unflatten(2, (-1, BLOCK))
        return blocks.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3, 4)

    def of_keys(x: Tensor, fill: int = 0) -> Tensor:
        """(B, G, S, ·) → (B, G, m, b, ·)."""
        return F.pad(x, (0, 0, front, back), value=fill).unflatten(2, (-1, BLOCK))

    mean = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)  # Σ_j weight · its gradient
    queries = of_queries(q)
    grads = of_queries(grad)
    logs = of_queries(log.to(dtype)[..., None])
    means = of_queries(mean)
    keys = of_keys(k)
    values = of_keys(v)
    documents = of_keys(document[:, None, :, None], -2)[..., 0]  # (B or 1, 1, m, b)
    index = torch.arange(BLOCK, device=q.device)
    blocks = keys.shape[2]
    of_table = table.new_zeros(len(table), (blocks + 1) * BLOCK)  # entry d + BLOCK − 1
    tile = _compiled_tile() if q.device.type == "cuda" else _tile
    buffers: dict[torch.Size, Tensor] = {}
    for back_by in range(blocks):
        if window is not None and (back_by - 1) * BLOCK + 1 >= window:
            break
        first = max(0, back_by - older)  # the first block of queries with keys so far back
        start = first + older
        near = slice(start - back_by, blocks - back_by)
        d = back_by * BLOCK + index[:, None] - index
        hidden = d < 0 if window is None else (d < 0) | (d >= window)
        bias = table[:, d.clamp(0, table.shape[1] - 1)].masked_fill(hidden, -math.inf)
        scores = _product(queries[:, :, first:], keys[:, :, near].mT)
        slopes = _product(grads[:, :, first:], values[:, :, near].mT)
        is_same = documents[:, :, start:, :, None] == documents[:, :, near, None]
        by_pair = tile(
            scores * scale, slopes, bias, logs[:, :, first:], means[:, :, first:], is_same
        )
        # Reversed keys: entries of one distance have one sum of indices.
        of_table[:, back_by * BLOCK :][:, : 2 * BLOCK - 1] += sum_diagonals(
            by_pair.flip(-1), buffers
        )
    of_table = of_table[:, BLOCK - 1 :]
    return F.pad(of_table, (0, table.shape[1] - of_table.shape[1]))


@table_gradient.register_fake
def _(grad, out, log, q, k, v, table, document, scale, window):
    return table.new_empty(table.shape, dtype=mask_dtype(q))


def _tile(
    scores: Tensor, slopes: Tensor, bias: Tensor, logs: Tensor, means: Tensor, is_same: Tensor
) -> Tensor:
    """(H, b, b) gradients of the logits of a diagonal of blocks, summed over rows and blocks.

    Args:
        scores, slopes: (B, G, m, H / G · b, b) logits without bias, and gradients of the weights.
        bias: (H, b, b).
        logs, means: (B, G, m, H / G · b, 1).
        is_same: (B or 1, 1, m, b, b), whether query and key are of one document.
    """
    size = bias.shape[-1]
    groups = scores.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(3, (-1, size))

    logits = by_head(scores) + bias.unflatten(0, (groups, -1))[:, None]
    logits = logits.masked_fill(~is_same[:, :, :, None], -math.inf)
    weights = (logits - by_head(logs)).exp()
    return (weights * (by_head(slopes) - by_head(means))).sum((0, 2)).flatten(0, 1)


@cache
def _compiled_tile() -> Callable[..., Tensor]:
    return torch.compile(_tile, dynamic=True, fullgraph=True)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, in float32 for half precision."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        dtype = mask_dtype(x)
        return x.to(dtype) @ y.to(dtype)
    flat = torch.bmm(x.flatten(0, 2), y.flatten(0, 2), out_dtype=torch.float32)
    return flat.unflatten(0, x.shape[:3])


def _save(ctx, inputs, output) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors)
    ctx.sizes = scale, window


def _backward(ctx, grad: Tensor):
    of_table = table_gradient(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes)
    table = ctx.saved_tensors[5]
    return grad, None, None, None, None, of_table.to(table.dtype), None, None, None


with_table_gradient.register_autograd(_backward, setup_context=_save)
