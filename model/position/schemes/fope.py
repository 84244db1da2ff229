"""FoPE: rotations whose cosines and sines are learned mixtures of frequencies."""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from errors import ModelError
from model.attention.mask import mask_dtype, no_autocast
from model.position.interface import TabulatedScheme
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import RotationSettings, check_even, rotation_plan
from model.position.table import Constant
from settings.fields import setting


class FopeSettings(RotationSettings):
    """Rotary positions whose cosines and sines are learned mixtures of frequencies (FoPE)."""

    per_layer = True

    name: Literal["fope"] = "fope"
    max_length: int | None = setting(
        None,
        "drop frequencies below 2π / max_length; fixed after training; null: original_length",
        ge=1,
    )
    gain: float = setting(
        0.3,
        "Xavier gain of the noise added to the identity to initialize the mixtures",
        ge=0,
    )
    clipped: Literal["identity", "ones"] = setting(
        "identity",
        "pairs of dropped frequencies: unchanged, or cos = sin = 1: rotated by 45° "
        "and scaled by √2 at every position",
    )


class Fope(TabulatedScheme):
    """FoPE: pair k is rotated by (Σ_j A_jk cos nθ_j, Σ_j B_jk sin nθ_j) instead of (cos nθ_k, sin
    nθ_k), over the J frequencies θ_j ≥ 2π/L0; lower frequencies are dropped. Hua et al. 2024
    (arXiv:2412.17739).

    Based on a description of a fork of the released code; not compared with the paper's text. A and
    B are learned per key/value head and layer, initialized to the identity plus N(0, gain²/J), the
    Xavier variance of one J × J matrix (the fork includes the heads in the fan). For dropped
    frequencies, the fork sets both cos and sin to 1, a scaled rotation by 45° at all positions
    (`clipped: ones`); the paper uses a zero frequency, i.e. cos 1 and sin 0 (`clipped: identity`,
    the default). Scores are not a function of distance alone, because cos² + sin² is not 1.
    """

    cached_form = "rotated keys"
    exempt: ClassVar[dict[str, str]] = {
        "shift": "scores depend on n and m: mixtures of cosines and sines do not obey the addition "
        "theorem"
    }
    settings: FopeSettings

    def setup(self):
        settings = self.settings
        geometry = self.geometry
        check_even(self)
        plain = plain_frequencies(settings.theta, geometry.head_dim)
        length = settings.max_length or geometry.original_length
        frequencies = plain[plain >= 2 * math.pi / length]  # in decreasing order
        self._dropped = len(plain) - len(frequencies)
        kept = len(frequencies)
        self._kept = Constant(frequencies)
        if not kept:
            raise ModelError(
                f"fope has no frequency of at least 2π/{length}: raise model.position.max_length, "
                "or use 7 training tokens or more"
            )
        shape = (geometry.kv_heads, kept, kept)  # (G, J, J)
        self.cos_mix = self.learned(shape, self._near_identity)  # A
        self.sin_mix = self.learned(shape, self._near_identity)  # B

    def _near_identity(
        self,
        shape: torch.Size,
        generator: torch.Generator,
    ) -> Tensor:
        noise = torch.randn(shape, generator=generator) * self.settings.gain * shape[1] ** -0.5
        return torch.eye(shape[1]) + noise

    def rows(self, positions):
        """cos and sin (..., J) of the kept frequencies."""
        angles = positions[..., None] * self._kept.to(positions.device)
        return angles.cos(), angles.sin()

    def _mixed(self, rows: Tensor, mix: Tensor, dropped: float) -> Tensor:
        """(B or 1, T, J) → (B or 1, G, T, R): the mixtures, and a constant for the dropped
        pairs."""
        dtype = mask_dtype(mix)
        with no_autocast(rows):
            mixed = rows[:, None].to(dtype) @ mix.to(dtype)  # (B or 1, 1, T, J) @ (G, J, J)
        return nn.functional.pad(mixed, (0, self._dropped), value=dropped)

    def plan(self, context):
        rest = 1.0 if self.settings.clipped == "ones" else 0.0
        cos = self._mixed(context.tables[0], self.cos_mix, 1.0)
        sin = self._mixed(context.tables[1], self.sin_mix, rest)
        return rotation_plan(context, self.settings.layout, (cos, sin))
