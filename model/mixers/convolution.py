"""The short causal convolution of recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    def forward(self, x: Tensor, document: Tensor | None) -> Tensor:
        """Outputs (B, T, C) of the last T tokens.

        Args:
            x: (B, W − 1 + T, C), inputs of the W − 1 tokens before this pass and of its tokens.
            document: (B or 1, W − 1 + T) documents of these tokens; None: there is only one.
        """
        width = self.weight.shape[1]
        tokens = x.shape[1] - width + 1
        out = x.new_zeros(()) if self.bias is None else self.bias
        for i in range(width):
            part = x[:, i : i + tokens] * self.weight[:, i]
            if document is not None:
                is_own = document[:, i : i + tokens] == document[:, width - 1 :]
                part = part * is_own[..., None]
            out = out + part
        return F.silu(out) if self.silu else out
