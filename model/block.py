"""One layer of the decoder: a mixer of tokens and a SwiGLU, each behind a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.cache import LayerMemory, LinearMemory
from model.kernels import Watch, attend
from model.linear_attention import LinearAttention
from model.position import ContentPlan, Plan, PositionSettings, Span
from model.projection import Projection
from model.settings import ModelSettings


class Attention(Projection):
    """Projects, remembers, attends. What is compared with what is the plan's business."""

    def forward(
        self,
        x: Tensor,
        span: Span,
        plan: Plan | ContentPlan,
        memory: LayerMemory | None,
        watch: Watch | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the span's K queries."""
        bound = plan.bind(x, memory)
        k, v = bound.write(self.keys(x)), self.values(x)  # (B, G, T, ·), (B, G, T, D)
        if memory is not None:
            k, v = memory.append(k, v)  # (B, G, S, ·)
        asked = span.of_queries(x)
        if asked.shape[1] == 0:  # only keys and values were wanted
            return asked
        views = bound.read(self.queries(asked), k)
        out = attend(views, v, self.scale, sink=bound.sink)
        if watch is not None:
            watch(views, v, self.scale, bound.sink, out)
        return self.joined(out)

    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token beside the matrices: 12·H·D per key seen, averaged over a causal
        (windowed) sequence."""
        window = min(self.position.settings.window or length, length)
        return 12 * self.heads * self.features * (window - window * (window - 1) / (2 * length))


MIXERS: dict[str, type[Attention] | type[LinearAttention]] = {
    "attention": Attention,
    "linear": LinearAttention,
}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)). Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Norm(nn.RMSNorm):
    """RMSNorm whose weight follows its input: under FSDP2 blocks may hold bfloat16 weights beside a float32
    residual stream, and the fused kernel takes only one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """Pre-norm residual block.

    Attributes:
        recompute: keep only the input of a training pass and compute the rest again in the backward pass.
    """

    def __init__(self, s: ModelSettings, choice: PositionSettings):
        super().__init__()
        self.attention_norm = Norm(s.dim, eps=s.norm_eps)
        self.attention = MIXERS[s.mixer.name](s, choice)
        self.mlp_norm = Norm(s.dim, eps=s.norm_eps)
        self.mlp = SwiGLU(s.dim, s.mlp_width)
        self.recompute = False
        self._compiled: Callable[..., Tensor] | None = None

    @property
    def apart(self) -> bool:
        """Whether training passes of this block share nothing they make with other blocks."""
        return self.recompute or self._compiled is not None

    def compile(self, **options) -> None:
        """Compile the training pass of this block alone, inside whatever hooks stand around its call."""
        self._compiled = torch.compile(self._forward, **options)

    def forward(
        self,
        x: Tensor,
        span: Span,
        plan: Plan | ContentPlan,
        factors: Tensor | None,
        memory: LayerMemory | LinearMemory | None,
        watch: Watch | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C), K the span's queries; with K = 0 only keys and values are written.

        `factors` (B or 1, T or 1) are those of the logit temperature, `plan` is without them.
        """
        run = self._compiled if self._compiled and self.training else self._forward
        args = x, span, plan, factors, memory, watch
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return run(*args)

    def _forward(
        self,
        x: Tensor,
        span: Span,
        plan: Plan | ContentPlan,
        factors: Tensor | None,
        memory: LayerMemory | LinearMemory | None,
        watch: Watch | None,
    ) -> Tensor:
        plan = self.attention.position(plan, span, factors)
        x = span.of_queries(x) + self.attention(self.attention_norm(x), span, plan, memory, watch)
        if x.shape[1] == 0:
            return x
        return x + self.mlp(self.mlp_norm(x))
