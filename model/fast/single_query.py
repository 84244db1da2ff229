"""One query per row as batched matrix products.

The CPU's fused kernel computes one head at a time; a GPU's takes a mask only with as many key/value
heads as query heads. The plain form is `model/attention/explicit.py`.
"""

import torch
from torch import Tensor

from model.attention.mask import PRECISE, AttentionMask, mask_dtype


def single_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """(B, H, 1, D) of the last query of each row."""
    batch, heads = q.shape[:2]
    groups = k.shape[1]
    rows = batch * groups
    is_masked = not mask.is_causal_only
    bias = q.new_zeros(())
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
        scores = torch.bmm(q, k).float() * scale + bias
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights, v).view(batch, heads, 1, -1)
