"""Rotation whose cosines and sines are learned mixtures of several frequencies."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.pairs import View, mask_dtype
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places
from model.position.rotary import check_even, rotate
from model.position.scaling import plain_frequencies
from model.position.shares import to_queries
from model.position.table import Table


class FopeSettings(PositionSettings):
    """Rotary positions whose cosines and sines are learned mixtures of frequencies (FoPE)."""

    name: Literal["fope"] = "fope"
    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies b^(−2k/D)")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="which features form a pair: (k, k + D/2) or (2k, 2k + 1)"
    )
    max_length: int | None = Field(
        None,
        ge=1,
        description="frequencies below 2π over this are dropped, fixed after training; null: original_length",
    )
    gain: float = Field(
        0.3, ge=0, description="Xavier gain of what is added to the identity as the mixtures' initial values"
    )
    clipped: Literal["identity", "ones"] = Field(
        "identity",
        description="pairs of dropped frequencies: left as they are, or cos = sin = 1, which turns them by "
        "45° and stretches them by √2 at every position",
    )

    @property
    def per_layer(self) -> bool:
        return True


class Fope(Position):
    """FoPE: pair k turns by (Σ_j A_jk cos nθ_j, Σ_j B_jk sin nθ_j) in place of (cos nθ_k, sin nθ_k), over the
    J frequencies θ_j ≥ 2π/L0; slower ones are dropped. Hua et al. 2024 (arXiv:2412.17739).

    Written from an account of a fork of the released code; the paper's own text was not compared. A and B are
    learned for every key/value head of every layer (its query heads follow), identity plus N(0, gain²/J), the
    Xavier variance of one J × J matrix (the fork counts the heads into the fan). The fork gives pairs of
    dropped frequencies ones for cos and sin alike, a scaled turn of 45° that tells no position; the paper
    speaks of a zero frequency, which is cos 1 and sin 0. That is `clipped: identity`, the default; `ones` is
    the fork. Scores depend on more than the distance: cos² + sin² is no longer 1.
    """

    remembers: ClassVar[str] = "rotated keys"
    exempt: ClassVar[dict[str, str]] = {
        "shift": "mixed cosines and sines do not add up as those of one frequency: a score knows n and m"
    }
    settings: FopeSettings

    def __init__(self, settings: FopeSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        plain = plain_frequencies(settings.theta, geometry.head_dim)
        length = settings.max_length or geometry.original_length
        self._kept = plain[plain >= 2 * math.pi / length]  # the fastest come first
        self._dropped, kept = len(plain) - len(self._kept), len(self._kept)
        if not kept:
            raise ModelError(
                f"fope drops every frequency below 2π/{length}, and none is left: raise "
                "model.position.max_length, or train at 7 tokens or more"
            )
        self.cos_mix = nn.Parameter(torch.empty(geometry.kv_heads, kept, kept))  # (G, J, J): A
        self.sin_mix = nn.Parameter(torch.empty(geometry.kv_heads, kept, kept))  # (G, J, J): B
        self._table = Table(self._rows)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        for mix in (self.cos_mix, self.sin_mix):
            drawn = torch.randn(mix.shape, generator=generator) * self.settings.gain * mix.shape[1] ** -0.5
            with torch.no_grad():
                mix.copy_(torch.eye(mix.shape[1]) + drawn)

    def _rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        angles = positions[..., None] * self._kept
        return angles.cos(), angles.sin()

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """cos and sin (B or 1, T, J) of the kept frequencies."""
        return self._table.look_up(places.position, places.reach, dtype)

    def _mixed(self, rows: Tensor, mix: Tensor, dropped: float) -> Tensor:
        """(B or 1, T, J) → (B or 1, G, T, R): the mixtures, and a constant for the dropped pairs."""
        dtype = mask_dtype(mix)
        with torch.autocast(rows.device.type, enabled=False):
            mixed = rows[:, None].to(dtype) @ mix.to(dtype)  # (B or 1, 1, T, J) @ (G, J, J)
        return nn.functional.pad(mixed, (0, self._dropped), value=dropped)

    def plan(self, span: Span) -> Plan:
        rest = 1.0 if self.settings.clipped == "ones" else 0.0
        cos = self._mixed(span.tables[0], self.cos_mix, 1.0)
        sin = self._mixed(span.tables[1], self.sin_mix, rest)
        q_cos, q_sin = (to_queries(span.of_queries(x, dim=2), self.geometry) for x in (cos, sin))
        layout, pairs = self.settings.layout, span.pairs()

        def read(q: Tensor, k: Tensor) -> list[View]:
            return [View(rotate(q, q_cos, q_sin, layout), k, pairs)]

        return Plan(read, lambda k: rotate(k, cos, sin, layout))
