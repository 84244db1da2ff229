"""Rotary position embeddings (RoPE) and their base class."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from model.attention.mask import AttentionMask, AttentionView
from model.errors import ModelError
from model.position.base import (
    AttentionContext,
    AttentionPlan,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.remap import AnyRemap, NoRemap, RemapBranch, RemapContext
from model.position.scaling import AnyScaling, NoScaling, plain_frequencies, resonant, turns_within
from model.position.table import Rows, StretchedTables
from model.position.token_positions import TokenPositions


class RotarySettings(PositionSettings):
    """Settings shared by all rotations with fixed frequencies."""

    test_time = PositionSettings.test_time | {"theta", "scaling", "resonance", "remap"}

    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies b^(−2k/r)")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="features of a pair: (k, k + r/2) or (2k, 2k + 1)"
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of each head's features that is rotated (partial RoPE)"
    )
    scaling: AnyScaling = Field(
        NoScaling(), description="frequency scaling for lengths beyond the original length"
    )
    resonance: bool = Field(
        False, description="round every wavelength to whole tokens, after scaling (Resonance RoPE)"
    )
    remap: AnyRemap = Field(
        NoRemap(),
        description="remap of positions beyond the original length; does not change frequencies",
    )

    @model_validator(mode="after")
    def _distances_are_all_a_remap_needs(self):
        if self.scaling.untouched and not isinstance(self.remap, NoRemap):
            raise ValueError(
                f"scaling.first {self.scaling.untouched} makes scores depend on more than the distance, "
                f"all that remap '{self.remap.name}' knows: set the one to 0 or the other to none"
            )
        return self

    @model_validator(mode="after")
    def _sinks_to_remap(self):
        if self.remap.needs_sinks and (self.window is None or self.sinks == 0):
            raise ValueError(f"remap '{self.remap.name}' requires window and sinks")
        return self


class RopeSettings(RotarySettings):
    """Rotary position embeddings: q and k are rotated by angles proportional to position (Su et al. 2021)."""

    name: Literal["rope"] = "rope"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first 2·R features of each head by the given angles, pair by pair.

    Args:
        x: (B, H, T, D); features past 2·R pass through.
        cos, sin: (B or 1, T, R), or (B or 1, H, T, R) where heads differ; float32 or float64, the dtype
            of the computation.
        layout: ``half`` pairs feature k with k + R, ``interleaved`` pairs 2k with 2k + 1.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    pairs = cos.shape[-1]
    if cos.ndim == 3:
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


def check_even(name: str, geometry: HeadGeometry) -> None:
    """Raise ModelError for an odd head dimension."""
    if geometry.head_dim % 2:
        raise ModelError(
            f"{name} rotates pairs of features and requires an even head dimension, got "
            f"{geometry.head_dim}: change model.dim, model.heads or model.head_dim"
        )


class Rope(PositionalScheme):
    """RoPE, Su et al. 2021 (arXiv:2104.09864): q_n → R(nθ) q_n, k_m → R(mθ) k_m, scores depend on n − m only.

    The table of cos and sin is indexed by position, so it is valid at any cache offset. Keys are cached
    rotated, once per key map of the remap; frequencies and maps do not change within a sequence.
    """

    cached_form = "rotated keys, one form for each key map of the remap"

    settings: RotarySettings

    def __init__(self, settings: RotarySettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        self.dims = int(geometry.head_dim * settings.fraction) // 2 * 2
        if self.dims < 2:
            raise ModelError(
                f"model.position.fraction {settings.fraction} of {geometry.head_dim} features leaves no "
                f"pair: raise it to {2 / geometry.head_dim:.4g} or more"
            )
        self.frequencies(self.stretch(geometry.train_length))  # validates the settings
        self._remap_context = RemapContext(geometry.original_length, settings.window, settings.sinks)
        self._branches = settings.remap.branches(self._remap_context)
        self._forms = sorted({branch.key for branch in self._branches})  # key maps; keys are cached with each
        self._tables = StretchedTables(self._rows)

    def stretch(self, length: int) -> float:
        """The scaling factor for a sequence of this declared length."""
        return self.settings.scaling.stretch(length, self.geometry.original_length)

    def _stretches(self, length: int) -> tuple[float, float]:
        """The stretch of the frequencies and of the remap for a declared length."""
        return self.stretch(length), self.settings.remap.stretch(length, self._remap_context)

    @property
    def exempt(self) -> dict[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.remap.exempt

    @property
    def key_features(self) -> int:
        return self.geometry.head_dim * len(self._forms)

    @property
    def depends_on_length(self) -> bool:
        return self.settings.scaling.depends_on_length or self.settings.remap.depends_on_length

    def spectrum(self) -> Tensor:
        """(R,) float64 frequencies before scaling, in radians per token: a geometric series."""
        return plain_frequencies(self.settings.theta, self.dims)

    def rotated_pairs(self) -> Tensor | float:
        """(R,) 1 for pairs that are rotated, 0 for pairs that are never rotated, even after scaling."""
        return 1.0

    def frequencies(self, stretch: float) -> tuple[Tensor, float]:
        """(R,) float64 frequencies in radians per token, and the amplitude of cos and sin."""
        scaled, amplitude = self.settings.scaling.frequencies(
            self.spectrum(), stretch, self.geometry.original_length
        )
        return self._as_turned(scaled), amplitude

    def _as_turned(self, frequencies: Tensor) -> Tensor:
        return (resonant(frequencies) if self.settings.resonance else frequencies) * self.rotated_pairs()

    def whole_turns(self, length: int) -> tuple[int, int]:
        """(number of pairs that complete a rotation within `length` tokens, number of pairs)."""
        turns = turns_within(self.frequencies(self.stretch(length))[0], length)
        return int((turns >= 1).sum()), len(turns)

    def _rows(self, stretches: tuple[float, float]) -> Rows:
        remap, remap_context, spread = self.settings.remap, self._remap_context, stretches[1]
        gain = remap.amplitude(spread)
        frequencies, amplitude = self.frequencies(stretches[0])
        untouched, plain = self.settings.scaling.untouched, self._as_turned(self.spectrum())

        def turn(positions: Tensor) -> tuple[Tensor, Tensor]:
            positions = positions[..., None]
            angles = positions * frequencies
            cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
            if untouched:
                early, angles = positions < untouched, positions * plain
                cos, sin = torch.where(early, angles.cos(), cos), torch.where(early, angles.sin(), sin)
            return cos, sin

        def rows(positions: Tensor) -> tuple[Tensor, ...]:
            """cos and sin for the first map, for the second, ..."""
            turns = [turn(mapped) for mapped in remap.maps(positions, spread, remap_context)]
            return tuple(x * gain for cos_and_sin in turns for x in cos_and_sin)

        return rows

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        stretches = [self._stretches(length) for length in positions.lengths]
        return self._tables.look_up(positions, stretches, dtype)

    def plan(self, context: AttentionContext) -> AttentionPlan:
        cos, sin = context.tables[0::2], context.tables[1::2]  # by map
        layout, features = self.settings.layout, self.geometry.head_dim
        pairs = [self._pairs(context, branch) for branch in self._branches]

        def write(k: Tensor) -> Tensor:
            forms = [rotate(k, cos[i], sin[i], layout) for i in self._forms]
            return forms[0] if len(forms) == 1 else torch.cat(forms, dim=-1)

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            forms = dict(zip(self._forms, k.split(features, dim=-1), strict=True))
            views = []
            for branch, served in zip(self._branches, pairs, strict=True):
                q_cos, q_sin = context.of_queries(cos[branch.query]), context.of_queries(sin[branch.query])
                views.append(AttentionView(rotate(q, q_cos, q_sin, layout), forms[branch.key], served))
            return views

        return AttentionPlan(read, write)

    def _pairs(self, context: AttentionContext, branch: RemapBranch) -> AttentionMask:
        serves = branch.serves
        if serves is None:
            return context.pairs()
        q_position, k_position, k_order = context.q_position, context.k_position, context.k_order
        return context.pairs(
            mask_mod=lambda b, h, i, j: serves(q_position[b, i], k_position[b, j], k_order[b, j])
        )
