"""The part of sinusoidal embeddings' inner product that knows distance alone, as a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from model.position.base import Geometry, Span
from model.position.bias import DistanceBias, DistanceSettings, RowBias
from model.position.places import Places
from model.position.scaling import plain_frequencies
from model.position.table import Rows, StretchedTables

SMALLEST_TABLE = 512  # distances; doubled from there, so that lengths share their tables' shapes


class SandwichSettings(DistanceSettings):
    """The inner product of two sinusoidal embeddings, as a bias (Chi et al. 2022)."""

    name: Literal["sandwich"] = "sandwich"
    dims: int = Field(128, ge=2, le=65_536, multiple_of=2, description="width d̄ of the sinusoidal embeddings")


class Sandwich(DistanceBias):
    """logit += c_h · Σ_{k < d̄/2} cos(d·10000^(−2k/d̄) / s), c_h = H / (8(h + 1)), h from 0.

    Chi et al. 2022 (arXiv:2212.10356), section 5. Nothing is learned. Unlike ALiBi's it is bounded, so that
    far keys are never fully cut off. The head factor c_h was compared with attention-gym's code alone
    (`attn_gym/mods/sandwich.py`), not with the paper's text.
    """

    settings: SandwichSettings

    def __init__(self, settings: SandwichSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._theta = plain_frequencies(10_000.0, settings.dims)
        self._sums = StretchedTables(self._rows)
        heads = geometry.heads
        self._factors = heads / (8.0 * torch.arange(1, heads + 1, dtype=torch.float64))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # moving them waits for a GPU

    def _sum(self, d: Tensor) -> Tensor:
        """Σ_k cos(d θ_k), one frequency after the other: tables of a million distances stay small."""
        total = torch.zeros_like(d)
        for theta in self._theta.tolist():
            total = total + (d * theta).cos()
        return total

    def _rows(self, stretch: float) -> Rows:
        return lambda distances: (self._sum(distances / stretch),)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(B or 1, N) sums of the distances 0 to N − 1, made in float64; the factors (1, H); the stretches
        (B or 1,), for distances that are not whole."""
        device, stretches = places.position.device, self.stretches(places)
        size = max(SMALLEST_TABLE, 1 << (places.reach - 1).bit_length())
        distances = replace(places, position=torch.arange(size, device=device)[None], reach=size)
        (sums,) = self._sums.look_up(distances, list(stretches), dtype)
        if (device, dtype) not in self._copies:
            self._copies[device, dtype] = self._factors.to(device, dtype)[None]
        return (sums, self._copies[device, dtype], *super().tables(places, dtype))

    def bias(self, span: Span) -> RowBias:
        sums, (factors,), stretch = span.tables
        size, flat = sums.shape[1], sums.flatten()

        def bias(row: Tensor, h: Tensor, d: Tensor) -> Tensor:
            if d.is_floating_point():
                return factors[h] * self._sum(d / stretch[row])
            return factors[h] * flat[row * size + d.abs().clamp(max=size - 1)]

        return bias
