"""Rotation of some pairs only, chosen by frequency."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from model.errors import ModelError
from model.position.base import Geometry
from model.position.rotary import Rope, RotarySettings


class PRopeSettings(RotarySettings):
    """Rotary positions on the fastest pairs alone, of the full spectrum (Barbero et al. 2024)."""

    # Another base could change which pairs are within max_wavelength; rules keep the choice.
    test_time = RotarySettings.test_time - {"theta"}

    name: Literal["p_rope"] = "p_rope"
    share: float = Field(0.75, gt=0, le=1, description="share p of the pairs that turn: the fastest ones")
    reversed: bool = Field(False, description="the slowest ones turn instead")
    max_wavelength: float | None = Field(
        None,
        gt=0,
        description="longest wavelength that turns, as a multiple of original_length; null: no limit",
    )


class PRope(Rope):
    """p-RoPE: θ_k = b^(−2k/r) for the first ⌊p·r/2⌋ pairs, 0 for the rest.

    Barbero et al. 2024 (arXiv:2410.06205). Unlike rope.fraction the exponents run over all r features. Rules
    see the full spectrum and change the pairs that turn as they would in RoPE.
    `max_wavelength: 1` with `share: 1` is HoPE, Chen et al. 2024 (arXiv:2410.21216): pairs of λ_k ≤ L0 turn.
    That threshold is taken from others' accounts of the paper.
    """

    settings: PRopeSettings

    def __init__(self, settings: PRopeSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        if not self.turning().any():
            raise ModelError(
                f"p_rope leaves no pair of {self.dims} features that turns: raise share ({settings.share}) "
                f"or max_wavelength ({settings.max_wavelength})"
            )

    def turning(self) -> Tensor:
        s, spectrum = self.settings, self.spectrum()
        count = int(s.share * self.dims // 2)
        pairs = torch.arange(len(spectrum), device="cpu")
        turning = pairs >= len(spectrum) - count if s.reversed else pairs < count
        if s.max_wavelength is not None:
            limit = s.max_wavelength * self.geometry.original_length
            turning &= (
                2 * torch.pi / spectrum <= limit
            )  # as trained, so that a rule does not change the choice
        return turning.double()
