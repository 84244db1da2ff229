"""ALiBi, a penalty linear in distance, and hard ALiBi, a window of its own for each head."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from errors import ModelError
from model.attention.mask import precise
from model.position.distance_bias import DistanceBias, DistanceSettings
from model.position.interface import AttentionPlan, PositionalScheme, PositionSettings, constant
from settings.fields import setting


class AlibiSettings(DistanceSettings):
    """A penalty linear in distance, with a fixed slope per head (Press et al. 2021)."""

    test_time = DistanceSettings.test_time | {"slopes"}

    name: Literal["alibi"] = "alibi"
    slopes: list[Annotated[float, Field(ge=0)]] | None = setting(
        None,
        "slope of each head in logits per token; null: geometric, 2^(−8/H) to 2^(−8)",
    )
    learned: bool = setting(
        False,
        "learn the slopes, initialized to the geometric ones; worse in the paper",
    )
    shared: bool = setting(True, "share learned slopes between layers")

    @model_validator(mode="after")
    def _slopes_are_given_or_learned(self):
        if self.learned and self.slopes is not None:
            raise ValueError(
                "slopes cannot be set with learned: true; remove slopes or set learned to false"
            )
        return self

    @property
    def per_layer(self):
        return self.learned and not self.shared


def alibi_slopes(heads: int) -> Tensor:
    """(H,) float64 slopes: 2^(−8(h+1)/H) for H a power of two, otherwise the slopes for the power
    of two below H, followed by every second slope for the power of two above. Press et al. 2021,
    released code."""

    def geometric(count: int) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, count + 1, dtype=torch.float64) / count)

    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return geometric(heads)
    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])


class Alibi(DistanceBias):
    """logit −= slope_h · d / s, after the 1/√D scale. Press, Smith, Lewis 2021 (arXiv:2108.12409),
    section 3.

    The stretch s is 1 in training; at test time it interpolates (Al-Khateeb et al. 2023,
    arXiv:2310.13017).
    """

    settings: AlibiSettings

    def setup(self):
        super().setup()
        given = self.settings.slopes
        heads = self.geometry.heads
        if given is not None and len(given) != heads:
            raise ModelError(
                f"model.position.slopes must have one slope per head ({heads}), got {len(given)}"
            )
        fixed = alibi_slopes(heads) if given is None else torch.tensor(given, dtype=torch.float64)
        self.slopes = self.learned((heads,), constant(fixed)) if self.settings.learned else None
        if self.slopes is None:
            self.constant_table(fixed)

    @property
    def tabulate(self):
        return self.slopes is not None

    def bias(self, context):
        stretch = context.tables[0]
        slopes = context.tables[1] if self.slopes is None else precise(self.slopes)
        return lambda row, h, d: -(slopes[h] / stretch[row]) * d  # one division for all pairs


class HardAlibiSettings(PositionSettings):
    """A window of its own for each head, without positions otherwise (Jelassi et al. 2024)."""

    name: Literal["hard_alibi"] = "hard_alibi"
    windows: list[Annotated[int, Field(ge=1)] | None] | None = setting(
        None,
        "for each head, the number of most recent positions it attends to, including the query's "
        "own, or null for all; null: 1, 2, ... for the first half of the heads, all for the others",
    )


class HardAlibi(PositionalScheme):
    """logit = q·k for distances below m_h, −∞ beyond; NoPE in heads without m_h.

    Jelassi et al. 2024, "Repeat After Me" (arXiv:2402.01032), section 3: m_h = 1, ..., M in M heads
    and no limit in the others. Such heads read the tokens right before a match, which copies of any
    length need. With `window`, the smaller of both applies; sinks stay visible where m_h allows.
    """

    settings: HardAlibiSettings

    def setup(self):
        heads = self.geometry.heads
        given = self.settings.windows
        if given is None:
            given = [h + 1 if h < heads // 2 else None for h in range(heads)]
        if len(given) != heads:
            raise ModelError(
                f"model.position.windows must have one entry per head ({heads}), got {len(given)}"
            )
        reach = [math.inf if window is None else window for window in given]
        self.constant_table(torch.tensor(reach, dtype=torch.float64))

    def plan(self, context):
        (reach,) = context.tables  # (H,) number of positions that each head attends to
        return AttentionPlan.from_mask(
            context.distance_mask(lambda h, d: torch.where(d < reach[h], 0.0, -math.inf))
        )
