"""The projections and modifiers shared by all token mixers, and softmax attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from errors import ModelError
from model.attention.kernels import AttentionHook, attend
from model.attention.mask import AttentionView
from model.cache import CacheIndex, LayerCache
from model.model_settings import ModelSettings
from model.position import (
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    ExtrasCache,
    PositionSettings,
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


class KeyCache(ExtrasCache, Protocol):
    """Stores keys, values and extras of one layer."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, T, ·); returns all that the new tokens attend to (B, G, S,
        ·)."""
        ...


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys in the dtype of its weight: the fused kernel requires it under
    autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


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


class Projection(nn.Module):
    """The projections of a token mixer, the same for softmax and linear attention."""

    def __init__(self, s: ModelSettings, choice: PositionSettings):
        super().__init__()
        self.heads = s.heads
        self.kv_heads = s.kv_heads
        self.head_dim = s.head_dim
        self.scale = s.attention_scale
        self.joint_norm = s.qk_norm == "all_heads"
        bias = s.attention_bias != "none"
        self.wq = nn.Linear(s.dim, s.heads * s.head_dim, bias=bias)
        self.wk = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=bias)
        self.wv = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=bias)
        self.wo = nn.Linear(
            s.heads * s.head_dim,
            s.dim,
            bias=s.attention_bias == "all",
        )
        q_features, k_features = (
            heads if self.joint_norm else 1 for heads in (s.heads, s.kv_heads)
        )
        self.q_norm = (
            HeadNorm(q_features * s.head_dim, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        )
        self.k_norm = (
            HeadNorm(k_features * s.head_dim, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        )
        self.position = Modifiers(choice, s.heads)

    def queries(self, x: Tensor) -> Tensor:
        """(B, K, C) → (B, H, K, D)."""
        return self._normalized(self.q_norm, self.wq(x), self.heads)

    def keys(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self._normalized(self.k_norm, self.wk(x), self.kv_heads)

    def values(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self._split(self.wv(x), self.kv_heads)

    def normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Projected q (B, H, T, D) and k (B, G, T, D) with their norms."""

        def of(norm: nn.Module, x: Tensor) -> Tensor:
            return (
                self._split(norm(x.transpose(1, 2).flatten(2)), x.shape[1])
                if self.joint_norm
                else norm(x)
            )

        return of(self.q_norm, q), of(self.k_norm, k)

    def joined(self, heads: Tensor) -> Tensor:
        """(B, H, K, D) → (B, K, C)."""
        return self.wo(heads.transpose(1, 2).flatten(2))

    def _normalized(self, norm: nn.Module, x: Tensor, heads: int) -> Tensor:
        return self._split(norm(x), heads) if self.joint_norm else norm(self._split(x, heads))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class Attention(Projection):
    """Softmax attention: projects, updates the cache and attends. The plan defines the attention
    pattern."""

    def make_cache(
        self,
        index: CacheIndex | None,
        dtype: torch.dtype,
    ) -> LayerCache:
        """An empty cache for this layer."""
        assert index is not None
        return LayerCache(index, dtype)

    def forward(
        self,
        x: Tensor,
        step: AttentionPass,
        layer_cache: KeyCache | None,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        plan, k, v = self.project(x, step, layer_cache)
        if layer_cache is not None:
            k, v = layer_cache.append(k, v)  # (B, G, S, ·)
        return self.attend(x, step, plan, k, v, hook)

    def project(
        self, x: Tensor, step: AttentionPass, layer_cache: KeyCache | None
    ) -> tuple[AttentionPlan, Tensor, Tensor]:
        """The plan for the layer input x (B, T, C), new keys as they are cached (B, G, T, ·), and
        values (B, G, T, D)."""
        plan = step.plan.bind(x, layer_cache)
        return plan, plan.write(self.keys(x)), self.values(x)

    def attend(
        self,
        x: Tensor,
        step: AttentionPass,
        plan: AttentionPlan,
        k: Tensor,
        v: Tensor,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """(B, K, C) for the K queries of the pass, with all keys and values (B, G, S, ·)."""
        context = step.context
        x = context.of_queries(x)
        if x.shape[1] == 0:  # the pass only fills the cache
            return x
        views = self.views(plan, self.queries(x), k, context, step.factors)
        sink = self.position.sink_logits(x.device)
        out = attend(views, v, self.scale, sink=sink)
        if hook is not None:
            hook(views, v, self.scale, sink, out)
        return self.joined(out)

    def views(
        self,
        plan: AttentionPlan,
        q: Tensor,
        k: Tensor,
        context: AttentionContext,
        factors: Tensor | None,
    ) -> list[AttentionView]:
        """The plan's views of the queries (B, H, K, D), with the temperature."""
        if factors is not None and factors.shape[2] > 1:
            factors = context.of_queries(factors, dim=2)
        if plan.linear:
            return plan.read(self.position.scale_queries(q, factors), k)
        views = plan.read(q, k)
        if factors is None and self.position.scale is None:
            return views
        return [replace(view, q=self.position.scale_queries(view.q, factors)) for view in views]

    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token without the projections: 12·H·D per visible key, averaged over a
        causal (windowed) sequence."""
        window = min(self.position.settings.window or length, length)
        return 12 * self.heads * self.head_dim * (window - window * (window - 1) / (2 * length))
