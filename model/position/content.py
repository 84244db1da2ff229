"""What schemes that read the layer's input share: sums and convolutions that run along a document.

Both go on from the note of the token before, which is all a cache has to keep; both start afresh where a
document starts, and no bit of a neighbour or of padding enters. They are worked in float32 or float64,
whatever the model computes in: a sum of 50,000 gates means nothing in bfloat16.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from model.position.base import PositionSettings
from model.position.places import Places


class ContentSettings(PositionSettings):
    """Settings of schemes with parameters that read the layer's input: each layer has its own."""

    @property
    def per_layer(self) -> bool:
        return True

    @model_validator(mode="after")
    def _the_token_before_is_remembered(self):
        if self.window == 1 and self.sinks:
            raise ValueError(
                f"'{self.name}' goes on from the token before, which a window of 1 forgets: with sinks, set "
                "window to 2 or more"
            )
        return self


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias in the precision of x, whatever the parameters' own."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def drawn(parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    """Fill with N(0, std²)."""
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def latest(past: Tensor | None) -> Tensor | None:
    """(B, E) the note of the token before; None where none is remembered."""
    return None if past is None or past.shape[1] == 0 else past[:, -1]


def running_sum(x: Tensor, before: Tensor | None, new: Places) -> Tensor:
    """Sums over each document up to and including each token.

    Args:
        x: (B, T, E) what the new tokens add.
        before: (B, E) the sum up to the token before them.
        new: their places.

    Returns:
        (B, T, E). Differences within a document would be right without a restart at its start too, but the
        rounding of the neighbours' sum would show in the last bits.
    """
    if new.layout == "plain":
        total = x.cumsum(1)
        return total if before is None else total + before[:, None]
    # After s doublings each token holds the sum of its latest 2^s tokens, as far as its document goes.
    order, count, reach, total = new.order[..., None], x.shape[1], 1, x
    while reach < count:
        earlier = F.pad(total, (0, 0, reach, 0))[:, :count]
        total = total + torch.where(order >= reach, earlier, 0.0)
        reach *= 2
    if before is None:
        return total
    index = torch.arange(count, device=x.device)[:, None]
    return total + torch.where(order > index, before[:, None], 0.0)


def series_of(x: Tensor, history: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """The features of the new tokens behind those of the width − 1 before them, and what to note of it.

    Args:
        x: (B, T, E) features of the new tokens.
        history: (B, (width − 1)·E) what was noted of the token before.

    Returns:
        (B, width − 1 + T, E), and notes (B, T, (width − 1)·E): each token's own features and those before.
    """
    batch, count, features = x.shape
    if history is None:
        history = x.new_zeros(batch, (width - 1) * features)
    series = torch.cat([history.to(x.dtype).unflatten(1, (width - 1, features)), x], dim=1)
    notes = torch.cat([series[:, n : n + count] for n in range(1, width)], dim=-1)
    return series, notes


def causal_convolution(series: Tensor, weight: Tensor, order: Tensor) -> Tensor:
    """Σ_l weight[:, l]·x_(t−l) for each channel, over tokens of the same document.

    Args:
        series: (B, width − 1 + T, E), as from `series_of`.
        weight: (E, width); column l weighs the token l back.
        order: (B or 1, T) of the new tokens: nothing is read from before order 0.
    """
    width, order = weight.shape[1], order[..., None]
    count, weight = order.shape[1], weight.to(series.dtype)
    total = series[:, width - 1 :] * weight[:, 0]
    for lag in range(1, width):
        earlier = series[:, width - 1 - lag : width - 1 - lag + count] * weight[:, lag]
        total = total + torch.where(order >= lag, earlier, 0.0)
    return total


def wrapped(angle: Tensor) -> Tensor:
    """Angles in [0, 2π): a running angle keeps its precision however far it has turned."""
    return angle.remainder(2 * math.pi)
