"""FlexAttention: any mask and bias on a GPU, as one compiled kernel; views are merged by
log-sum-exp."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from model.attention.mask import AttentionMask, AttentionView, Normalizer, mask_dtype
from model.attention.table_gradient import with_table_gradient

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
    gradients in `model/attention/table_gradient.py`."""
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
    merged = outputs[0] if is_single else _merged(outputs, torch.stack(logs)).to(v.dtype)
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


def _merged(outputs: list[Tensor], logs: Tensor) -> Tensor:
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
