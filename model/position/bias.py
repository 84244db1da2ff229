"""Base class of distance biases: a function of distance per head, with a stretch of distances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from model.attention.mask import AttentionView
from model.position.base import (
    AttentionContext,
    AttentionPlan,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.scaling import Factor, stretch_of
from model.position.token_positions import TokenPositions

STRETCHES_HELD = 16  # cached stretch tensors, for batches with many lengths

# (row, head, distance), index tensors and the unstretched distance -> added to the logit. The row indexes the
# scheme's first table. FlexAttention requires that tensors are indexed by tensors.
RowBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class DistanceSettings(PositionSettings):
    """Settings shared by distance biases."""

    test_time = PositionSettings.test_time | {"stretch"}

    stretch: Factor = Field(
        1.0, description="distances are divided by this; auto: max(1, L / original_length)"
    )


class DistanceBias(PositionalScheme, ABC):
    """logit += f_h(d / s), after the 1/√D scale; s stretches the trained distances over longer sequences.

    Al-Khateeb et al. 2023 (arXiv:2310.13017) divide ALiBi's slopes by s = L / L0 at test time.
    """

    settings: DistanceSettings

    def __init__(self, settings: DistanceSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        self._stretches: dict[tuple, Tensor] = {}

    @property
    def depends_on_length(self) -> bool:
        return self.settings.stretch == "auto"

    def stretch(self, length: int) -> float:
        """s for a sequence of this declared length."""
        return stretch_of(self.settings.stretch, length, self.geometry.original_length)

    def stretches(self, positions: TokenPositions) -> tuple[float, ...]:
        """s of each row, or a single value if all rows agree."""
        found = tuple(self.stretch(length) for length in positions.lengths)
        return found[:1] if len(set(found)) == 1 else found

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(B or 1,) the stretch of each row, in float32 or float64."""
        key = (self.stretches(positions), positions.position.device, dtype)
        if key not in self._stretches:  # cached: copying them synchronizes with the GPU
            if len(self._stretches) == STRETCHES_HELD:
                self._stretches.pop(next(iter(self._stretches)))  # the oldest
            self._stretches[key] = torch.tensor(key[0], dtype=dtype, device=key[1])
        return (self._stretches[key],)

    @abstractmethod
    def bias(self, context: AttentionContext) -> RowBias:
        """The bias function f of this pass."""

    def plan(self, context: AttentionContext) -> AttentionPlan:
        bias = self.bias(context)
        if context.tables[0].shape[0] == 1:
            pairs = context.pairs(distance=lambda h, d: bias(h * 0, h, d))
        else:
            q, k = context.q_position, context.k_position
            pairs = context.pairs(bias=lambda b, h, i, j: bias(b, h, q[b, i] - k[b, j]), by_row=True)
        return AttentionPlan(read=lambda q, k: [AttentionView(q, k, pairs)])
