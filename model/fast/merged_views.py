"""Several views with masks by distance through the CPU's fused kernel, merged by log-sum-exp.

The plain form is `model/attention/explicit.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.attention.explicit import by_block
from model.attention.mask import AttentionView
from model.attention.sdpa import distance_mask


def merged_attend(
    views: list[AttentionView],
    v: Tensor,
    scale: float,
) -> Tensor:
    """(B, H, T, D), without gradients. A view without keys has weight 0."""

    def block(start: int, stop: int) -> Tensor:
        outputs = []
        logs = []
        for view in views:
            band = view.mask.exact_band
            low, high = band.keys(start, stop)
            if low >= high:
                continue
            q, keys, mask = distance_mask(
                view.q.to(v.dtype),
                view.mask,
                start,
                stop,
            )
            out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q,
                view.k[:, :, keys].to(v.dtype),
                v[:, :, keys],
                attn_mask=mask.expand(*q.shape[:3], -1),
                scale=scale,
            )
            # The result of rows without a key is undefined.
            has_keys = band.attending(start, stop, q.device).flip(0)
            outputs.append(torch.where(has_keys[:, None], out, 0.0))
            logs.append(log.masked_fill(~has_keys, -math.inf))
        if len(outputs) == 1:
            return outputs[0].flip(2)
        weights = torch.stack(logs).softmax(0)[..., None].to(v.dtype)  # (views, B, H, t, 1)
        return (weights * torch.stack(outputs)).sum(0).flip(2)

    size = max(view.mask.distance_block for view in views)
    return by_block(
        block,
        views[0].mask.queries,
        size,
        recompute=False,
    )
