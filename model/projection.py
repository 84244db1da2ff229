"""What every mixer of tokens has: projections to queries, keys and values, and one out of the heads."""

from __future__ import annotations

from torch import Tensor, nn

from model.position import Modifiers, PositionSettings
from model.settings import ModelSettings


class HeadNorm(nn.RMSNorm):
    """RMSNorm over a head's features: autocast gives bfloat16, the fused kernel wants the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Projection(nn.Module):
    """The weights of a mixer; the same for softmax and for linear attention."""

    def __init__(self, s: ModelSettings, choice: PositionSettings):
        super().__init__()
        self.heads, self.groups, self.features = s.heads, s.kv_heads, s.features
        self.scale = s.attention_scale
        self.wq = nn.Linear(s.dim, s.heads * s.features, bias=False)
        self.wk = nn.Linear(s.dim, s.kv_heads * s.features, bias=False)
        self.wv = nn.Linear(s.dim, s.kv_heads * s.features, bias=False)
        self.wo = nn.Linear(s.heads * s.features, s.dim, bias=False)
        self.q_norm = HeadNorm(s.features, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(s.features, eps=s.norm_eps) if s.qk_norm else nn.Identity()
        self.position = Modifiers(choice, s.heads)

    def queries(self, asked: Tensor) -> Tensor:
        """(B, K, C) → (B, H, K, D)."""
        return self.q_norm(self._split(self.wq(asked), self.heads))

    def keys(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self.k_norm(self._split(self.wk(x), self.groups))

    def values(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, G, T, D)."""
        return self._split(self.wv(x), self.groups)

    def joined(self, heads: Tensor) -> Tensor:
        """(B, H, K, D) → (B, K, C)."""
        return self.wo(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.features)).transpose(1, 2)
