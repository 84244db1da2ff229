"""Learned relative vectors beside keys and values."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.pairs import Block, View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places
from model.position.weighing import UNROLLED, distances, pairs_by_position, refuse_fractions


class ShawSettings(PositionSettings):
    """A learned vector for each clipped distance, added to the keys and optionally to the values
    (Shaw et al. 2018)."""

    name: Literal["shaw"] = "shaw"
    clip: int = Field(16, ge=0, description="K: farther keys share the vector of distance K")
    values: bool = Field(False, description="vectors are added to the values as well")
    shared: bool = Field(False, description="one table for all layers; false: each layer has its own")

    @property
    def per_layer(self) -> bool:
        return not self.shared


class Shaw(Position):
    """logit = q_n·(k_m + a_c)/√D and, with ``values``, output_n = Σ_m α_nm (v_m + b_c), c = min(n − m, K).
    Shaw, Uszkoreit, Vaswani 2018 (arXiv:1803.02155), equations 3 and 4, past side only.

    The heads share a and b (K + 1, D), drawn from N(0, 1/D). K cannot be changed after training. Sinks are at
    distance K like every key that is far.
    """

    takes_fractions: ClassVar[bool] = False
    exempt: ClassVar[dict[str, str]] = UNROLLED
    settings: ShawSettings

    def __init__(self, settings: ShawSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        shape = (settings.clip + 1, geometry.head_dim)
        self.key = nn.Parameter(torch.empty(shape))
        self.value = nn.Parameter(torch.empty(shape)) if settings.values else None

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        for weight in self.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
            with torch.no_grad():
                weight.copy_(drawn)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        refuse_fractions(places, self.settings.name)
        return ()

    def plan(self, span: Span) -> Plan:
        pairs = pairs_by_position(span)
        extra = None if self.value is None else self._extra
        return Plan(read=lambda q, k: [View(q, k, pairs, weigh=self._weigh, extra=extra)])

    def _weigh(self, block: Block) -> Tensor:
        rows = block.q @ self.key.to(block.q.dtype).T  # (B, H, t, K + 1)
        return block.softmax(
            block.scores + rows.gather(-1, distances(block, self.settings.clip)) * block.scale
        )

    def _extra(self, block: Block, weights: Tensor) -> Tensor:
        """Σ_m α_nm b_c: weights are summed by clipped distance first, so that no (t, s, D) is ever made."""
        assert self.value is not None
        index = distances(block, self.settings.clip)
        totals = weights.new_zeros(*weights.shape[:3], self.settings.clip + 1)
        return totals.scatter_add(-1, index, weights) @ self.value.to(weights.dtype)
