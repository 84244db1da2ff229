"""Logits by distance, mixed from learned profiles by the query's token."""

from __future__ import annotations

from typing import Literal

import torch

from model.attention.mask import AttentionView, no_autocast
from model.position.content import ContentSettings, linear
from model.position.interface import ContentScheme, constant, normal
from settings.fields import setting


class RelativeLogitsSettings(ContentSettings):
    """Learned logits by distance, which the query's token mixes (Inkling, 2026)."""

    name: Literal["relative_logits"] = "relative_logits"
    profiles: int = setting(16, "R: number of profiles in each layer", ge=1)
    extent: int = setting(
        128,
        "E: distances from here on add 0 to the logit; 1,024 in Inkling",
        ge=1,
    )


class RelativeLogits(ContentScheme):
    """logit += Σ_r (W_h x_n)_r P[r, d] for distances d < E, after the 1/√D scale; 0 beyond.

    Inkling's relative logits, as in its released implementation in transformers
    (`InklingRelativeLogits`); without a paper. Each layer has W (H·R, C) and P (R, E), which its
    heads share. P is initialized to 0, which is NoPE. A temperature scales q·k only; Inkling's
    scales these logits too. E cannot be changed after training.
    """

    supports_fractions = False
    caches_extras = False
    projections = ("mix",)
    settings: RelativeLogitsSettings

    def setup(self):
        dim = self.geometry.dim
        profiles = self.settings.profiles
        shape = (self.geometry.heads * profiles, dim)
        self.mix = self.learned(shape, normal(dim**-0.5))
        self.profiles = self.learned((profiles, self.settings.extent), constant(0.0))

    def features(self, x, tables):
        """(B, T, H·R) weights of the profiles."""
        return linear(x, self.mix)

    def read(self, q, k, own, extras, plan):
        context = plan.context
        weights = own.unflatten(2, (self.geometry.heads, -1))
        with no_autocast(q):
            rows = weights @ self.profiles.to(weights.dtype)  # (B, Q, H, E)
        separation = context.separation()
        extent = self.settings.extent

        def bias(b, h, i, j):
            d = separation(b, i, j)
            return torch.where(d < extent, rows[b, i, h, d.clamp(0, extent - 1)], 0.0)

        return [AttentionView(q, k, context.mask(bias=bias, by_row=True))]
