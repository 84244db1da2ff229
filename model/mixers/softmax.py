"""Softmax attention, and the projections that it shares with linear attention."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from model.attention.explicit import query_block
from model.attention.kernels import AttentionHook, attend
from model.attention.mask import AttentionView, by_head
from model.cache import CachedTail, LayerCache
from model.mixers.mixer import AttentionPass, LayerKind, Mixer, MixerSettings
from model.position import AttentionPlan
from model.sharding import GatheredKeys


class AttentionMixer(MixerSettings):
    """Softmax attention."""

    scales_logits: ClassVar[bool] = True

    name: Literal["attention"] = "attention"


KeyCache = LayerCache | GatheredKeys


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys in the dtype of its weight: the fused kernel requires it under
    autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class KeyMixer(Mixer):
    """Base class of mixers that attend to cached keys with softmax weights."""

    has_attention_weights = True
    scale: float
    pair_features: int  # of a query, key and value that are multiplied for each pair

    def forward(self, x, step, layer_cache, hook=None):
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        plan, k, v = self.project(x, step, layer_cache)
        if layer_cache is not None:
            k, v = layer_cache.append(k, v)  # (B, G, S, ·)
        return self.attend(x, step, plan, k, v, hook)

    @abstractmethod
    def project(
        self,
        x: Tensor,
        step: AttentionPass,
        layer_cache: KeyCache | None,
    ) -> tuple[AttentionPlan, Tensor, Tensor]:
        """The plan for the layer input x (B, T, C), new keys as they are cached (B, G, T, ·), and
        values (B, G, T, ·)."""

    @abstractmethod
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

    def weighted(
        self,
        views: list[AttentionView],
        v: Tensor,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """The weighted values (B, H, K, ·)."""
        normalizer = self.position.normalizer(v.device)
        out = attend(views, v, self.scale, normalizer=normalizer)
        if hook is not None:
            hook(views, v, self.scale, normalizer, out)
        return out

    def pair_flops(self, length):
        """Training FLOPs per token without the projections: six per feature and visible key,
        averaged over a causal (windowed) sequence."""
        window = min(self.position.settings.window or length, length)
        visible = window - window * (window - 1) / (2 * length)
        return 6 * self.heads * self.pair_features * visible

    def workspace(self, batch, tokens, length, blocks):
        queries = min(tokens, query_block(batch * self.heads, length))
        # Keys and values are repeated for every head too; masks by distance are only vectors.
        per_key = blocks * queries + (self.pair_features if blocks else 0) + 8
        return batch * self.heads * length * per_key


class Projection(Mixer):
    """The projections of a token mixer, the same for softmax and linear attention.

    With a gate, the heads' outputs are multiplied by sigmoid(x Wg) of the layer input x before the
    output projection: one number per head or per channel. Qiu et al. 2025 (arXiv:2505.06708).
    """

    has_gate = True

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        self.scale = kind.attention_scale
        self.pair_features = 2 * kind.head_dim
        # features of each key that are those of the previous token
        self.shifted_features = round(kind.position.shifted_keys * kind.head_dim)
        self.joint_norm = kind.qk_norm == "all_heads"
        bias = kind.attention_bias != "none"
        of_queries = kind.heads * kind.head_dim
        of_keys = kind.kv_heads * kind.head_dim
        self.wq = nn.Linear(kind.dim, of_queries, bias=bias)
        self.wk = nn.Linear(kind.dim, of_keys, bias=bias)
        self.wv = nn.Linear(kind.dim, of_keys, bias=bias)
        self.wo = nn.Linear(of_queries, kind.dim, bias=kind.attention_bias == "all")
        self.q_norm = self._norm(kind, kind.heads)
        self.k_norm = self._norm(kind, kind.kv_heads)
        self.v_norm: nn.Module = nn.Identity()
        if kind.value_norm:
            self.v_norm = nn.RMSNorm(kind.head_dim, kind.norm_eps, elementwise_affine=False)
        self.wg = None
        if kind.gate != "none":
            gates = kind.heads if kind.gate == "head" else of_queries
            self.wg = nn.Linear(kind.dim, gates, bias=False)
        self.position = kind.modifiers()

    def _norm(self, kind: LayerKind, heads: int) -> nn.Module:
        """The norm of the queries or keys of this number of heads."""
        if not kind.qk_norm:
            return nn.Identity()
        return HeadNorm(kind.head_dim * (heads if self.joint_norm else 1), eps=kind.norm_eps)

    def joined(self, heads: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs (B, H, K, D) for the inputs x (B, K, C) → (B, K, C)."""
        mixed = heads.transpose(1, 2).flatten(2)
        if self.wg is not None:
            mixed = self.gated(mixed, self.wg(x))
        return self.wo(mixed)

    def gated(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """The heads' outputs (..., H·D) times the sigmoid of (..., H or H·D)."""
        if gates.shape[-1] < mixed.shape[-1]:
            gates = gates.repeat_interleave(self.head_dim, dim=-1)
        return mixed * gates.sigmoid()

    def normalized(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Projected queries or keys (B, T, heads·D) by head, with their norm: (B, heads, T, D)."""
        return self.split(norm(x)) if self.joint_norm else norm(self.split(x))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads·D) → (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Attention(KeyMixer, Projection):
    """Softmax attention: projects, updates the cache and attends. The plan defines the attention
    pattern."""

    def project(self, x, step, layer_cache):
        plan = step.plan.bind(x, layer_cache)
        k = self.normalized(self.k_norm, self.wk(x))
        v = self.v_norm(self.split(self.wv(x)))
        return plan, plan.write(self.shifted(k, step, layer_cache)), v

    def shifted(self, k: Tensor, step: AttentionPass, layer_cache: KeyCache | None) -> Tensor:
        """New keys (B, G, T, D), some of whose features are those of the previous token; see
        `PositionSettings`. The first token of a document keeps its own."""
        count = self.shifted_features
        if count == 0:
            return k
        kept, moved = k.tensor_split([self.head_dim - count], dim=-1)
        tail = layer_cache or CachedTail()
        both = tail.extend(moved.transpose(1, 2).flatten(2), 1)  # (B, 1 + T, G·n)
        earlier = by_head(both[:, :-1], self.kv_heads)
        has_earlier = step.context.new.order > 0
        moved = torch.where(has_earlier[:, None, :, None], earlier, moved)
        return torch.cat([kept, moved], dim=-1)

    def attend(self, x, step, plan, k, v, hook=None):
        x = step.context.of_queries(x)
        if x.shape[1] == 0:  # the pass only fills the cache
            return x
        q = self.normalized(self.q_norm, self.wq(x))
        views = self.views(plan, q, k, step, x)
        return self.joined(self.weighted(views, v, hook), x)

    def views(
        self,
        plan: AttentionPlan,
        q: Tensor,
        k: Tensor,
        step: AttentionPass,
        x: Tensor,
    ) -> list[AttentionView]:
        """The plan's views of the queries (B, H, K, D), with the temperature of the inputs x (B, K,
        C)."""

        def scaled(q: Tensor) -> Tensor:
            return self.position.scale_queries(q, step.factors, x)

        if plan.linear:
            return plan.read(scaled(q), k)
        return [replace(view, q=scaled(view.q)) for view in plan.read(q, k)]

    def cached_numbers(self, tokens, key_features):
        tail = self.kv_heads * self.shifted_features
        return tokens * self.kv_heads * (key_features + self.head_dim) + tail
