"""xPos: rotations with a decay factored into queries and keys."""

import math
from typing import Literal

import torch

from model.position.interface import TabulatedScheme
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import Layout, RotationSettings, check_even, rotation_plan
from model.position.table import Constant
from settings.fields import setting

# Natural logarithm of the largest factor on a key. The range of float32 and bfloat16 is e^±87; the
# margin is for the keys themselves and for gradients, which are multiplied by the query's factor of
# e^−64.
LARGEST = 64.0


class XPosSettings(RotationSettings):
    """Rotary positions with an exponential decay per pair (Sun et al. 2022)."""

    test_time = RotationSettings.test_time | {"theta"}

    name: Literal["xpos"] = "xpos"
    layout: Layout = setting("interleaved", "features of a pair: (2k, 2k + 1) or (k, k + D/2)")
    gamma: float = setting(
        0.4, "γ of ζ_k = (2k + γD) / ((1 + γ)D); with larger γ, pairs decay less", gt=0
    )
    scale_base: float = setting(512.0, "S: distance after which pair k has decayed to ζ_k", gt=0)


class XPos(TabulatedScheme):
    """xPos: q_n → ζ^(n/S) R(nθ) q_n, k_m → ζ^(−m/S) R(mθ) k_m, so the contribution of pair k to the
    score is RoPE's times ζ_k^(d/S), ζ_k = (2k + γD)/((1 + γ)D). Sun et al. 2022 (arXiv:2212.10554),
    algorithm 1, γ = 0.4.

    Position 0 is the origin. The released code uses half the current length as origin: scores are
    the same, but cached keys would change as the text grows. The disadvantage is range: factors of
    keys grow as ζ_0^(−m/S), and float32 and bfloat16 overflow at e^87. Positions are limited to
    factors up to e^64 (26,156 with the default S and γ); the limit is proportional to S, which must
    be set before training.
    """

    cached_form = "rotated and scaled keys"
    settings: XPosSettings

    def setup(self):
        check_even(self)
        dims = self.geometry.head_dim
        gamma = self.settings.gamma
        self._frequencies = Constant(plain_frequencies(self.settings.theta, dims))
        # float64 ln ζ_k / S: log growth of the query factor per token
        shares = torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims
        self._growth = Constant(((shares + gamma) / (1 + gamma)).log() / self.settings.scale_base)

    @property
    def limit(self):
        zeta = self.settings.gamma / (1 + self.settings.gamma)
        return 1 + math.floor(LARGEST * self.settings.scale_base / -math.log(zeta))

    def rows(self, positions):
        """cos and sin (..., R) for queries, and for keys."""
        angles = positions[..., None] * self._frequencies.to(positions.device)
        scale = (positions[..., None] * self._growth.to(positions.device)).exp()
        cos = angles.cos()
        sin = angles.sin()
        return cos * scale, sin * scale, cos / scale, sin / scale

    def plan(self, context):
        q_cos, q_sin, k_cos, k_sin = context.tables
        return rotation_plan(context, self.settings.layout, (k_cos, k_sin), (q_cos, q_sin))
