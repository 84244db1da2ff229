"""Shaw: learned relative position vectors, added to keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import AttentionView, BiasFunction, QueryBlock, mask_dtype, no_autocast
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
    normal,
)
from model.position.pairwise import UNROLLED, distances, mask_per_row
from settings.fields import setting

FAR_COPIES = 32  # copies of the entry that all far keys use


class ShawSettings(SharableSettings):
    """A learned vector per clipped distance, added to keys and optionally to values (Shaw et al.
    2018)."""

    name: Literal["shaw"] = "shaw"
    clip: int = setting(16, "K: larger distances use the vector of distance K", ge=0)
    values: bool = setting(False, "also add vectors to the values")


class Shaw(PositionalScheme):
    """logit = q_n·(k_m + a_c)/√D and, with ``values``, output_n = Σ_m α_nm (v_m + b_c), c = min(n −
    m, K). Shaw, Uszkoreit, Vaswani 2018 (arXiv:1803.02155), equations 3 and 4, past side only.

    The heads share a and b (K + 1, D), initialized from N(0, 1/D). K cannot be changed after
    training. Sinks have distance K, as all distant keys.
    """

    supports_fractions = False
    reads_features = True
    exempt = UNROLLED
    settings: ShawSettings

    def setup(self):
        shape = (self.settings.clip + 1, self.geometry.head_dim)
        initial = normal(self.geometry.head_dim**-0.5)
        self.key = self.learned(shape, initial)
        self.value = self.learned(shape, initial) if self.settings.values else None

    def plan(self, context):
        if self.value is not None:
            return AttentionPlan.from_mask(
                mask_per_row(context),
                self._weights,
                self._extra_output,
            )
        if context.precompute:
            mask_per_row(context)  # the layers' own masks share its block mask
        return AttentionPlan(read=lambda q, k: [self._view(context, q, k)])

    def _view(
        self,
        context: AttentionContext,
        q: Tensor,
        k: Tensor,
    ) -> AttentionView:
        mask = mask_per_row(context, make_flex=lambda: self._bias(context, q))
        return AttentionView(q, k, mask, self._weights)

    def _bias(self, context: AttentionContext, q: Tensor) -> BiasFunction:
        """q_n·a_c/√D, looked up in the products of q with all K + 1 vectors."""
        clip = self.settings.clip
        dtype = mask_dtype(q)
        with no_autocast(q):
            rows = q.to(dtype) @ self.key.to(dtype).T * self.geometry.scale  # (B, H, Q, K + 1)
        # Far keys use copies of the last entry in turn: FlexAttention's backward pass adds each
        # pair's gradient to its entry, and additions to the same entry wait for each other.
        rows = torch.cat(
            [rows[..., :clip], rows[..., clip:].expand(*rows.shape[:3], FAR_COPIES)],
            dim=-1,
        )
        separation = context.separation()

        def bias(b, h, i, j):
            d = separation(b, i, j).clamp(min=0)
            return rows[b, h, i, torch.where(d < clip, d, clip + j % FAR_COPIES)]

        return bias

    def _weights(self, block: QueryBlock) -> Tensor:
        rows = block.q @ self.key.to(block.q.dtype).T  # (B, H, t, K + 1)
        return block.weights_of(
            block.scores + rows.gather(-1, distances(block, self.settings.clip)) * block.scale
        )

    def _extra_output(self, block: QueryBlock, weights: Tensor) -> Tensor:
        """Σ_m α_nm b_c. Weights are summed by clipped distance first, which avoids a (t, s, D)
        tensor."""
        assert self.value is not None
        index = distances(block, self.settings.clip)
        totals = weights.new_zeros(*weights.shape[:3], self.settings.clip + 1)
        return totals.scatter_add(-1, index, weights) @ self.value.to(weights.dtype)
