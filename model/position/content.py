"""Utilities of schemes that read the layer input: cumulative sums and convolutions along a
document.

Both continue from the extras of the previous token, so a cache stores only per-token extras. Both
restart at each document, and neither other documents nor padding change the result. They run in
float32 or float64: bfloat16 is too coarse for a sum of 50,000 gates.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from model.position.interface import PositionSettings
from model.token_positions import TokenPositions


class ContentSettings(PositionSettings):
    """Settings of schemes with per-layer parameters that read the layer input."""

    per_layer = True
    reads_between: ClassVar[bool] = False  # reads all tokens between query and key

    @model_validator(mode="after")
    def _caches_what_it_reads(self):
        if self.reads_between and self.sinks:
            raise ValueError(
                f"'{self.name}' requires all tokens between query and key, and does not support "
                "window with sinks: set sinks to 0 or window to null"
            )
        if self.window == 1 and self.sinks:
            raise ValueError(
                f"'{self.name}' with sinks requires a window of 2 or more: it reads the previous "
                f"token"
            )
        return self


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias in the dtype of x."""
    return F.linear(
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
    )


def unit(x: Tensor) -> Tensor:
    """x / √(|x|² + 1e-6), as in flash-linear-attention."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def latest(past: Tensor | None) -> Tensor | None:
    """(B, E) extras of the previous token, or None."""
    return None if past is None or past.shape[1] == 0 else past[:, -1]


def running_sum(
    x: Tensor,
    before: Tensor | None,
    new: TokenPositions,
) -> Tensor:
    """Cumulative sums within each document.

    Args:
        x: (B, T, E) summands of the new tokens.
        before: (B, E) the sum up to the previous token.
        new: positions of the new tokens.

    Returns:
        (B, T, E). Each document restarts at 0. Without the restart, differences within a document
        would contain rounding errors of other documents.
    """
    if new.layout == "plain":
        total = x.cumsum(1)
        return total if before is None else total + before[:, None]
    # After s doublings each token has the sum of its last 2^s tokens within its document.
    order = new.order[..., None]
    count = x.shape[1]
    width = 1
    total = x
    while width < count:
        earlier = F.pad(total, (0, 0, width, 0))[:, :count]
        total = total + torch.where(order >= width, earlier, 0.0)
        width *= 2
    if before is None:
        return total
    index = torch.arange(count, device=x.device)[:, None]
    return total + torch.where(order > index, before[:, None], 0.0)


def series_of(
    x: Tensor,
    history: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The features of the width − 1 previous tokens followed by the new ones, and the extras to
    cache.

    Args:
        x: (B, T, E) features of the new tokens.
        history: (B, (width − 1)·E) extras of the previous token.

    Returns:
        (B, width − 1 + T, E), and extras (B, T, (width − 1)·E): features of each token and of those
        before.
    """
    batch, count, features = x.shape
    if history is None:
        history = x.new_zeros(batch, (width - 1) * features)
    series = torch.cat([history.to(x.dtype).unflatten(1, (width - 1, features)), x], dim=1)
    extras = torch.cat([series[:, n : n + count] for n in range(1, width)], dim=-1)
    return series, extras


def causal_convolution(
    series: Tensor,
    weight: Tensor,
    order: Tensor | None,
) -> Tensor:
    """Σ_l weight[:, l]·x_(t−l) for each channel, over tokens of the same document.

    Args:
        series: (B, width − 1 + T, E), as from `series_of`.
        weight: (E, width); column l is for the l-th previous token.
        order: (B or 1, T) order of the new tokens; tokens before order 0 are not read. None: there
            is one document, and its series begins with zeros.
    """
    width = weight.shape[1]
    weight = weight.to(series.dtype)
    total = series[:, width - 1 :] * weight[:, 0]
    for lag in range(1, width):
        earlier = series[:, width - 1 - lag : -lag] * weight[:, lag]
        if order is not None:
            earlier = torch.where(order[..., None] >= lag, earlier, 0.0)
        total = total + earlier
    return total
