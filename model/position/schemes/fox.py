"""FoX: forgetting attention, a content-dependent decay between two tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention.mask import AttentionMask, AttentionView, mask_dtype, precise
from model.position.base import AttentionContext, ContentPlan, HeadGeometry, PositionalScheme
from model.position.content import ContentSettings, drawn, latest, linear, running_sum
from model.position.schemes.alibi import alibi_slopes
from model.position.schemes.rope import Rope, RopeSettings, rotate
from model.position.token_positions import TokenPositions


class FoxSettings(ContentSettings):
    """Forget gates computed from each token (FoX, Lin et al. 2025)."""

    test_time = ContentSettings.test_time | {"theta"}

    name: Literal["fox"] = "fox"
    gate: Literal["linear", "constant", "fixed"] = Field(
        "linear",
        description="computed from each token; a learned constant per head, initialised as in ALiBi; or the "
        "fixed ALiBi slopes",
    )
    rotary: bool = Field(False, description="also apply RoPE")
    theta: float = Field(10_000.0, gt=1, description="base of the RoPE frequencies with rotary")


class Fox(PositionalScheme):
    """logit += c_n − c_m, c_n = Σ_{t≤n} ln σ(w_h·x_t + β_h), after the 1/√D scale; 0 for n = m.

    Lin et al. 2025, forgetting transformer (arXiv:2503.02130); Cable (arXiv:2503.08067), whose gate is
    −softplus(w_h·x + β_h), is the same with w and β negated. A constant gate is ALiBi with slope −ln σ(β).
    One gate per query head; positions are used with `rotary` only. Tested against the formula in loops;
    compared once with FLA's `naive_forgetting_attn`: outputs agree to 1e-6 in float32, also with a window.
    """

    cached_form: ClassVar[str] = "plain (or rotated) keys and cumulative log gates"
    settings: FoxSettings

    def __init__(self, settings: FoxSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        kind, heads = settings.gate, geometry.heads
        self.weight = nn.Parameter(torch.empty(heads, geometry.dim)) if kind == "linear" else None
        self.bias = nn.Parameter(torch.empty(heads)) if kind != "fixed" else None
        rope = RopeSettings.model_validate({"theta": settings.theta})
        self._rope = Rope(rope, geometry) if settings.rotary else None
        self._slopes: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # (1, H)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """Linear gates start near σ(0) = ½: w is N(0, 1/(100·C)), β 0. Constant gates start as in ALiBi."""
        if self.weight is not None:
            drawn(self.weight, 0.1 * self.geometry.dim**-0.5, generator)
        if self.bias is not None:
            with torch.no_grad():
                slopes = alibi_slopes(self.geometry.heads)  # σ(β) = e^−slope
                self.bias.copy_(-slopes.expm1().log() if self.weight is None else torch.zeros_like(slopes))

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(1, H) slopes of the fixed gate, and the rotation's cos and sin."""
        key = (positions.position.device, dtype)
        if key not in self._slopes:
            self._slopes[key] = alibi_slopes(self.geometry.heads).to(*key)[None]
        turns = () if self._rope is None else self._rope.tables(positions, dtype)
        return (self._slopes[key], *turns)

    def log_gates(self, x: Tensor, slopes: Tensor) -> Tensor:
        """(B, T, H) log forget gates of the tokens x (B, T, C)."""
        if self.weight is not None:
            return F.logsigmoid(linear(x, self.weight, self.bias))
        gate = -slopes[0] if self.bias is None else F.logsigmoid(self.bias.to(x.dtype))
        return gate.expand(*x.shape[:2], -1)

    def plan(self, context: AttentionContext) -> ContentPlan:
        slopes, turns = context.tables[0], context.tables[1:]

        def compute_extras(x: Tensor, past: Tensor | None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                # Cache the sum, not the gates, sufficient after eviction. In float64, because float32
                # cannot resolve single gates after 50,000 tokens.
                gates = self.log_gates(precise(x), slopes).double()
                return running_sum(gates, latest(past), context.new)

        def write(k: Tensor, extras: Tensor) -> Tensor:
            return rotate(k, turns[0], turns[1], "half") if turns else k

        def read(q: Tensor, k: Tensor, extras: Tensor) -> list[AttentionView]:
            if turns:
                q = rotate(q, context.of_queries(turns[0]), context.of_queries(turns[1]), "half")
            return [AttentionView(q, k, self._pairs(context, extras, mask_dtype(q)))]

        return ContentPlan(compute_extras, read, write)

    def _pairs(self, context: AttentionContext, extras: Tensor, dtype: torch.dtype) -> AttentionMask:
        # Integer and fractional parts, so that float32 differences are exact to 1e-7.
        sums = extras.transpose(1, 2)  # (B, H, S)
        whole = sums.detach().floor()
        k_whole, k_rest = whole.to(dtype), (sums - whole).to(dtype)
        q_whole, q_rest = context.of_queries(k_whole, 2), context.of_queries(k_rest, 2)

        def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (q_whole[b, h, i] - k_whole[b, h, j]) + (q_rest[b, h, i] - k_rest[b, h, j])

        return context.pairs(bias=bias, by_row=True)
