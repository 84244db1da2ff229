"""Simple absolute baselines, added to the token embedding: the position as a number, a fraction or bits.

Each is a step towards sinusoids and fails beyond the training length for its own reason: numbers grow without
bound, fractions exceed 1 (or depend on the length), higher bits were never set, slow sines are linear.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import HeadGeometry, PositionalScheme, PositionSettings
from model.position.table import LookupTable
from model.position.token_positions import TokenPositions

INT64_BITS = 63  # of a position that is not negative


class IntegerSettings(PositionSettings):
    """The position, added to every feature."""

    name: Literal["integer"] = "integer"
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="the number added is scale × position")
    direction: Literal["ones", "learned"] = Field(
        "ones", description="add the number to all features, or along a learned vector"
    )


class UnitIntervalSettings(PositionSettings):
    """The position as a fraction of a length, added to every feature."""

    name: Literal["unit_interval"] = "unit_interval"
    denominator: Literal["fixed", "current"] = Field(
        "fixed",
        description="fixed: the original length, so longer inputs exceed 1; current: the declared sequence "
        "length, so fractions stay below 1 but depend on the length",
    )


class BinarySettings(PositionSettings):
    """The bits of the position, most significant first, added to the last features."""

    name: Literal["binary"] = "binary"
    max_length: int | None = Field(
        None,
        ge=1,
        description="number of positions that must be representable, checked at model creation; null: the "
        "training length",
    )


class SineSettings(PositionSettings):
    """A sine of different frequency for each feature, without cosines."""

    name: Literal["sine"] = "sine"
    base: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="null: wavelengths double from feature to feature; b: they increase from 2π to 2π·b",
    )


class AdditiveEncoding(PositionalScheme):
    """x_n + p_n, with p_n (B or 1, T, C or 1) the scheme's one table.

    The sum is computed in the table's dtype and rounded once; in bfloat16, p_n would be rounded first.
    """

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], positions: TokenPositions) -> Tensor:
        return (x + tables[0]).to(x.dtype)


class IntegerEncoding(AdditiveEncoding):
    """x_n + scale·n·1: the same number on all features. A baseline without a paper.

    The number grows without bound. LayerNorm would remove it, as a constant over features; RMSNorm, which
    this model uses, does not. Large numbers dominate the token embedding, and bfloat16 represents integers
    only up to 256. ``direction: learned`` adds scale·n·u instead, u (C,) initialised like token embeddings.
    """

    settings: IntegerSettings

    def __init__(self, settings: IntegerSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        learned = settings.direction == "learned"
        self.direction = nn.Parameter(torch.empty(geometry.dim)) if learned else None

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        if self.direction is not None:
            drawn = torch.randn(self.direction.shape, generator=generator) * embedding_std
            with torch.no_grad():
                self.direction.copy_(drawn)

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ((positions.position.to(dtype) * self.settings.scale)[..., None],)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], positions: TokenPositions) -> Tensor:
        if self.direction is None:
            return super().embed(x, tables, positions)
        return (x + tables[0] * self.direction).to(x.dtype)


class UnitIntervalEncoding(AdditiveEncoding):
    """x_n + (n/N)·1: the same fraction on all features, 0 ≤ n/N < 1 within N. A baseline without a paper.

    ``denominator: fixed`` uses N = original_length for all evaluated lengths. ``current`` uses the declared
    length of each row, constant within a sequence: caches stay valid, but the encoding of a token depends on
    the total length. LayerNorm would remove either.
    """

    settings: UnitIntervalSettings

    @property
    def depends_on_length(self) -> bool:
        return self.settings.denominator == "current"

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        lengths = positions.lengths if self.depends_on_length else (self.geometry.original_length,)
        position = positions.position.to(dtype)
        if len(set(lengths)) == 1:
            return ((position / lengths[0])[..., None],)
        share = position / torch.tensor(lengths, dtype=dtype, device=position.device)[:, None]  # (B, T)
        return (share[..., None],)


class BinaryEncoding(AdditiveEncoding):
    """x_n + bits of n: feature C − 1 − k holds (n >> k) & 1. A baseline without a paper.

    Training on N positions uses the last ⌈log2 N⌉ features only; the others are zero except in longer inputs.
    Positions are limited to 2^C by the width.
    """

    settings: BinarySettings
    supports_fractions: ClassVar[bool] = False

    def __init__(self, settings: BinarySettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        length = settings.max_length or geometry.train_length
        needed = (length - 1).bit_length()  # ⌈log2 length⌉ without a logarithm's rounding
        if needed > geometry.dim:
            raise ModelError(
                f"position scheme 'binary' needs {needed} features for {length} positions, but model.dim is"
                f" {geometry.dim}: raise model.dim or reduce model.position.max_length (null: train_length)"
            )

    @property
    def limit(self) -> int | None:
        # Wider models can represent any 64-bit position.
        return 2**self.geometry.dim if self.geometry.dim < INT64_BITS else None

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        position, dim = positions.position, self.geometry.dim
        if position.is_floating_point():
            raise ModelError(
                "position scheme 'binary' does not support real-valued positions: use integer positions"
            )
        count = min(dim, INT64_BITS)
        shifts = torch.arange(count - 1, -1, -1, device=position.device)
        bits = (position[..., None] >> shifts) & 1  # (B or 1, T, count)
        return (F.pad(bits, (dim - count, 0)).to(dtype),)


class SineEncoding(AdditiveEncoding):
    """p_n[i] = sin(n/2^i), i = 0..C−1; with ``base`` b: sin(n·b^(−i/(C−1))). A baseline without a paper.

    Feature i repeats after 2π·2^i tokens. Without cosines, no linear map transforms p_n to p_(n+k), so
    distances are hard to compute; features far above log2 of the training length are nearly linear, n/2^i.
    """

    settings: SineSettings

    def __init__(self, settings: SineSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        self._table = LookupTable(self._rows)

    def _rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        features, base = torch.arange(self.geometry.dim, dtype=torch.float64), self.settings.base
        if base is None:
            speeds = torch.exp2(-features)
        else:
            speeds = base ** -(features / max(self.geometry.dim - 1, 1))
        return (torch.sin(positions[..., None] * speeds),)

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._table.look_up(positions.position, positions.reach, dtype)
