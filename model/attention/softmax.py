"""The projections shared by all token mixers, and softmax attention."""

from __future__ import annotations

from torch import Tensor, nn

from model.attention.kernels import AttentionHook, attend
from model.cache import LayerCache
from model.position import AttentionContext, AttentionPlan, ContentPlan, Modifiers, PositionSettings
from model.settings import ModelSettings


class HeadNorm(nn.RMSNorm):
    """RMSNorm over head_dim in the dtype of the weight, which the fused kernel requires under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Projection(nn.Module):
    """The projections of a token mixer, the same for softmax and linear attention."""

    def __init__(self, s: ModelSettings, choice: PositionSettings):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.heads, s.kv_heads, s.head_dim
        self.scale = s.attention_scale
        self.wq = nn.Linear(s.dim, s.heads * s.head_dim, bias=False)
        self.wk = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=False)
        self.wv = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=False)
        self.wo = nn.Linear(s.heads * s.head_dim, s.dim, bias=False)
        self.q_norm = HeadNorm(s.head_dim, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(s.head_dim, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        self.position = Modifiers(choice, s.heads)

    def queries(self, x: Tensor) -> Tensor:
        """(B, K, C) → (B, H, K, D)."""
        return self.q_norm(self._split(self.wq(x), self.heads))

    def keys(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self.k_norm(self._split(self.wk(x), self.kv_heads))

    def values(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self._split(self.wv(x), self.kv_heads)

    def joined(self, heads: Tensor) -> Tensor:
        """(B, H, K, D) → (B, K, C)."""
        return self.wo(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class Attention(Projection):
    """Softmax attention: projects, updates the cache and attends. The plan defines the attention pattern."""

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        plan: AttentionPlan | ContentPlan,
        layer_cache: LayerCache | None,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of `context`."""
        bound = plan.bind(x, layer_cache)
        k, v = bound.write(self.keys(x)), self.values(x)  # (B, G, T, ·), (B, G, T, D)
        if layer_cache is not None:
            k, v = layer_cache.append(k, v)  # (B, G, S, ·)
        x = context.of_queries(x)
        if x.shape[1] == 0:  # the pass only fills the cache
            return x
        views = bound.read(self.queries(x), k)
        out = attend(views, v, self.scale, sink=bound.sink)
        if hook is not None:
            hook(views, v, self.scale, bound.sink, out)
        return self.joined(out)

    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token without the projections: 12·H·D per visible key, averaged over a causal
        (windowed) sequence."""
        window = min(self.position.settings.window or length, length)
        return 12 * self.heads * self.head_dim * (window - window * (window - 1) / (2 * length))
