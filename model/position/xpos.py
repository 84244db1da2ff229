"""Rotation with a decay that is factored into queries and keys."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from model.pairs import View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places
from model.position.rotary import check_even, rotate
from model.position.scaling import plain_frequencies
from model.position.table import Table

# Natural logarithm of the largest factor on a key. float32 and bfloat16 end at e^±87; the rest is left to
# the keys themselves and, on the way back, to gradients that meet the query's factor of e^−64.
LARGEST = 64.0


class XPosSettings(PositionSettings):
    """Rotary positions with an exponential decay of their own for each pair (Sun et al. 2022)."""

    test_time = PositionSettings.test_time | {"theta"}

    name: Literal["xpos"] = "xpos"
    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies b^(−2k/D)")
    layout: Literal["half", "interleaved"] = Field(
        "interleaved", description="which features form a pair: (2k, 2k + 1) or (k, k + D/2)"
    )
    gamma: float = Field(0.4, gt=0, description="γ of ζ_k = (2k + γD) / ((1 + γ)D): more decays less")
    scale_base: float = Field(512.0, gt=0, description="S: after this distance pair k has decayed to ζ_k")


class XPos(Position):
    """xPos: q_n → ζ^(n/S) R(nθ) q_n, k_m → ζ^(−m/S) R(mθ) k_m, so that pair k's share of the score is RoPE's
    times ζ_k^(d/S), ζ_k = (2k + γD)/((1 + γ)D). Sun et al. 2022 (arXiv:2212.10554), algorithm 1, γ = 0.4.

    The origin of positions is fixed at 0. The released code puts it at minus half the current length: the
    scores are the same, but there a remembered key would have to change as the text grows. The price is
    range: a key's factor grows to ζ_0^(−m/S), which float32 and bfloat16 hold up to e^87. Positions end where
    it reaches e^64 (26,156 at the default S and γ); a larger S, trained with, moves the end in proportion.
    """

    remembers: ClassVar[str] = "rotated and scaled keys"
    settings: XPosSettings

    def __init__(self, settings: XPosSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        self._table = Table(self._rows)

    def _log_zeta(self) -> Tensor:
        """(R,) float64 ln ζ_k / S: growth of a query's factor from token to token."""
        dims, gamma = self.geometry.head_dim, self.settings.gamma
        zeta = (torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims + gamma) / (1 + gamma)
        return zeta.log() / self.settings.scale_base

    @property
    def limit(self) -> int | None:
        zeta = self.settings.gamma / (1 + self.settings.gamma)
        return 1 + math.floor(LARGEST * self.settings.scale_base / -math.log(zeta))

    def _rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        """cos and sin (..., R) as a query has them, and as a key."""
        angles = positions[..., None] * plain_frequencies(self.settings.theta, self.geometry.head_dim)
        scale = (positions[..., None] * self._log_zeta()).exp()
        cos, sin = angles.cos(), angles.sin()
        return cos * scale, sin * scale, cos / scale, sin / scale

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._table.look_up(places.position, places.reach, dtype)

    def plan(self, span: Span) -> Plan:
        q_cos, q_sin = (span.of_queries(x) for x in span.tables[:2])
        k_cos, k_sin = span.tables[2:]
        layout, pairs = self.settings.layout, span.pairs()

        def read(q: Tensor, k: Tensor) -> list[View]:
            return [View(rotate(q, q_cos, q_sin, layout), k, pairs)]

        return Plan(read, lambda k: rotate(k, k_cos, k_sin, layout))
