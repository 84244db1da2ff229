"""Attention kernels: softmax(q·k·scale + bias) v, or entmax, over the pairs of an attention mask.

`attend` chooses one of three kernels:

- ``sdpa`` (`sdpa.py`): PyTorch's fused kernel for plain causal attention, and ``blocks``, the same
  kernel with an additive mask by blocks of queries, and ``merged``, several views of them, on a
  CPU without gradients;
- ``flex`` (`flex.py`): FlexAttention, on GPUs, for all other masks and biases with head_dim of at
  least 16 and more than one query;
- ``explicit`` (`explicit.py`): blocks of queries with materialized scores, for other views on a
  CPU, sink logits, entmax, and other weights than those of q·k + bias (`AttentionView.weights_fn`);

or one of their faster forms: ``single`` (`explicit.py`; one query per row) and ``biased``
(`biased.py`; gradients of learned biases by distance and differences of sums, on a CPU).

``dense``, the explicit kernel with all scores at once, is the reference. Tests compare the others
with it.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with G dividing H; T queries, S keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.attention.biased import biased_attend
from model.attention.explicit import dense_attend, explicit_attend, single_attend
from model.attention.flex import FLEX_FEATURES, block_mask, flex_attend
from model.attention.mask import PRECISE, SOFTMAX, AttentionMask, AttentionView, Normalizer
from model.attention.sdpa import blocks_attend, causal_attend, merged_attend


def _of_one_view(attend_view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel of one view whose weights are the softmax over its keys alone."""

    def attend_views(
        views: list[AttentionView], v: Tensor, scale: float, normalizer: Normalizer
    ) -> Tensor:
        (view,) = views
        return attend_view(view.q.to(v.dtype), view.k.to(v.dtype), v, view.mask, scale)

    return attend_views


KERNELS = {
    "single": _of_one_view(single_attend),
    "sdpa": _of_one_view(causal_attend),
    "blocks": _of_one_view(blocks_attend),
    "biased": _of_one_view(biased_attend),
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
        kernel: one of KERNELS that supports the views; ``auto`` chooses by device, mask and bias.
        normalizer: weights of the logits of a query.

    Returns:
        (B, H, T, D) in the dtype of `v`.
    """
    if kernel == "auto":
        kernel = choose(views, v, normalizer, views[0].mask.device.type)
    return KERNELS[kernel](views, v, scale, normalizer)


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
        # On a GPU, grouped queries in float32, or with keys wider than values, store all T × S
        # scores.
        is_grouped = q.shape[1] != v.shape[1]
        stores_scores = is_grouped and (v.dtype == torch.float32 or q.shape[-1] != v.shape[-1])
        return "flex" if stores_scores and has_flex else "sdpa"
    if has_flex:
        return "flex"
    if not is_one_view:
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
