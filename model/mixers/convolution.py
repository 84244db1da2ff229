"""The short causal convolution of recurrent layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.position.content import causal_convolution


class CausalConvolution(nn.Module):
    """y_t = b + Σ_j w_j ⊙ x_{t−j} over the last W tokens of the same document, then SiLU if `silu`.

    Attributes:
        weight: (C, W), in the order of the tokens: the last column is that of x_t.
    """

    def __init__(self, channels: int, width: int, *, silu: bool, bias: bool = False):
        super().__init__()
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Outputs (B, T, C) of the last T tokens.

        Args:
            x: (B, W − 1 + T, C), inputs of the W − 1 tokens before this pass and of its tokens.
            order: (B or 1, T) of its tokens; None: see `causal_convolution`.
        """
        out = causal_convolution(x, self.weight.flip(1), order)
        if self.bias is not None:
            out = out + self.bias
        return F.silu(out) if self.silu else out
