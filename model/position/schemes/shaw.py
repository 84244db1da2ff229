"""Shaw: learned relative position vectors, added to keys and values."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from model.attention.mask import QueryBlock
from model.position.base import AttentionContext, AttentionPlan, PositionalScheme, SharableSettings, normal
from model.position.pairwise import UNROLLED, distances, mask_per_row


class ShawSettings(SharableSettings):
    """A learned vector per clipped distance, added to keys and optionally to values
    (Shaw et al. 2018)."""

    name: Literal["shaw"] = "shaw"
    clip: int = Field(16, ge=0, description="K: larger distances use the vector of distance K")
    values: bool = Field(False, description="also add vectors to the values")


class Shaw(PositionalScheme):
    """logit = q_n·(k_m + a_c)/√D and, with ``values``, output_n = Σ_m α_nm (v_m + b_c), c = min(n − m, K).
    Shaw, Uszkoreit, Vaswani 2018 (arXiv:1803.02155), equations 3 and 4, past side only.

    The heads share a and b (K + 1, D), initialized from N(0, 1/D). K cannot be changed after training. Sinks
    have distance K, as all distant keys.
    """

    supports_fractions = False
    exempt: ClassVar[dict[str, str]] = UNROLLED
    settings: ShawSettings

    def setup(self) -> None:
        shape = (self.settings.clip + 1, self.geometry.head_dim)
        initial = normal(self.geometry.head_dim**-0.5)
        self.key = self.learned(shape, initial)
        self.value = self.learned(shape, initial) if self.settings.values else None

    def plan(self, context: AttentionContext) -> AttentionPlan:
        extra_output = None if self.value is None else self._extra_output
        return AttentionPlan.from_mask(mask_per_row(context), self._weights, extra_output)

    def _weights(self, block: QueryBlock) -> Tensor:
        rows = block.q @ self.key.to(block.q.dtype).T  # (B, H, t, K + 1)
        return block.softmax(
            block.scores + rows.gather(-1, distances(block, self.settings.clip)) * block.scale
        )

    def _extra_output(self, block: QueryBlock, weights: Tensor) -> Tensor:
        """Σ_m α_nm b_c. Weights are summed by clipped distance first, which avoids a (t, s, D) tensor."""
        assert self.value is not None
        index = distances(block, self.settings.clip)
        totals = weights.new_zeros(*weights.shape[:3], self.settings.clip + 1)
        return totals.scatter_add(-1, index, weights) @ self.value.to(weights.dtype)
