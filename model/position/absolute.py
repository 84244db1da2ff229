"""Schemes added to the token embedding."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.position.base import Geometry, Places, Position, PositionSettings
from model.position.table import Table


class NoneSettings(PositionSettings):
    """No positions at all (NoPE); the causal mask alone tells order."""

    name: Literal["none"] = "none"


class SinusoidalSettings(PositionSettings):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017)."""

    test_time = PositionSettings.test_time | {"theta"}

    name: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10_000.0, gt=1, description="base of the wavelengths, 2π to 2π·theta")
    layout: Literal["interleaved", "half"] = Field(
        "interleaved", description="sin and cos alternate, or a block of sines before a block of cosines"
    )
    scale_tokens: bool = Field(
        False, description="multiply token embeddings by √dim first; for small ones, which are tied"
    )


class LearnedSettings(PositionSettings):
    """One learned vector per position, added to the embeddings; ends where the table ends."""

    name: Literal["learned"] = "learned"
    max_length: int | None = Field(None, ge=1, description="rows of the table; null: the trained length")


class Sinusoidal(Position):
    """p[2k] = sin(n·b^(−2k/C)), p[2k+1] = cos(same). Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.

    Identity: p_n·p_m = Σ_k cos(θ_k (n − m)), so that inner products know distance alone.
    """

    settings: SinusoidalSettings

    def __init__(self, settings: SinusoidalSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._table = Table(self._rows)

    def _rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        dim = self.geometry.dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = positions[..., None] * self.settings.theta**-exponents  # (..., ceil(C/2))
        if self.settings.layout == "half":
            rows = torch.cat([angles.sin(), angles.cos()], dim=-1)
        else:
            rows = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return (rows[..., :dim],)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._table.look_up(places.position, places.reach, dtype)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        scaled = x * self.geometry.dim**0.5 if self.settings.scale_tokens else x
        return scaled + tables[0].to(x.dtype)


class Learned(Position):
    """x_n + E[n]; E is drawn like the token embeddings, as in GPT-2. Positions past the table are refused."""

    settings: LearnedSettings

    def __init__(self, settings: LearnedSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self.weight = nn.Parameter(torch.empty(settings.max_length or geometry.train_length, geometry.dim))

    @property
    def limit(self) -> int:
        return self.weight.shape[0]

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        drawn = torch.randn(self.weight.shape, generator=generator) * embedding_std
        with torch.no_grad():
            self.weight.copy_(drawn)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        return x + self.weight[places.position].to(x.dtype)
