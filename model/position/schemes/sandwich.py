"""Sandwich: the distance-dependent part of the inner product of sinusoidal embeddings, as a
bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from model.position.distance_bias import DistanceBias, DistanceSettings
from model.position.scaling import plain_frequencies
from model.position.table import Rows, StretchedTables
from settings.fields import setting

# minimum number of distances; doubled as needed, to limit the number of table shapes
SMALLEST_TABLE = 512


class SandwichSettings(DistanceSettings):
    """The inner product of two sinusoidal embeddings, as a bias (Chi et al. 2022)."""

    name: Literal["sandwich"] = "sandwich"
    dims: int = setting(128, "width d̄ of the sinusoidal embeddings", ge=2, le=65_536, multiple_of=2)


class Sandwich(DistanceBias):
    """logit += c_h · Σ_{k < d̄/2} cos(d·10000^(−2k/d̄) / s), c_h = H / (8(h + 1)), h from 0.

    Chi et al. 2022 (arXiv:2212.10356), section 5. No parameters. Unlike ALiBi, the bias is bounded,
    so distant keys keep some weight. The head factor c_h was verified with attention-gym's code
    only (`attn_gym/mods/sandwich.py`), not with the paper's text.
    """

    settings: SandwichSettings
    tabulate = False  # `tables` are by distance already

    def setup(self):
        super().setup()
        heads = self.geometry.heads
        self._theta = plain_frequencies(10_000.0, self.settings.dims)
        self._sums = StretchedTables(self._rows)
        self.constant_table(heads / (8.0 * torch.arange(1, heads + 1, dtype=torch.float64)))

    def _sum(self, d: Tensor) -> Tensor:
        """Σ_k cos(d θ_k), one frequency at a time, which limits memory for millions of
        distances."""
        total = torch.zeros_like(d)
        for theta in self._theta.tolist():
            total = total + (d * theta).cos()
        return total

    def _rows(self, stretch: float) -> Rows:
        return lambda distances: (self._sum(distances / stretch),)

    def tables(self, positions, dtype):
        """The stretches (B or 1,), for fractional distances; factors (H,); sums (B or 1, N) for
        distances 0 to N − 1, computed in float64."""
        device = positions.device
        stretches = self.stretches(positions)
        size = max(SMALLEST_TABLE, 1 << (positions.position_end - 1).bit_length())
        distances = replace(
            positions,
            position=torch.arange(size, device=device)[None],
            position_end=size,
        )
        sums = self._sums.look_up(distances, list(stretches), dtype)
        return super().tables(positions, dtype) + sums

    def bias(self, context):
        stretch, factors, sums = context.tables
        size = sums.shape[1]
        flat = sums.flatten()

        def bias(row, h, d):
            if d.is_floating_point():
                return factors[h] * self._sum(d / stretch[row])
            return factors[h] * flat[row * size + d.abs().clamp(max=size - 1)]

        return bias
