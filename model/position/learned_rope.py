"""Rotation by frequencies that are learned."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from model.pairs import View, mask_dtype
from model.position.base import Geometry, Plan, Position, Span
from model.position.rotary import check_even, rotate
from model.position.scaling import plain_frequencies
from model.position.shares import Share, SharedSettings, parameter, to_queries
from model.position.table import wide


class LearnedRopeSettings(SharedSettings):
    """Rotary positions whose frequencies are learned, from RoPE's on."""

    name: Literal["learned_rope"] = "learned_rope"
    theta: float = Field(10_000.0, gt=1, description="base b of the initial frequencies b^(−2k/D)")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="which features form a pair: (k, k + D/2) or (2k, 2k + 1)"
    )
    share: Share = Field(
        "model",
        description="who has frequencies of its own: the model, each layer, or each key/value head of each "
        "layer, which its query heads follow",
    )


class LearnedRope(Position):
    """RoPE with θ_k = exp(ω_k), ω learned from ln b^(−2k/D) on; Su's blog on learning θ (kexue.fm), and with
    `share: head` is also the plainest form of GRAPE (arXiv:2512.07805), whose other forms are not built.

    What is stored is ω_k − ln b^(−2k/D), 0 at the start: the same function with the same gradient, but RoPE
    exactly whatever the precision (ln θ in bfloat16 would be off by 3%).

    A learned frequency has no table: angles are computed in every pass, in float64 where the device has it,
    reduced to one turn and only then rounded. On devices without it angles at position n are off by n·6e-8
    radians, 0.06 at a million. The gradient of θ_k grows with positions. Keys are remembered rotated, so
    parameters may not change under a cache.
    """

    remembers: ClassVar[str] = "rotated keys"
    settings: LearnedRopeSettings

    def __init__(self, settings: LearnedRopeSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        self.log_ratio = parameter(settings.share, geometry, geometry.head_dim // 2)
        self._start = plain_frequencies(settings.theta, geometry.head_dim).tolist()

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        with torch.no_grad():
            self.log_ratio.zero_()

    def frequencies(self) -> Tensor:
        """(R,) or (G, R) θ in radians per token, in the device's widest float, with gradient."""
        dtype = wide(self.log_ratio.device)
        start = torch.tensor(self._start, dtype=dtype, device=self.log_ratio.device)
        return self.log_ratio.to(dtype).exp() * start

    def _turns(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, T, R) or (B or 1, G, T, R) at positions (B or 1, T)."""
        frequencies, position = self.frequencies(), position.to(wide(position.device))
        if frequencies.ndim == 2:
            frequencies, position = frequencies[:, None], position[:, None]
        angles = position[..., None] * frequencies
        dtype = mask_dtype(self.log_ratio)
        if dtype != angles.dtype:
            angles = torch.remainder(angles, 2 * math.pi).to(dtype)
        return angles.cos(), angles.sin()

    def plan(self, span: Span) -> Plan:
        cos, sin = self._turns(span.new.position)
        q_cos, q_sin = (to_queries(span.of_queries(x, dim=x.ndim - 2), self.geometry) for x in (cos, sin))
        layout, pairs = self.settings.layout, span.pairs()

        def read(q: Tensor, k: Tensor) -> list[View]:
            return [View(rotate(q, q_cos, q_sin, layout), k, pairs)]

        return Plan(read, lambda k: rotate(k, cos, sin, layout))
