"""Biases that depend on the head and the distance of a pair alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
)
from model.position.scaling import Factor, stretch_of
from model.position.table import on_device
from model.token_positions import TokenPositions
from settings.fields import setting

# (row, head, distance) -> number added to the logit. Row and head are index tensors, the distance
# is unstretched. The row indexes the scheme's first table. FlexAttention requires that tensors are
# indexed by tensors.
RowBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class DistanceSettings(PositionSettings):
    """Settings shared by distance biases."""

    test_time = PositionSettings.test_time | {"stretch"}

    stretch: Factor = setting(
        1.0,
        "distances are divided by this; auto: max(1, L / original_length)",
    )


class DistanceBias(PositionalScheme, ABC):
    """logit += f_h(d / s), after the 1/√D scale; s stretches the trained distances over longer
    sequences.

    Al-Khateeb et al. 2023 (arXiv:2310.13017) divide ALiBi's slopes by s = L / L0 at test time.
    """

    settings: DistanceSettings
    tabulate: bool = True  # the bias is computed once per distance rather than for each pair

    @property
    def depends_on_length(self):
        return self.settings.stretch == "auto"

    def stretches(self, positions: TokenPositions) -> tuple[float, ...]:
        """s of each row, or a single value if all rows agree."""
        original = self.geometry.original_length
        stretch = self.settings.stretch
        by_row = tuple(stretch_of(stretch, length, original) for length in positions.lengths)
        return by_row[:1] if len(set(by_row)) == 1 else by_row

    def tables(self, positions, dtype):
        """(B or 1,) the stretch of each row, and constants."""
        stretches = on_device(self.stretches(positions), positions.device, dtype)
        return stretches, *super().tables(positions, dtype)

    @abstractmethod
    def bias(self, context: AttentionContext) -> RowBias:
        """The bias function f of this pass."""

    def plan(self, context):
        bias = self.bias(context)

        def by_distance(h, d):
            return bias(h * 0, h, d)

        if context.tables[0].shape[0] == 1:
            mask = context.distance_mask(by_distance, tabulate=self.tabulate)
            return AttentionPlan.from_mask(mask)
        separation = context.separation()

        def by_pair(b, h, i, j):
            return bias(b, h, separation(b, i, j))

        return AttentionPlan.from_mask(context.mask(bias=by_pair, by_row=True))
