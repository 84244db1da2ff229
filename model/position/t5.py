"""T5's relative positions: one learned number for each bucket of distances and head."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from model.errors import ModelError
from model.pairs import View, precise
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places


class T5Settings(PositionSettings):
    """A learned bias for each bucket of distances and head (Raffel et al. 2019)."""

    test_time = PositionSettings.test_time | {"max_distance"}

    name: Literal["t5"] = "t5"
    buckets: int = Field(32, ge=2, description="rows of the table; the first half hold one distance each")
    max_distance: int = Field(
        128,
        ge=1,
        le=1_000_000,
        description="all distances from here on are in the last bucket; must exceed buckets / 2",
    )
    shared: bool = Field(True, description="one table for all layers")
    unscaled: bool = Field(
        False, description="compare by q·k without the factor 1/√D, as T5, whose queries start smaller by it"
    )

    @model_validator(mode="after")
    def _far_buckets_have_distances(self):
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance {self.max_distance} must exceed {self.buckets // 2}, half of buckets: the "
                f"first half hold one distance each; raise max_distance or lower buckets"
            )
        return self

    @property
    def per_layer(self) -> bool:
        return not self.shared


def bucket_of(distance: int, buckets: int, max_distance: int) -> int:
    """d below E = ⌊buckets/2⌋, then E + ⌊ln(d/E) / ln(max_distance/E) · (buckets − E)⌋ up to buckets − 1."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


class T5(Position):
    """logit += table[bucket(d), h], after the 1/√D scale; distances below buckets/2 have a bucket each, the
    others share the rest by logarithm. Raffel et al. 2019 (arXiv:1910.10683), section 2.1; released code,
    `bidirectional=False`.

    Keys ahead count as distance 0. Buckets are looked up in a table of integers, made in float64. T5 has one
    table for all layers and no 1/√D: ``shared`` and ``unscaled``. Real-valued positions are refused.
    """

    takes_fractions: ClassVar[bool] = False
    settings: T5Settings

    def __init__(self, settings: T5Settings, geometry: Geometry):
        super().__init__(settings, geometry)
        s = settings
        self.weight = nn.Parameter(torch.empty(s.buckets, geometry.heads))
        found = [bucket_of(d, s.buckets, s.max_distance) for d in range(s.max_distance + 1)]
        self._buckets = torch.tensor(found)[None]
        self._copies: dict[torch.device, Tensor] = {}  # moving them waits for a GPU

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """N(0, 1/C), as T5's own."""
        drawn = torch.randn(self.weight.shape, generator=generator) * self.geometry.dim**-0.5
        with torch.no_grad():
            self.weight.copy_(drawn)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(1, max_distance + 1) the bucket of each distance."""
        if places.position.is_floating_point():
            raise ModelError(
                "position scheme 't5' has buckets for whole distances only, and was given real-valued "
                "positions: give integer positions, or train another scheme"
            )
        device = places.position.device
        if device not in self._copies:
            self._copies[device] = self._buckets.to(device)
        return (self._copies[device],)

    def plan(self, span: Span) -> Plan:
        (buckets,), weight, last = span.tables[0], precise(self.weight), self.settings.max_distance
        pairs = span.pairs(distance=lambda h, d: weight[buckets[d.clamp(0, last)], h])
        root = self.geometry.head_dim**0.5 if self.settings.unscaled else 1.0
        return Plan(read=lambda q, k: [View(q if root == 1.0 else q * root, k, pairs)])
