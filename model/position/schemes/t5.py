"""T5 relative positions: one learned bias per bucket of distances and head."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from model.attention.mask import AttentionView, precise
from model.position.interface import (
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
    normal,
)
from settings.fields import setting


class T5Settings(SharableSettings):
    """A learned bias per bucket of distances and head (Raffel et al. 2019)."""

    test_time = SharableSettings.test_time | {"max_distance"}

    name: Literal["t5"] = "t5"
    buckets: int = setting(
        32,
        "number of buckets; those of the first half have one distance each",
        ge=2,
    )
    max_distance: int = setting(
        128,
        "distances from here on are in the last bucket; must exceed buckets / 2",
        ge=1,
        le=1_000_000,
    )
    shared: bool = setting(True, "share the learned parameters between all layers")
    unscaled: bool = setting(
        False,
        "omit the factor 1/√D on q·k, as in T5, whose queries are initialized smaller",
    )

    @model_validator(mode="after")
    def _far_buckets_have_distances(self):
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance {self.max_distance} must exceed {self.buckets // 2}, half of "
                "buckets: the first half hold one distance each; raise max_distance or lower "
                "buckets"
            )
        return self


def bucket_of(distance: int, buckets: int, max_distance: int) -> int:
    """d below E = ⌊buckets/2⌋, then E + ⌊ln(d/E) / ln(max_distance/E) · (buckets − E)⌋ up to
    buckets − 1."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


class T5(PositionalScheme):
    """logit += table[bucket(d), h], after the 1/√D scale; distances below buckets/2 have one bucket
    each, larger ones share buckets on a logarithmic scale. Raffel et al. 2019 (arXiv:1910.10683),
    section 2.1; released code, `bidirectional=False`.

    Future keys use distance 0. Buckets are looked up in an integer table, computed in float64. T5
    shares the table between layers and has no factor 1/√D: ``shared`` and ``unscaled``. Positions
    must be integers.
    """

    supports_fractions = False
    settings: T5Settings

    def setup(self):
        s = self.settings
        geometry = self.geometry
        # as in T5
        self.weight = self.learned((s.buckets, geometry.heads), normal(geometry.dim**-0.5))
        buckets = [bucket_of(d, s.buckets, s.max_distance) for d in range(s.max_distance + 1)]
        self.constant_table(torch.tensor(buckets), keep_dtype=True)

    def plan(self, context):
        (buckets,) = context.tables  # (max_distance + 1,) bucket of each distance
        weight = precise(self.weight)
        last = self.settings.max_distance

        def bias(h: Tensor, d: Tensor) -> Tensor:
            return weight[buckets[d.clamp(0, last)], h]

        mask = context.distance_mask(bias, tabulate=True)
        if not self.settings.unscaled:
            return AttentionPlan.from_mask(mask)
        root = self.geometry.head_dim**0.5
        return AttentionPlan(read=lambda q, k: [AttentionView(q * root, k, mask)])
