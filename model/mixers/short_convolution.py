"""Gated short convolutions as a token mixer: LFM2 (arXiv:2511.23404)."""

from typing import Literal

from torch import Tensor, nn

from model.mixers.base import AttentionPass, LayerKind, Mixer, MixerSettings, Modifiers
from model.mixers.convolution import CausalConvolution
from model.mixers.layer_state import GatheredState, LayerState
from model.position.base import constant
from settings.fields import setting


class ShortConvolutionMixer(MixerSettings):
    """A gated convolution over the last tokens of a document, without state or attention."""

    name: Literal["short_convolution"] = "short_convolution"
    width: int = setting(3, "tokens that an output depends on, its own included", ge=1)
    bias: bool = setting(False, "biases of the projections and the convolution")

    def describe(self):
        return f"convolution of width {self.width}"


class ShortConvolution(Mixer):
    """W_o (c ⊙ conv(b ⊙ z)) with (b, c, z) = W_in x; the convolution has no activation."""

    has_queries = False

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        m: ShortConvolutionMixer = kind.mixer
        self.mixer = m
        self.position = Modifiers(kind.position, kind.heads, kind.dim)
        self.w_in = nn.Linear(kind.dim, 3 * kind.dim, bias=m.bias)
        self.convolution = CausalConvolution(kind.dim, m.width, silu=False, bias=m.bias)
        self.wo = nn.Linear(kind.dim, kind.dim, bias=m.bias)

    @property
    def initial_values(self):
        return {"convolution.bias": constant(0.0)} if self.mixer.bias else {}

    def forward(
        self, x: Tensor, step: AttentionPass, layer_cache: LayerState | GatheredState | None
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        context = step.context
        state = LayerState() if layer_cache is None else layer_cache
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
