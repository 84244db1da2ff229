"""Schemes added to the token embedding."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import HeadGeometry, PositionalScheme, PositionSettings
from model.position.scaling import Factor, stretch_of
from model.position.table import Rows, StretchedTables
from model.position.token_positions import TokenPositions

TABLE_STD = 0.02  # as large as token embeddings (1), rows are noise that drowns a short run's tokens


class NoneSettings(PositionSettings):
    """No positional encoding (NoPE); order comes from the causal mask."""

    name: Literal["none"] = "none"


class SinusoidalSettings(PositionSettings):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017)."""

    test_time = PositionSettings.test_time | {"theta", "offset", "stretch"}

    name: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10_000.0, gt=1, description="base of the wavelengths, 2π to 2π·theta")
    layout: Literal["interleaved", "half"] = Field(
        "interleaved", description="alternate sin and cos, or all sines before all cosines"
    )
    scale_tokens: bool = Field(
        False, description="multiply token embeddings by √dim first; for small, tied embeddings"
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
        description="positions beyond the table: error; stretch the table over the declared length; wrap "
        "around to row 0; or use the last row",
    )


class NoPE(PositionalScheme):
    """NoPE: order comes from the causal mask alone, which suffices for two or more layers.

    Haviv et al. 2022 (arXiv:2203.16634); Kazemnejad et al. 2023 (arXiv:2305.19466). RoPE with all frequencies
    zero is the same function.
    """

    uses_position = False


class Sinusoidal(PositionalScheme):
    """p_n[2k] = sin(m·b^(−2k/C)), p_n[2k+1] = cos(same), m = n/s + offset. Vaswani et al. 2017
    (arXiv:1706.03762), section 3.5; odd widths end with a sine.

    p_n·p_m = Σ_k cos(θ_k (n − m)), so inner products depend on distance alone. A stretch s interpolates
    positions as in Chen et al. 2023 (arXiv:2306.15595) before the offset is added: sequences of s·L0 tokens
    stay within the trained angles.
    """

    settings: SinusoidalSettings

    def __init__(self, settings: SinusoidalSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        self._tables = StretchedTables(self._rows)

    @property
    def depends_on_length(self) -> bool:
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

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._tables.look_up(positions, [self.stretch(length) for length in positions.lengths], dtype)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], positions: TokenPositions) -> Tensor:
        scaled = x * self.geometry.dim**0.5 if self.settings.scale_tokens else x
        return scaled + tables[0].to(x.dtype)


class Learned(PositionalScheme):
    """x_n + E[n], as in GPT-2 (Radford et al. 2019); E is initialised from N(0, 0.02²), small relative to
    token embeddings.

    Positions beyond the R rows of the table are an error, unless ``extend`` selects row n mod R (repeat), the
    last row (clip), or row r(n) of a table stretched over the declared length L > R (interpolate, as
    Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.2): r(n) = n·(R − 1)/(L − 1), with linear
    interpolation between rows ("align corners"). Up to R tokens nothing is stretched. Positions
    above L − 1 use the last row, those below 0 the first.

    Real-valued positions are supported with ``interpolate`` only; `supports_fractions` is for the default.
    """

    settings: LearnedSettings
    supports_fractions: ClassVar[bool] = False

    def __init__(self, settings: LearnedSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        self.weight = nn.Parameter(torch.empty(settings.max_length or geometry.train_length, geometry.dim))

    @property
    def limit(self) -> int | None:
        return self.weight.shape[0] if self.settings.extend == "none" else None

    @property
    def depends_on_length(self) -> bool:
        return self.settings.extend == "interpolate"

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        drawn = torch.randn(self.weight.shape, generator=generator) * TABLE_STD
        with torch.no_grad():
            self.weight.copy_(drawn)

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Row (B or 1, T) of each token; with ``interpolate`` two rows and the weight of the second."""
        position, extend, last = positions.position, self.settings.extend, self.weight.shape[0] - 1
        if extend == "interpolate":
            return self._between(positions, dtype)
        if position.is_floating_point():
            raise ModelError(
                "position scheme 'learned' does not support real-valued positions: use integer positions, or "
                "set model.position.extend to interpolate"
            )
        if extend == "repeat":
            position = position % (last + 1)
        elif extend == "clip":
            position = position.clamp(max=last)
        return (position,)

    def _between(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        # Integer arithmetic until the last division, so weights are exact for any table length.
        last, device = self.weight.shape[0] - 1, positions.position.device
        spans = [max(length - 1, last, 1) for length in positions.lengths]  # r(n) = n·last/span
        span = spans[0] if len(set(spans)) == 1 else torch.tensor(spans, device=device)[:, None]
        along = (positions.position * last).clamp(min=0)  # (B or 1, T), as all here
        low = along.div(span, rounding_mode="floor")
        share = (along - low * span).to(dtype) / span
        low = low.long().clamp(max=last)
        return low, (low + 1).clamp(max=last), share[..., None]

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], positions: TokenPositions) -> Tensor:
        if len(tables) == 1:
            return x + self.weight[tables[0]].to(x.dtype)
        low, high, share = tables
        mixed = self.weight[low] * (1 - share) + self.weight[high] * share  # (B or 1, T, C)
        return x + mixed.to(x.dtype)
