"""What the biases of distance share: a head's function of distance, and positions divided by a stretch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from model.pairs import View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places
from model.position.scaling import Factor, stretch_of

STRETCHES_HELD = 16  # tensors of stretches held at once: batches of many lengths where it follows the length

# (row, head, distance), index tensors and the unstretched distance -> what is added to the logit. The row
# counts those of the scheme's first table. Tensors are indexed by tensors alone: FlexAttention takes no more.
RowBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class DistanceSettings(PositionSettings):
    """What biases of distance have in common."""

    test_time = PositionSettings.test_time | {"stretch"}

    stretch: Factor = Field(
        1.0, description="distances are divided by this; auto: max(1, L / original_length)"
    )


class DistanceBias(Position, ABC):
    """logit += f_h(d / s), after the 1/√D scale; s stretches the trained distances over longer sequences.

    Al-Khateeb et al. 2023 (arXiv:2310.13017) divide ALiBi's slopes by s = L / L0 at test time.
    """

    settings: DistanceSettings

    def __init__(self, settings: DistanceSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._stretches: dict[tuple, Tensor] = {}

    @property
    def follows_length(self) -> bool:
        return self.settings.stretch == "auto"

    def stretch(self, length: int) -> float:
        """s for a sequence of this declared length."""
        return stretch_of(self.settings.stretch, length, self.geometry.original_length)

    def stretches(self, places: Places) -> tuple[float, ...]:
        """s of each row; one for all where they agree."""
        found = tuple(self.stretch(length) for length in places.lengths)
        return found[:1] if len(set(found)) == 1 else found

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(B or 1,) the stretch of each row, in float32 or float64."""
        key = (self.stretches(places), places.position.device, dtype)
        if key not in self._stretches:  # made once: moving them waits for a GPU
            if len(self._stretches) == STRETCHES_HELD:
                self._stretches.pop(next(iter(self._stretches)))  # the oldest
            self._stretches[key] = torch.tensor(key[0], dtype=dtype, device=key[1])
        return (self._stretches[key],)

    @abstractmethod
    def bias(self, span: Span) -> RowBias:
        """f for this pass."""

    def plan(self, span: Span) -> Plan:
        bias = self.bias(span)
        if span.tables[0].shape[0] == 1:
            pairs = span.pairs(distance=lambda h, d: bias(h * 0, h, d))
        else:
            q, k = span.q_position, span.k_position
            pairs = span.pairs(bias=lambda b, h, i, j: bias(b, h, q[b, i] - k[b, j]), by_row=True)
        return Plan(read=lambda q, k: [View(q, k, pairs)])
