"""Teaching baselines added to the token embedding: the position written down as a number, a share or bits.

Each is a step on the way to sinusoids, and fails in its own way past the trained length: numbers grow without
bound, shares pass one (or move under the reader), the next bit was never set, slow sines are mere ramps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import Geometry, Position, PositionSettings
from model.position.places import Places
from model.position.table import Table

INT64_BITS = 63  # of a position that is not negative


class IntegerSettings(PositionSettings):
    """The position itself, as a number added to every feature."""

    name: Literal["integer"] = "integer"
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="the number added is scale × position")
    direction: Literal["ones", "learned"] = Field(
        "ones", description="the number goes to all features alike, or along one learned vector"
    )


class UnitIntervalSettings(PositionSettings):
    """The position as a share of a length, added to every feature."""

    name: Literal["unit_interval"] = "unit_interval"
    denominator: Literal["fixed", "current"] = Field(
        "fixed",
        description="fixed: the original length, so that longer inputs pass 1; current: the declared length "
        "of the sequence, so that all stay below 1 and each token's share depends on that length",
    )


class BinarySettings(PositionSettings):
    """The bits of the position, most significant first, at the last features."""

    name: Literal["binary"] = "binary"
    max_length: int | None = Field(
        None,
        ge=1,
        description="positions that must have bits of their own, checked when the model is built; null: the "
        "trained length",
    )


class SineSettings(PositionSettings):
    """A sine at a speed of its own for each feature, and no cosine."""

    name: Literal["sine"] = "sine"
    base: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="null: wavelengths double from feature to feature; a number b: they rise from 2π to 2π·b",
    )


class Added(Position):
    """x_n + p_n, with p_n (B or 1, T, C or 1) the scheme's one table.

    The sum is rounded once, after it was made in the table's precision: bfloat16 alone would round p_n first.
    """

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        return (x + tables[0]).to(x.dtype)


class Integer(Added):
    """x_n + scale·n·1: the same number on all features. A baseline without a paper of its own.

    It grows without bound. LayerNorm removes a constant over features exactly, and with it the position;
    RMSNorm, which this model has, keeps it. Tokens drown in large numbers, in bfloat16 for good: it counts to
    256 with no room left beside. ``direction: learned`` adds scale·n·u instead, u (C,) drawn like the token
    embeddings.
    """

    settings: IntegerSettings

    def __init__(self, settings: IntegerSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        learned = settings.direction == "learned"
        self.direction = nn.Parameter(torch.empty(geometry.dim)) if learned else None

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        if self.direction is not None:
            drawn = torch.randn(self.direction.shape, generator=generator) * embedding_std
            with torch.no_grad():
                self.direction.copy_(drawn)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ((places.position.to(dtype) * self.settings.scale)[..., None],)

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        if self.direction is None:
            return super().embed(x, tables, places)
        return (x + tables[0] * self.direction).to(x.dtype)


class UnitInterval(Added):
    """x_n + (n/N)·1: the same share on all features, 0 ≤ n/N < 1 within N. A baseline without a paper.

    ``denominator: fixed`` takes N = original_length, which a longer evaluation does not move. ``current``
    takes the declared length of each row, once per sequence: a cache stays right, but the same tokens have
    other shares in a longer text (the scheme is not causal in length). LayerNorm would remove either.
    """

    settings: UnitIntervalSettings

    @property
    def follows_length(self) -> bool:
        return self.settings.denominator == "current"

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        lengths = places.lengths if self.follows_length else (self.geometry.original_length,)
        position = places.position.to(dtype)
        if len(set(lengths)) == 1:
            return ((position / lengths[0])[..., None],)
        share = position / torch.tensor(lengths, dtype=dtype, device=position.device)[:, None]  # (B, T)
        return (share[..., None],)


class Binary(Added):
    """x_n + bits of n: feature C − 1 − k holds (n >> k) & 1. A baseline without a paper of its own.

    A model trained on N positions has seen the last ⌈log2 N⌉ features alone; the others are zero until a
    longer input sets them. Positions end where the width does, at 2^C.
    """

    settings: BinarySettings
    takes_fractions: ClassVar[bool] = False

    def __init__(self, settings: BinarySettings, geometry: Geometry):
        super().__init__(settings, geometry)
        length = settings.max_length or geometry.train_length
        needed = (length - 1).bit_length()  # ⌈log2 length⌉ without a logarithm's rounding
        if needed > geometry.dim:
            raise ModelError(
                f"position scheme 'binary' needs {needed} features for {length} positions, and model.dim is "
                f"{geometry.dim}: raise model.dim or shorten model.position.max_length (null: train_length)"
            )

    @property
    def limit(self) -> int | None:
        # Wider models have features for more than any 64-bit position.
        return 2**self.geometry.dim if self.geometry.dim < INT64_BITS else None

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        position, dim = places.position, self.geometry.dim
        if position.is_floating_point():
            raise ModelError(
                "position scheme 'binary' has bits for whole positions only, and was given real-valued ones: "
                "give integer positions"
            )
        count = min(dim, INT64_BITS)
        shifts = torch.arange(count - 1, -1, -1, device=position.device)
        bits = (position[..., None] >> shifts) & 1  # (B or 1, T, count)
        return (F.pad(bits, (dim - count, 0)).to(dtype),)


class Sine(Added):
    """p_n[i] = sin(n/2^i), i = 0..C−1; with ``base`` b: sin(n·b^(−i/(C−1))). A baseline without a paper.

    Feature i repeats after 2π·2^i tokens. Without the cosine no linear map takes p_n to p_(n+k), so that
    distance cannot be read off; features far beyond log2 of the trained length are straight lines n/2^i.
    """

    settings: SineSettings

    def __init__(self, settings: SineSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._table = Table(self._rows)

    def _rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        features, base = torch.arange(self.geometry.dim, dtype=torch.float64), self.settings.base
        if base is None:
            speeds = torch.exp2(-features)
        else:
            speeds = base ** -(features / max(self.geometry.dim - 1, 1))
        return (torch.sin(positions[..., None] * speeds),)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._table.look_up(places.position, places.reach, dtype)
