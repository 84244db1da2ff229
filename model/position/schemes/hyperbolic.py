"""Hyperbolic rotations, equivalent to an exponential decay per feature."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import AttentionView, QueryBlock, mask_dtype
from model.position.interface import (
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
    constant,
)
from model.position.pairwise import UNROLLED, decayed_scores
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import check_even
from settings.fields import setting


class HyperbolicSettings(PositionSettings):
    """Hyperbolic rotations, with scores that decay with distance (HoPE, Dai et al. 2025)."""

    name: Literal["hyperbolic"] = "hyperbolic"
    theta: float = setting(10_000.0, "base b of the frequencies fastest·b^(−2k/D)", gt=1)
    fastest: float = setting(1.0, "largest frequency θ_0, per token", gt=0)
    margin: float = setting(
        0.1,
        "decay rate θ' = θ_0·(1 + margin); the slowest feature decays at θ_0·margin",
        gt=0,
    )
    damping: Literal["fixed", "learned"] = setting(
        "fixed",
        "learned: one margin per layer, initialized to margin",
    )

    @property
    def per_layer(self):
        return self.damping == "learned"


class Hyperbolic(PositionalScheme):
    """HoPE: score = Σ_k e^(−dθ') q_kᵀ [[cosh dθ_k, sinh dθ_k], [sinh dθ_k, cosh dθ_k]] k_k over
    pairs of features (k, k + D/2), θ' > θ_k. Dai et al. 2025 (arXiv:2509.05218). Not Chen et al.'s
    HoPE, see p_rope.

    With u = (x1 + x2)/√2 and w = (x1 − x2)/√2 of a pair the matrix is diagonal: score = Σ_k e^(−(θ'
    − θ_k)d) u_q u_k + e^(−(θ' + θ_k)d) w_q w_k, one decay rate per feature. The implementation uses
    this form. The published form, applied to q and k separately, suffers from cancellation: float64
    loses all precision after 40 tokens, and float32 overflows after 88.

    No factor exceeds 1 if positions increase along a document (also skipped, random or fractional
    ones). For keys before its block of 16, a query uses e^(−γ(n − n0)) e^(−γ(n0 − m)), where n0 ≥ m
    is the first position of the block's queries that attend to such keys: a factor underflows only
    if the score does. Keys inside the block are computed pair by pair. If positions decrease along
    a document, distances are negative and scores grow, as in the formula. Keys are cached in the
    coordinates u, w, without positions.
    """

    cached_form = "plain keys, in the coordinates u and w"
    reads_features = True
    exempt = UNROLLED
    settings: HyperbolicSettings

    def setup(self):
        settings = self.settings
        geometry = self.geometry
        check_even(self)
        self.log_margin = None
        if settings.damping == "learned":
            self.log_margin = self.learned((1,), constant(math.log(settings.margin)))
        speeds = settings.fastest * plain_frequencies(settings.theta, geometry.head_dim)
        # (D,) the rates minus θ_0·margin, in float64
        rests = torch.cat([speeds[0] - speeds, speeds[0] + speeds])
        self.constant_table(rests, keep_dtype=True)

    def rates(self, rests: Tensor) -> Tensor:
        """(D,) γ: θ' − θ_k of the features u, then θ' + θ_k of the features w, per token."""
        if self.log_margin is None:
            return rests + self.settings.fastest * self.settings.margin
        return rests + self.settings.fastest * self.log_margin.to(rests.dtype).exp()

    def plan(self, context):
        rates = self.rates(*context.tables)
        q_position = context.queries.position.double()[:, None, :, None]
        k_position = context.keys.position.double()[:, None, :, None]
        mask = context.mask()

        def weights_fn(block: QueryBlock) -> Tensor:
            n = q_position[:, :, block.start : block.stop]
            m = k_position[:, :, block.keys]
            scores = decayed_scores(block, -n * rates, -m * rates)
            return block.weights_of(scores * block.scale)

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            return [AttentionView(diagonal(q), k, mask, weights_fn)]

        return AttentionPlan(read, write=diagonal)


def diagonal(x: Tensor) -> Tensor:
    """(..., D) features → [u | w], the coordinates in which hyperbolic rotations are diagonal."""
    a, b = x.to(mask_dtype(x)).chunk(2, dim=-1)
    return (torch.cat([a + b, a - b], dim=-1) * math.sqrt(0.5)).to(x.dtype)
