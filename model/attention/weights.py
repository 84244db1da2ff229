"""Weights of keys from the logits of queries: softmax or entmax, with an optional sink."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalizer:
    """A function from logits (B, H, t, s), −inf where masked, to weights.

    Attributes:
        sink: (H,) logits of an extra key without a value, as in gpt-oss; None: there is none.
        is_sparse: entmax instead of softmax.
    """

    sink: Tensor | None = None
    is_sparse: bool = False

    @property
    def is_softmax(self) -> bool:
        """Whether weights are the softmax over the keys alone, as in fused kernels."""
        return self.sink is None and not self.is_sparse

    def __call__(self, logits: Tensor) -> Tensor:
        keys = logits.shape[-1]
        if self.sink is not None:
            column = self.sink.to(logits.dtype)[:, None, None]
            column = column.expand_as(logits[..., :1])
            logits = torch.cat([logits, column], dim=-1)
        weights = Entmax.apply(logits) if self.is_sparse else logits.softmax(-1)
        return weights[..., :keys]


SOFTMAX = Normalizer()


class Entmax(torch.autograd.Function):
    """Entmax with α = 1.5: weights max(z/2 − τ, 0)² of logits z, with τ such that they sum to 1.

    Peters, Niculae and Martins 2019 (arXiv:1905.05702), algorithm 2: τ follows from the mean and
    variance of the largest logits, of which there are as many as nonzero weights.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        halves = (logits - logits.amax(-1, keepdim=True)) / 2
        halves = halves.clamp(min=-2)  # τ is at least −1, so the bound changes no weight
        largest = halves.sort(dim=-1, descending=True).values
        count = torch.ones_like(logits[..., :1, :]).cumsum(-1)
        mean = largest.cumsum(-1) / count
        squares = largest.square().cumsum(-1) - count * mean.square()  # of the deviations
        variance = (1 - squares) / count
        thresholds = mean - variance.clamp(min=0).sqrt()
        positive = (thresholds <= largest).sum(-1, keepdim=True)
        threshold = thresholds.gather(-1, positive - 1)  # τ
        weights = (halves - threshold).clamp(min=0).square()
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        roots = weights.sqrt()
        total = roots.sum(-1, keepdim=True)
        mean = (roots * gradient).sum(-1, keepdim=True) / total
        return roots * (gradient - mean)
