"""Rotations by less than 90° within the trained length."""

import math
from typing import Literal

from model.position.schemes.rope import Rope, RotarySettings
from settings.fields import setting


class HeXuSettings(RotarySettings):
    """Rotary positions with angles below π/2 within max_length (He and Xu)."""

    name: Literal["he_xu"] = "he_xu"
    max_length: int | None = setting(
        None, "N of the angle π/(2N), fixed after training; null: original_length", ge=1
    )


class HeXu(Rope):
    """θ_k = π/(2N)·b^(−2k/r): "Easy Derivation Of Rotary Position Embeddings", He Cangping and Xu
    Tao.

    Within N tokens, cos(d·θ_k) decreases with the distance d for all k. Equivalent to RoPE with
    positions divided by 2N/π (1303.8 for N 2048). N is fixed after training; changing it would
    interpolate positions.
    """

    settings: HeXuSettings

    def spectrum(self):
        length = self.settings.max_length or self.geometry.original_length
        return super().spectrum() * (math.pi / (2 * length))
