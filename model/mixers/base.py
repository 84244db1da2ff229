"""The interface of token mixers: what the decoder, its caches, memory estimates and exports require
of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from errors import ModelError
from model.attention.kernels import AttentionHook
from model.attention.sharding import GatheredLayer, ShardedWindow
from model.cache import CacheIndex
from model.position import (
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    HeadGeometry,
    PositionSettings,
)
from model.position.base import Initializer
from settings.fields import StrictSettings

Gate = Literal["none", "head", "channel"]
NormPlacement = Literal["input", "output", "both"]


class MixerSettings(StrictSettings):
    """Settings shared by all token mixers."""

    # Whether weights are a softmax of scaled q·k, so that the settings of the scale apply.
    scales_logits: ClassVar[bool] = False

    name: str

    def describe(self) -> str:
        """The mixer as it is named in summaries; empty for softmax attention."""
        return ""


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind have in common; see `ModelSettings`.

    Attributes:
        gate: gate of the mixer's output: one number per head or per channel.
        attention_scale: factor on q·k.
    """

    mixer: Any  # MixerSettings; modules declare their own
    position: PositionSettings
    gate: Gate
    norm_placement: NormPlacement
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    dim: int
    norm_eps: float
    qk_norm: bool | Literal["all_heads"]
    attention_bias: Literal["none", "qkv", "all"]

    def geometry(self, train_length: int, original_length: int) -> HeadGeometry:
        """The sizes available to the positional scheme."""
        return HeadGeometry(
            dim=self.dim,
            heads=self.heads,
            head_dim=self.head_dim,
            train_length=train_length,
            original_length=original_length,
            kv_heads=self.kv_heads,
            attention_scale=self.attention_scale,
        )


@dataclass(frozen=True)
class AttentionPass:
    """One attention pass of one layer kind.

    Attributes:
        plan: attention plan of the scheme, without the logit temperature.
        factors: (B or 1, H or 1, T or 1) temperature factors of the tokens, or None.
    """

    context: AttentionContext
    plan: AttentionPlan | ContentPlan
    factors: Tensor | None


class Modifiers(nn.Module):
    """Temperature and sink of one layer, for any scheme; each learns at most one number per
    head."""

    def __init__(self, settings: PositionSettings, heads: int):
        super().__init__()
        self.settings = settings
        self._heads = heads
        temperature = settings.temperature
        self.scale = nn.Parameter(torch.empty(heads)) if temperature.learned else None
        self.sink = nn.Parameter(torch.empty(heads)) if settings.sink_logit == "learned" else None
        given = temperature.by_head
        if given is not None and len(given) != heads:
            raise ModelError(
                f"model.position.temperature.value must have one factor per head ({heads}), got "
                f"{len(given)}"
            )

    def initialize(self) -> None:
        with torch.no_grad():
            if self.scale is not None:
                self.scale.fill_(self.settings.temperature.initial)
            if self.sink is not None:
                self.sink.zero_()

    def scale_queries(self, q: Tensor, factors: Tensor | None) -> Tensor:
        """q (B, H, K, ·) times the temperature; `factors` (B or 1, H or 1, K or 1) are per
        query."""
        if self.scale is not None:
            q = q * self.scale[:, None, None].to(q.dtype)
        return q if factors is None else (q * factors[..., None]).to(q.dtype)

    def sink_logits(self, device: torch.device) -> Tensor | None:
        """(H,) logits of an extra softmax column without a value, or None."""
        return (
            torch.zeros(self._heads, device=device)
            if self.settings.sink_logit == "zero"
            else self.sink
        )


class Mixer(nn.Module, ABC):
    """Base class of token mixers: (B, T, C) → (B, K, C). Its output matrix is named `wo`.

    Attributes:
        caches_keys: whether its cache grows with the keys and needs a `CacheIndex`.
        has_attention_weights: whether it calls attention hooks.
        position: temperature and sink of the layer.
    """

    caches_keys: ClassVar[bool] = False
    has_attention_weights: ClassVar[bool] = False
    position: Modifiers

    def __init__(self, kind: LayerKind):
        super().__init__()
        self.heads = kind.heads
        self.kv_heads = kind.kv_heads
        self.head_dim = kind.head_dim

    @classmethod
    def check(cls, where: str, kind: LayerKind, geometry: HeadGeometry) -> None:
        """Check that layers of this kind can be built.

        Args:
            where: the key of the positional scheme in the settings, for error messages.

        Raises:
            ModelError: the mixer does not support the scheme or one of its settings.
        """

    @property
    def initial_values(self) -> dict[str, Initializer]:
        """The initial values of parameters, by name, that differ from those of
        `Transformer.initialize`."""
        return {}

    @abstractmethod
    def forward(
        self, x: Tensor, step: AttentionPass, layer_cache: Any, hook: AttentionHook | None = None
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""

    @abstractmethod
    def make_cache(self, index: CacheIndex | None, dtype: torch.dtype) -> Any:
        """An empty cache for this layer, with `select_rows` and `static`; see `LayerCache`. `index`
        is None unless `caches_keys`."""

    @abstractmethod
    def sharded_cache(self, window: ShardedWindow) -> GatheredLayer:
        """An empty cache for the passes of this layer over a window that is sharded over
        processes."""

    @abstractmethod
    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token without the products with matrices of weights."""

    @abstractmethod
    def cached_numbers(self, tokens: int, key_features: int) -> int:
        """Numbers in the cache of one row of `tokens` tokens, with `key_features` numbers per
        key."""

    @abstractmethod
    def workspace(self, batch: int, tokens: int, length: int, blocks: int) -> int:
        """Upper estimate of the numbers that a pass of `tokens` tokens in windows of `length`
        tokens needs at once, besides its inputs and outputs.

        Args:
            blocks: blocks of scores that the kernels of attention keep at once.
        """

    def saved_numbers(self, length: int) -> int:
        """Numbers per token that are saved for the backward pass: queries, keys, values, and what
        the mixer computes of them."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim
