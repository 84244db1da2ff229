"""The interface of token mixers: what the decoder, its caches, memory estimates and exports require
of a mixer."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from errors import ModelError
from model.cache import CacheIndex, LayerCache
from model.mixers.recurrence import GatheredState, LayerState
from model.position import (
    SCHEMES,
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    HeadGeometry,
    PositionSettings,
)
from model.position.interface import Initializer, Modifiers
from model.sharding import GatheredKeys, ShardedWindow
from model.token_positions import TokenPositions
from settings.fields import StrictSettings

Gate = Literal["none", "head", "channel"]
NormPlacement = Literal["input", "output", "both"]


# Settings of a scheme that requires no softmax.
PLAIN_SCHEME = {
    "window": None,
    "sinks": 0,
    "temperature.name": "none",
    "sink_logit": "none",
    "weights": "softmax",
    "shifted_keys": 0,
}


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
    """Settings that layers of one kind have in common; see `ModelSettings`.

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
    value_norm: bool
    attention_bias: Literal["none", "qkv", "all"]
    canon: tuple[str, ...]
    canon_width: int

    def modifiers(self) -> Modifiers:
        """Temperature, sink and weights of a new layer."""
        return Modifiers(self.position, self.heads, self.dim)

    def geometry(self, train_length: int, original_length: int) -> HeadGeometry:
        """The sizes available to the positional scheme."""
        return HeadGeometry(
            dim=self.dim,
            heads=self.heads,
            head_dim=self.head_dim,
            train_length=train_length,
            original_length=original_length,
            kv_heads=self.kv_heads,
            scale=self.attention_scale,
        )


@dataclass(frozen=True)
class AttentionPass:
    """One attention pass of one layer kind.

    Attributes:
        plan: attention plan of the scheme, without the logit temperature.
        factors: (B or 1, H or 1, K or 1) temperature factors of the queries, or None.
    """

    context: AttentionContext
    plan: AttentionPlan | ContentPlan
    factors: Tensor | None


class Mixer(nn.Module, ABC):
    """Base class of token mixers: (B, T, C) → (B, K, C). Its output matrix is named `wo`.

    Attributes:
        has_attention_weights: whether it caches keys, with a `CacheIndex`, and calls attention
            hooks. Otherwise its cache is a state of constant size.
        has_queries: whether it has queries and keys, which schemes may change.
        has_gate: whether it supports the gate of its output.
        shares_queries: whether several heads may share a projected query.
        position: temperature, sink and weights of the layer.
    """

    has_attention_weights: ClassVar[bool] = False
    has_queries: ClassVar[bool] = True
    has_gate: ClassVar[bool] = False
    shares_queries: ClassVar[bool] = False
    position: Modifiers
    mixer: Any  # MixerSettings; subclasses declare their own

    def __init__(self, kind: LayerKind):
        super().__init__()
        self.mixer = kind.mixer
        self.heads = kind.heads
        self.kv_heads = kind.kv_heads
        self.head_dim = kind.head_dim

    @classmethod
    def check(cls, where: str, kind: LayerKind, geometry: HeadGeometry) -> None:
        """Check that layers of this kind can be built.

        Args:
            where: the key of the positional scheme in the settings, for error messages.

        Raises:
            ModelError: the mixer does not support the gate, the scheme or one of its settings.
        """
        if kind.gate != "none" and not cls.has_gate:
            raise ModelError(
                f"gate = {kind.gate} is not supported by layers with mixer.name = "
                f"{kind.mixer.name}: set gate to none"
            )
        shared = kind.position.heads_per_query
        if shared > 1 and (not cls.shares_queries or kind.heads // kind.kv_heads % shared):
            raise ModelError(
                f"{where}: scheme '{kind.position.name}' with these settings shares each query "
                f"among {shared} heads, which requires mixer.name = attention and a multiple of "
                f"{shared} heads for each of kv_heads"
            )
        if not cls.has_attention_weights:
            cls._check_scheme(where, kind, geometry)

    @classmethod
    def _check_scheme(cls, where: str, kind: LayerKind, geometry: HeadGeometry) -> None:
        """`check` for mixers without softmax, whose schemes can add nothing to logits."""
        choice = kind.position
        mixer = f"mixer.name = {kind.mixer.name}"
        for key, required in PLAIN_SCHEME.items():
            if attrgetter(key)(choice) != required:
                raise ModelError(
                    f"{where}.{key} is not supported by layers with {mixer}: set it to "
                    f"{json.dumps(required)} or choose mixer.name = attention"
                )
        # Run two tokens through a temporary instance to find out what the scheme requires.
        cpu = torch.device("cpu")
        with cpu, torch.no_grad():
            scheme = SCHEMES[choice.name][1](choice, geometry)
            new = TokenPositions.plain(min(2, scheme.limit or 2))
            tables = scheme.tables(new, torch.float32)
            plan = scheme.plan(AttentionContext(new, new, new, 1, geometry.heads, cpu, tables))
            is_supported = False
            if isinstance(plan, AttentionPlan):
                q = torch.ones(1, geometry.heads, new.count, geometry.head_dim)
                view, *others = plan.read(q, plan.write(q[:, : geometry.kv_heads]))
                is_plain = view.weights_fn is None and view.mask.is_causal_only and not others
                is_supported = is_plain and view.k.shape[-1] == geometry.head_dim
                if not cls.has_queries:
                    is_supported &= torch.equal(view.q, q)
        if not is_supported:
            allowed = "queries, keys and token" if cls.has_queries else "token"
            raise ModelError(
                f"{where}: scheme '{choice.name}' does not only transform {allowed} embeddings, as "
                f"layers with {mixer} require; choose another scheme or mixer.name = attention"
            )

    @property
    def initial_values(self) -> dict[str, Initializer]:
        """Initial values by parameter name, for parameters that `Transformer.initialize` would
        initialize differently."""
        return {}

    @abstractmethod
    def forward(self, x: Tensor, step: AttentionPass, layer_cache: Any) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the pass. Mixers with attention weights have
        a further argument, the attention hook or None."""

    def make_cache(self, index: CacheIndex | None, dtype: torch.dtype) -> LayerCache | LayerState:
        """An empty cache for this layer; `index` is None without attention weights."""
        return LayerState() if index is None else LayerCache(index, dtype)

    def sharded_cache(self, window: ShardedWindow) -> GatheredKeys | GatheredState:
        """An empty cache for the passes of this layer over a window that is sharded over
        processes."""
        if self.has_attention_weights:
            return GatheredKeys(window, self.position.settings)
        return GatheredState(window)

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
        the mixer computes from them."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim
