"""Forgetting attention: a decay along the path between two tokens, read from the tokens themselves."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.pairs import Pairs, View, mask_dtype, precise
from model.position.alibi import alibi_slopes
from model.position.base import ContentPlan, Geometry, Position, Span
from model.position.content import ContentSettings, drawn, latest, linear, running_sum
from model.position.places import Places
from model.position.rotary import Rope, RopeSettings, rotate


class FoxSettings(ContentSettings):
    """Each token says how much of what came before it is forgotten (FoX, Lin et al. 2025)."""

    test_time = ContentSettings.test_time | {"theta"}

    name: Literal["fox"] = "fox"
    gate: Literal["linear", "constant", "fixed"] = Field(
        "linear",
        description="read from each token; a learned number for each head, which starts as ALiBi's; or "
        "ALiBi's and never learned",
    )
    rotary: bool = Field(False, description="queries and keys are rotated as well (RoPE)")
    theta: float = Field(10_000.0, gt=1, description="base of the rotation's frequencies, where rotary")


class Fox(Position):
    """logit += c_n − c_m, c_n = Σ_{t≤n} ln σ(w_h·x_t + β_h), after the 1/√D scale; 0 for the token itself.

    Lin et al. 2025, forgetting transformer (arXiv:2503.02130); Cable (arXiv:2503.08067), whose gate is
    −softplus(w_h·x + β_h), is the same with w and β negated. A constant gate is ALiBi with slope −ln σ(β).
    One gate for each query head; without rotation positions are not read. Checked against the formula in
    loops; run once beside FLA's `naive_forgetting_attn`, outputs agreed to 1e-6 in float32, windowed too.
    """

    remembers: ClassVar[str] = "plain (or rotated) keys and running log gates"
    settings: FoxSettings

    def __init__(self, settings: FoxSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        kind, heads = settings.gate, geometry.heads
        self.weight = nn.Parameter(torch.empty(heads, geometry.dim)) if kind == "linear" else None
        self.bias = nn.Parameter(torch.empty(heads)) if kind != "fixed" else None
        rope = RopeSettings.model_validate({"theta": settings.theta})
        self._rope = Rope(rope, geometry) if settings.rotary else None
        self._slopes: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # (1, H)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """Gates read from tokens start near σ(0) = ½: w is N(0, 1/(100·C)), β 0. Constant ones as ALiBi."""
        if self.weight is not None:
            drawn(self.weight, 0.1 * self.geometry.dim**-0.5, generator)
        if self.bias is not None:
            with torch.no_grad():
                slopes = alibi_slopes(self.geometry.heads)  # σ(β) = e^−slope
                self.bias.copy_(-slopes.expm1().log() if self.weight is None else torch.zeros_like(slopes))

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(1, H) slopes of the fixed gate, and the rotation's cos and sin."""
        key = (places.position.device, dtype)
        if key not in self._slopes:
            self._slopes[key] = alibi_slopes(self.geometry.heads).to(*key)[None]
        turns = () if self._rope is None else self._rope.tables(places, dtype)
        return (self._slopes[key], *turns)

    def log_gates(self, x: Tensor, slopes: Tensor) -> Tensor:
        """(B, T, H) ln of the share that each token leaves of what came before it; x is (B, T, C)."""
        if self.weight is not None:
            return F.logsigmoid(linear(x, self.weight, self.bias))
        gate = -slopes[0] if self.bias is None else F.logsigmoid(self.bias.to(x.dtype))
        return gate.expand(*x.shape[:2], -1)

    def plan(self, span: Span) -> ContentPlan:
        slopes, turns = span.tables[0], span.tables[1:]

        def note(x: Tensor, past: Tensor | None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                # The sum, not the gates: of tokens that are evicted nothing else need be known. In float64,
                # because after 50,000 tokens float32 has lost what tells one token from the next.
                gates = self.log_gates(precise(x), slopes).double()
                return running_sum(gates, latest(past), span.new)

        def write(k: Tensor, notes: Tensor) -> Tensor:
            return rotate(k, turns[0], turns[1], "half") if turns else k

        def read(q: Tensor, k: Tensor, notes: Tensor) -> list[View]:
            if turns:
                q = rotate(q, span.of_queries(turns[0]), span.of_queries(turns[1]), "half")
            return [View(q, k, self._pairs(span, notes, mask_dtype(q)))]

        return ContentPlan(note, read, write)

    def _pairs(self, span: Span, notes: Tensor, dtype: torch.dtype) -> Pairs:
        # Whole numbers and the rest, so that elementwise float32 differences are exact to 1e-7 as well.
        sums = notes.transpose(1, 2)  # (B, H, S)
        whole = sums.detach().floor()
        k_whole, k_rest = whole.to(dtype), (sums - whole).to(dtype)
        q_whole, q_rest = span.of_queries(k_whole, 2), span.of_queries(k_rest, 2)

        def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (q_whole[b, h, i] - k_whole[b, h, j]) + (q_rest[b, h, i] - k_rest[b, h, j])

        return span.pairs(bias=bias, by_row=True)
