"""Biases added to the attention logit of a pair."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from model.pairs import View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places


class AlibiSettings(PositionSettings):
    """A penalty linear in distance, with a fixed slope per head (Press et al. 2021)."""

    name: Literal["alibi"] = "alibi"


def alibi_slopes(heads: int) -> Tensor:
    """(H,) float64 slopes: 2^(−8(h+1)/H) for H a power of two, else those of the power of two below it,
    followed by every second slope of the power of two above. Press et al. 2021, released code."""

    def geometric(count: int) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, count + 1, dtype=torch.float64) / count)

    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return geometric(heads)
    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])


class Alibi(Position):
    """logit −= slope_h · d, after the 1/√D scale. Press, Smith, Lewis 2021 (arXiv:2108.12409), section 3."""

    settings: AlibiSettings

    def __init__(self, settings: AlibiSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self._slopes: dict[
            tuple[torch.device, torch.dtype], Tensor
        ] = {}  # (1, H); moving them waits for a GPU

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        # float32 slopes whatever the model's dtype: in bfloat16 distances would collapse past 256.
        key = (places.position.device, dtype)
        if key not in self._slopes:
            self._slopes[key] = alibi_slopes(self.geometry.heads).to(*key)[None]
        return (self._slopes[key],)

    def plan(self, span: Span) -> Plan:
        slopes = span.tables[0][0]
        pairs = span.pairs(distance=lambda h, d: -slopes[h] * d)
        return Plan(read=lambda q, k: [View(q, k, pairs)])
