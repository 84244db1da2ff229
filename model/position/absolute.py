"""Schemes added to the token embedding."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import Geometry, Position, PositionSettings
from model.position.places import Places
from model.position.scaling import Factor, stretch_of
from model.position.table import Rows, StretchedTables

TABLE_STD = 0.02  # as large as token embeddings (1), rows are noise that drowns a short run's tokens


class NoneSettings(PositionSettings):
    """No positions at all (NoPE); the causal mask alone tells order."""

    name: Literal["none"] = "none"


class SinusoidalSettings(PositionSettings):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017)."""

    test_time = PositionSettings.test_time | {"theta", "offset", "stretch"}

    name: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10_000.0, gt=1, description="base of the wavelengths, 2π to 2π·theta")
    layout: Literal["interleaved", "half"] = Field(
        "interleaved", description="sin and cos alternate, or a block of sines before a block of cosines"
    )
    scale_tokens: bool = Field(
        False, description="multiply token embeddings by √dim first; for small ones, which are tied"
    )
    offset: int = Field(
        0, ge=0, description="added to every position; 2 in fairseq, whose padding has 0 and 1"
    )
    stretch: Factor = Field(
        1.0, description="positions are divided by this; auto: max(1, L / original_length)"
    )


class LearnedSettings(PositionSettings):
    """One learned vector per position, added to the embeddings."""

    test_time = PositionSettings.test_time | {"extend"}

    name: Literal["learned"] = "learned"
    max_length: int | None = Field(None, ge=1, description="rows of the table; null: the trained length")
    extend: Literal["none", "interpolate", "repeat", "clip"] = Field(
        "none",
        description="past the table: refuse; stretch it over the declared length; start again with row 0; or "
        "stay at the last row",
    )


class NoPE(Position):
    """Nothing: the causal mask alone gives order, which two layers or more can read from it.

    Haviv et al. 2022 (arXiv:2203.16634); Kazemnejad et al. 2023 (arXiv:2305.19466). RoPE with all frequencies
    zero is the same function.
    """

    uses_position = False


class Sinusoidal(Position):
    """p_n[2k] = sin(m·b^(−2k/C)), p_n[2k+1] = cos(same), m = n/s + offset. Vaswani et al. 2017
    (arXiv:1706.03762), section 3.5; odd widths end with a sine.

    Identity: p_n·p_m = Σ_k cos(θ_k (n − m)), so that inner products know distance alone. With a stretch s
    positions are interpolated as in Chen et al. 2023 (arXiv:2306.15595), and the offset is added after it: a
    sequence of s·L0 tokens then stays among the angles that training has seen.
    """

    settings: SinusoidalSettings

    def __init__(self, settings: SinusoidalSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._tables = StretchedTables(self._rows)

    @property
    def follows_length(self) -> bool:
        return self.settings.stretch == "auto"

    def stretch(self, length: int) -> float:
        """s for a sequence of this declared length."""
        return stretch_of(self.settings.stretch, length, self.geometry.original_length)

    def _rows(self, stretch: float) -> Rows:
        dim, offset = self.geometry.dim, self.settings.offset
        speeds = self.settings.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

        def rows(positions: Tensor) -> tuple[Tensor, ...]:
            angles = (positions / stretch + offset)[..., None] * speeds  # (..., ceil(C/2))
            if self.settings.layout == "half":
                features = torch.cat([angles.sin(), angles.cos()], dim=-1)
            else:
                features = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
            return (features[..., :dim],)

        return rows

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._tables.look_up(places, [self.stretch(length) for length in places.lengths], dtype)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        scaled = x * self.geometry.dim**0.5 if self.settings.scale_tokens else x
        return scaled + tables[0].to(x.dtype)


class Learned(Position):
    """x_n + E[n], as in GPT-2 (Radford et al. 2019); E is drawn from N(0, 0.02²), small beside the tokens.

    Past the table of R rows a position is refused, or ``extend`` gives it row n mod R (repeat), the last row
    (clip), or row r(n) of a table stretched over the declared length L > R (interpolate, as Dosovitskiy et
    al. 2020, arXiv:2010.11929, section 3.2): r(n) = n·(R − 1)/(L − 1), so that the first and the last token
    have the first and the last row ("align corners"), and between two rows they are mixed linearly. Up to R
    tokens nothing is stretched; positions past L − 1 stay at the last row, those below 0 at the first.

    Real-valued positions have a meaning under ``interpolate`` alone; every other choice refuses them, and the
    class fact `takes_fractions` speaks of the default.
    """

    settings: LearnedSettings
    takes_fractions: ClassVar[bool] = False

    def __init__(self, settings: LearnedSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self.weight = nn.Parameter(torch.empty(settings.max_length or geometry.train_length, geometry.dim))

    @property
    def limit(self) -> int | None:
        return self.weight.shape[0] if self.settings.extend == "none" else None

    @property
    def follows_length(self) -> bool:
        return self.settings.extend == "interpolate"

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        drawn = torch.randn(self.weight.shape, generator=generator) * TABLE_STD
        with torch.no_grad():
            self.weight.copy_(drawn)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Row (B or 1, T) of each token; under ``interpolate`` two rows and the share of the second."""
        position, extend, last = places.position, self.settings.extend, self.weight.shape[0] - 1
        if extend == "interpolate":
            return self._between(places, dtype)
        if position.is_floating_point():
            raise ModelError(
                "position scheme 'learned' has rows for whole positions only, and was given real-valued "
                "ones: give integer positions, or set model.position.extend to interpolate"
            )
        if extend == "repeat":
            position = position % (last + 1)
        elif extend == "clip":
            position = position.clamp(max=last)
        return (position,)

    def _between(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        # Whole numbers until the last division: a row's share is exact however long the table.
        last, device = self.weight.shape[0] - 1, places.position.device
        spans = [max(length - 1, last, 1) for length in places.lengths]  # r(n) = n·last/span
        span = spans[0] if len(set(spans)) == 1 else torch.tensor(spans, device=device)[:, None]
        along = (places.position * last).clamp(min=0)  # (B or 1, T), as all here
        low = along.div(span, rounding_mode="floor")
        share = (along - low * span).to(dtype) / span
        low = low.long().clamp(max=last)
        return low, (low + 1).clamp(max=last), share[..., None]

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        if len(tables) == 1:
            return x + self.weight[tables[0]].to(x.dtype)
        low, high, share = tables
        mixed = self.weight[low] * (1 - share) + self.weight[high] * share  # (B or 1, T, C)
        return x + mixed.to(x.dtype)
