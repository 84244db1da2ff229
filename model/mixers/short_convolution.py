"""Short causal convolutions: in recurrent layers, as Canon layers, and, with gates, as a token
mixer (LFM2, arXiv:2511.23404)."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import CachedTail
from model.mixers.mixer import LayerKind, Mixer, MixerSettings
from model.mixers.recurrence import LayerState
from model.position import AttentionContext
from model.position.content import causal_convolution
from model.position.interface import Initializer, constant, uniform
from settings.fields import setting


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
            order: (B or 1, T) order of the tokens of this pass; None: see `causal_convolution`.
        """
        out = causal_convolution(x, self.weight.flip(1), order)
        if self.bias is not None:
            out = out + self.bias
        return F.silu(out) if self.silu else out


class Canon(nn.Module):
    """A Canon layer, x_t + Σ_j w_j ⊙ x_{t−j} over the last W = 4 tokens of the same document.
    Allen-Zhu 2025 (arXiv:2512.17351), as in the released models: no activation and no bias.

    There is one on the input of the token mixer (A), on the queries, keys and values of softmax
    attention together, before positions (B), on the input of the MLP (C), and on both projections
    of the MLP before its activation (D); `model.canon` lists them. Initial weights are those of
    torch's Conv1d, U(−1/√W, 1/√W).
    """

    def __init__(self, place: str, channels: int, width: int):
        super().__init__()
        self.place = place
        self.convolution = CausalConvolution(channels, width, silu=False)

    @property
    def initializer(self) -> Initializer:
        """The initializer of the weights."""
        bound = self.convolution.weight.shape[1] ** -0.5
        return uniform(-bound, bound)

    @property
    def cached_numbers(self) -> int:
        """Numbers in the cache of one row: the inputs of the last W − 1 tokens."""
        channels, width = self.convolution.weight.shape
        return channels * (width - 1)

    def forward(self, x: Tensor, context: AttentionContext, layer_cache: Any) -> Tensor:
        """Outputs (B, T, C) for the new tokens x (B, T, C) of the pass. The cache of the layer
        keeps the last inputs."""
        tail = layer_cache or CachedTail()
        extended = tail.extend(x, self.convolution.weight.shape[1] - 1, f"canon_{self.place}")
        return x + self.convolution(extended, context.document_order)


class ShortConvolutionMixer(MixerSettings):
    """A gated convolution over the last tokens of a document, without state or attention."""

    name: Literal["short_convolution"] = "short_convolution"
    width: int = setting(3, "number of tokens that an output depends on, including its own", ge=1)
    bias: bool = setting(False, "biases of the projections and the convolution")

    def describe(self):
        return f"convolution of width {self.width}"


class ShortConvolution(Mixer):
    """W_o (c ⊙ conv(b ⊙ z)) with (b, c, z) = W_in x; the convolution has no activation."""

    has_queries = False
    mixer: ShortConvolutionMixer

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        m = self.mixer
        self.position = kind.modifiers()
        self.w_in = nn.Linear(kind.dim, 3 * kind.dim, bias=m.bias)
        self.convolution = CausalConvolution(kind.dim, m.width, silu=False, bias=m.bias)
        self.wo = nn.Linear(kind.dim, kind.dim, bias=m.bias)

    @property
    def initial_values(self):
        return {"convolution.bias": constant(0.0)} if self.mixer.bias else {}

    def forward(self, x, step, layer_cache):
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        context = step.context
        state = layer_cache or LayerState()
        b, c, z = self.w_in(x).chunk(3, dim=-1)
        extended = state.extend(b * z, self.mixer.width - 1)
        mixed = self.convolution(extended, context.document_order)
        return self.wo(context.of_queries(c * mixed))

    def pair_flops(self, length):
        return 6 * self.wo.in_features * (self.mixer.width + 1)

    def cached_numbers(self, tokens, key_features):
        return (self.mixer.width - 1) * self.wo.in_features

    def workspace(self, batch, tokens, length, blocks):
        return 6 * batch * tokens * self.wo.in_features

    def saved_numbers(self, length):
        return (4 + self.mixer.width) * self.wo.in_features
