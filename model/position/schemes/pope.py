"""PoPE: polar positions, with content as magnitudes and positions as phases."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionView, mask_dtype
from model.position.interface import AttentionPlan, TabulatedScheme, uniform
from model.position.schemes.rope import AngleSharingSettings, Share
from model.position.table import Constant
from settings.fields import setting


class PopeSettings(AngleSharingSettings):
    """Polar positions: magnitudes are content, phases are position (Gopalakrishnan et al. 2025)."""

    test_time = AngleSharingSettings.test_time | {"theta"}

    name: Literal["pope"] = "pope"
    theta: float = setting(10_000.0, "base b of the D frequencies b^(−c/D)", gt=1)
    share: Share = setting(
        "layer",
        "one set of key phases per model, per layer, or per key/value head of each layer",
    )
    phase: Literal["zero", "uniform"] = setting(
        "zero",
        "initial key phases: 0, or drawn from −2π to 0",
    )


class Pope(TabulatedScheme):
    """PoPE: score = Σ_c μ(q_c) μ(k_c) cos(dθ_c − δ_c), μ = softplus, θ_c = b^(−c/D), one for each
    of the D features. Gopalakrishnan et al. 2025 (arXiv:2509.10534).

    A feature is mapped to the point of magnitude μ and phase nθ_c (queries) or mθ_c + δ_c (keys),
    so that q and k are 2D wide, [μ cos | μ sin], while values stay D wide; the scale stays 1/√D.
    Each layer has its own phases δ by default, following the formula's single index c;
    x-transformers has them per head, shared by all layers, and clamps δ to [−2π, 0], where a phase
    that leaves the range at 0, its initial value, gets no gradient. Only cos δ and sin δ are used,
    so here δ is unrestricted and equivalent to the one in that range.
    """

    cached_form = "polar keys, twice as wide"
    settings: PopeSettings

    def setup(self):
        lowest = -2 * math.pi if self.settings.phase == "uniform" else 0.0
        shape = self.settings.shape(self.geometry, self.geometry.head_dim)  # (D,) or (G, D)
        self.phase = self.learned(shape, uniform(0.0, lowest))  # δ
        count = self.geometry.head_dim
        features = torch.arange(count, dtype=torch.float64, device="cpu")
        self._frequencies = Constant(self.settings.theta ** -(features / count))

    @property
    def key_features(self):
        return 2 * self.geometry.head_dim

    def rows(self, positions):
        """cos and sin (..., D) of nθ."""
        angles = positions[..., None] * self._frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def plan(self, context):
        cos, sin = (x[:, None] for x in context.tables)  # (B or 1, 1, T, D)
        q_cos = context.of_queries(cos, dim=2)
        q_sin = context.of_queries(sin, dim=2)
        phase = self.phase.to(mask_dtype(self.phase))
        phase = phase[:, None] if phase.ndim == 2 else phase  # (D,) or (G, 1, D)
        k_cos = cos * phase.cos() - sin * phase.sin()  # cosine of mθ + δ
        k_sin = sin * phase.cos() + cos * phase.sin()
        mask = context.mask()

        def polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            size = F.softplus(x.to(cos.dtype))
            return torch.cat([size * cos, size * sin], dim=-1).to(x.dtype)

        return AttentionPlan(
            read=lambda q, k: [AttentionView(polar(q, q_cos, q_sin), k, mask)],
            write=lambda k: polar(k, k_cos, k_sin),
            linear=False,
        )
