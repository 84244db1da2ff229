"""Softmax attention, and the projections that it shares with linear attention."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.kernels import AttentionHook, attend, query_block
from model.attention.mask import AttentionView, by_head, repeated
from model.cache import CachedTail, LayerCache
from model.mixers.mixer import AttentionPass, LayerKind, Mixer, MixerSettings
from model.mixers.short_convolution import Canon
from model.position import AttentionPlan
from model.position.interface import constant
from model.sharding import GatheredKeys
from settings.fields import counts_if_changed


class AttentionMixer(MixerSettings):
    """Softmax attention.

    `exclusive` is XSA (Zhai 2026, arXiv:2603.09078): each head's output y of a token with value v
    becomes y − a·(y·v)/|v|²·v, with a = 1 as in the paper, or a = tanh(α), α learned per head from
    0, as in the record of modded-nanogpt (2026-04-29).
    """

    scales_logits: ClassVar[bool] = True

    name: Literal["attention"] = "attention"
    exclusive: Literal["none", "full", "learned"] = counts_if_changed(
        "subtract each output's component along the token's own value: all of it, or a "
        "learned share per head",
        "none",
    )

    def describe(self):
        return "" if self.exclusive == "none" else "exclusive attention"


KeyCache = LayerCache | GatheredKeys


class ProjectedTokens(NamedTuple):
    """The projections of the tokens of a pass in a layer with keys.

    Attributes:
        plan: the attention plan for the layer input.
        q: (B, ·, K, ·) projected queries.
        k: (B, G, T, ·) new keys as they are cached.
        v: (B, G, T, ·) values.
    """

    plan: AttentionPlan
    q: Tensor
    k: Tensor
    v: Tensor


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys in the dtype of its weight: the fused kernel requires it under
    autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class KeyMixer(Mixer):
    """Base class of mixers that attend to cached keys with softmax weights."""

    has_attention_weights = True
    scale: float
    pair_features: int  # features of query, key and value multiplied for each pair

    def forward(self, x, step, layer_cache, hook=None):
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        own = self.project(x, step, layer_cache)
        k, v = own.k, own.v
        if layer_cache is not None:
            k, v = layer_cache.append(k, v)  # (B, G, S, ·)
        return self.attend(x, step, own, k, v, hook)

    @abstractmethod
    def project(
        self,
        x: Tensor,
        step: AttentionPass,
        layer_cache: KeyCache | None,
    ) -> ProjectedTokens:
        """The projections of the layer input x (B, T, C)."""

    @abstractmethod
    def attend(
        self,
        x: Tensor,
        step: AttentionPass,
        own: ProjectedTokens,
        k: Tensor,
        v: Tensor,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """The output (B, K, C) for the K queries of the pass, with all keys and values (B, G, S,
        ·)."""

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
        # number of features of each key that are taken from the previous token
        self.shifted_features = round(kind.position.shifted_keys * kind.head_dim)
        self.joint_norm = kind.qk_norm == "all_heads"
        bias = kind.attention_bias != "none"
        of_outputs = kind.heads * kind.head_dim
        self.query_heads = kind.heads // kind.position.heads_per_query
        of_queries = self.query_heads * kind.head_dim
        of_keys = kind.kv_heads * kind.head_dim
        self.wq = nn.Linear(kind.dim, of_queries, bias=bias)
        self.wk = nn.Linear(kind.dim, of_keys, bias=bias)
        self.wv = nn.Linear(kind.dim, of_keys, bias=bias)
        self.wo = nn.Linear(of_outputs, kind.dim, bias=kind.attention_bias == "all")
        self.q_norm = self._norm(kind, self.query_heads)
        self.k_norm = self._norm(kind, kind.kv_heads)
        self.v_norm: nn.Module = nn.Identity()
        if kind.value_norm:
            self.v_norm = nn.RMSNorm(kind.head_dim, kind.norm_eps, elementwise_affine=False)
        self.wg = None
        if kind.gate != "none":
            gates = kind.heads if kind.gate == "head" else of_outputs
            self.wg = nn.Linear(kind.dim, gates, bias=False)
        self.position = kind.modifiers()

    def _norm(self, kind: LayerKind, heads: int) -> nn.Module:
        """The norm for queries or keys of this number of heads."""
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

    shares_queries = True
    mixer: AttentionMixer

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        is_learned = self.mixer.exclusive == "learned"
        self.exclusion = nn.Parameter(torch.empty(kind.heads)) if is_learned else None
        widths = [linear.out_features for linear in (self.wq, self.wk, self.wv)]
        has_canon = "B" in kind.canon
        self.canon = Canon("B", sum(widths), kind.canon_width) if has_canon else None

    @property
    def initial_values(self):
        return {} if self.exclusion is None else {"exclusion": constant(0.0)}

    def excluding(self, out: Tensor, own: Tensor) -> Tensor:
        """The heads' outputs (B, H, K, D) without their components along the values of the same
        tokens (B, G, K, D)."""
        if self.mixer.exclusive == "none":
            return out
        unit = F.normalize(repeated(own, self.heads), dim=-1)
        component = (out * unit).sum(-1, keepdim=True) * unit
        if self.exclusion is not None:
            component = component * self.exclusion.tanh()[:, None, None].to(out.dtype)
        return out - component

    def project(self, x, step, layer_cache):
        plan = step.plan.bind(x, layer_cache)
        context = step.context
        read = x if self.canon is not None else context.of_queries(x)
        k = self.normalized(self.k_norm, self.wk(x))
        v = self.split(self.wv(x))
        q = self.normalized(self.q_norm, self.wq(read))
        if self.canon is not None:
            heads = [part.shape[1] for part in (q, k, v)]
            joint = torch.cat([q, k, v], dim=1).transpose(1, 2).flatten(2)
            joint = by_head(self.canon(joint, context, layer_cache), sum(heads))
            q, k, v = joint.split(heads, dim=1)
            q = context.of_queries(q, dim=2)
        k = plan.write(self.shifted(k, step, layer_cache))
        return ProjectedTokens(plan, q, k, self.v_norm(v))

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

    def attend(self, x, step, own, k, v, hook=None):
        x = step.context.of_queries(x)
        if x.shape[1] == 0:  # the pass only fills the cache
            return x
        views = self.views(own.plan, own.q, k, step, x)
        out = self.weighted(views, v, hook)
        return self.joined(self.excluding(out, step.context.of_queries(own.v, dim=2)), x)

    def views(
        self,
        plan: AttentionPlan,
        q: Tensor,
        k: Tensor,
        step: AttentionPass,
        x: Tensor,
    ) -> list[AttentionView]:
        """The plan's views of the projected queries (B, ·, K, D), with the temperature of the
        inputs x (B, K, C)."""
        q = repeated(q, self.heads)

        def scaled(q: Tensor) -> Tensor:
            return self.position.scale_queries(q, step.factors, x)

        if plan.linear:
            return plan.read(scaled(q), k)
        return [replace(view, q=scaled(view.q)) for view in plan.read(q, k)]

    def cached_numbers(self, tokens, key_features):
        tail = self.kv_heads * self.shifted_features
        return tokens * self.kv_heads * (key_features + self.head_dim) + tail
