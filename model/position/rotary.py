"""Rotations of queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from model.errors import ModelError
from model.kernels import View
from model.position.base import Geometry, Places, Plan, Position, PositionSettings, Span
from model.position.scaling import AnyScaling, NoScaling, plain_frequencies, resonant, turns_within
from model.position.table import Rows, Table

TABLES_KEPT = 16  # stretches whose tables are held at once: documents of many lengths under `factor: auto`


class RotarySettings(PositionSettings):
    """What all rotations by fixed frequencies have in common."""

    test_time = PositionSettings.test_time | {"theta", "scaling", "resonance"}

    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies b^(−2k/r)")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="which features form a pair: (k, k + r/2) or (2k, 2k + 1)"
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of each head's features that is rotated (partial RoPE)"
    )
    scaling: AnyScaling = Field(
        NoScaling(), description="what happens to the frequencies past the original length"
    )
    resonance: bool = Field(
        False, description="round every wavelength to whole tokens, after scaling (Resonance RoPE)"
    )


class RopeSettings(RotarySettings):
    """Rotary positions: q and k turn by an angle proportional to position (Su et al. 2021)."""

    name: Literal["rope"] = "rope"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turn the first 2·R features of each head by the given angles, pair by pair.

    Args:
        x: (B, H, T, D); features past 2·R pass through.
        cos, sin: (B or 1, T, R), float32 or float64; the turn is computed in their precision.
        layout: ``half`` pairs feature k with k + R, ``interleaved`` pairs 2k with 2k + 1.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (B or 1, 1, T, R)
    turned, rest = x[..., : 2 * pairs].to(cos.dtype), x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned[..., :pairs], turned[..., pairs:]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    out = out.to(x.dtype)
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


class Rope(Position):
    """RoPE, Su et al. 2021 (arXiv:2104.09864): q_n → R(nθ) q_n, k_m → R(mθ) k_m, scores know n − m alone.

    The precomputed table of cos and sin is indexed by position and is therefore right at any cache offset.
    Keys are remembered rotated: the frequencies are fixed once per sequence.
    """

    settings: RotarySettings

    def __init__(self, settings: RotarySettings, geometry: Geometry):
        super().__init__(settings, geometry)
        if geometry.head_dim % 2:
            raise ModelError(
                f"{settings.name} turns features in pairs and needs an even head dimension, got "
                f"{geometry.head_dim}: change model.dim, model.heads or model.head_dim"
            )
        self.dims = int(geometry.head_dim * settings.fraction) // 2 * 2
        if self.dims < 2:
            raise ModelError(
                f"{settings.name}.fraction {settings.fraction} of {geometry.head_dim} features leaves no pair"
            )
        self.frequencies(self.stretch(geometry.train_length))  # refuses what cannot work before any compute
        self._tables: dict[float, Table] = {}

    def stretch(self, length: int) -> float:
        """The factor a sequence of this declared length is treated with."""
        return self.settings.scaling.stretch(length, self.geometry.original_length)

    @property
    def follows_length(self) -> bool:
        return self.settings.scaling.follows_length

    def spectrum(self) -> Tensor:
        """(R,) float64 frequencies before any rule, in radians per token: a geometric series."""
        return plain_frequencies(self.settings.theta, self.dims)

    def turning(self) -> Tensor | float:
        """(R,) 1 for the pairs that turn, 0 for those that stand still under every rule."""
        return 1.0

    def frequencies(self, stretch: float) -> tuple[Tensor, float]:
        """(R,) float64 frequencies in radians per token, and the amplitude of cos and sin."""
        scaled, amplitude = self.settings.scaling.frequencies(
            self.spectrum(), stretch, self.geometry.original_length
        )
        return self._as_turned(scaled), amplitude

    def _as_turned(self, frequencies: Tensor) -> Tensor:
        return (resonant(frequencies) if self.settings.resonance else frequencies) * self.turning()

    def whole_turns(self, length: int) -> tuple[int, int]:
        """How many pairs complete a turn within `length` tokens, and how many there are."""
        turns = turns_within(self.frequencies(self.stretch(length))[0], length)
        return int((turns >= 1).sum()), len(turns)

    def _table(self, stretch: float) -> Table:
        if stretch not in self._tables:
            if len(self._tables) == TABLES_KEPT:
                self._tables.pop(next(iter(self._tables)))  # the oldest
            self._tables[stretch] = Table(self._rows(stretch))
        return self._tables[stretch]

    def _rows(self, stretch: float) -> Rows:
        frequencies, amplitude = self.frequencies(stretch)
        untouched, plain = self.settings.scaling.untouched, self._as_turned(self.spectrum())

        def rows(positions: Tensor) -> tuple[Tensor, ...]:
            positions = positions[..., None]
            angles = positions * frequencies
            cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
            if untouched:
                early, angles = positions < untouched, positions * plain
                cos, sin = torch.where(early, angles.cos(), cos), torch.where(early, angles.sin(), sin)
            return cos, sin

        return rows

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        stretches = [self.stretch(length) for length in places.lengths]
        if len(set(stretches)) == 1:
            return self._table(stretches[0]).look_up(places.position, places.reach, dtype)
        rows = places.position.expand(len(stretches), -1)
        found = [
            self._table(s).look_up(rows[b : b + 1], places.reach, dtype) for b, s in enumerate(stretches)
        ]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def plan(self, span: Span) -> Plan:
        cos, sin = span.tables
        q_cos, q_sin = span.of_queries(cos), span.of_queries(sin)
        pairs, layout = span.pairs(), self.settings.layout
        return Plan(
            read=lambda q, k: [View(rotate(q, q_cos, q_sin, layout), k, pairs)],
            write=lambda k: rotate(k, cos, sin, layout),
        )
