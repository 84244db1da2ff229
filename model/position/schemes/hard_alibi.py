"""A window of its own for each head."""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field

from errors import ModelError
from model.position.base import AttentionPlan, PositionalScheme, PositionSettings
from model.position.table import Constant
from settings.fields import setting


class HardAlibiSettings(PositionSettings):
    """A window of its own for each head, without positions otherwise (Jelassi et al. 2024)."""

    name: Literal["hard_alibi"] = "hard_alibi"
    windows: list[Annotated[int, Field(ge=1)] | None] | None = setting(
        None,
        "for each head, the number of most recent positions it attends to, the "
        "query's own included, or null for all; null: 1, 2, ... for the first half of the heads, "
        "all for the others",
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
        self._reach = Constant(torch.tensor([reach], dtype=torch.float64))

    def tables(self, positions, dtype):
        """(1, H) the number of positions that each head attends to."""
        return (self._reach.to(positions.position.device, dtype),)

    def plan(self, context):
        reach = context.tables[0][0]
        return AttentionPlan.from_mask(
            context.distance_mask(lambda h, d: torch.where(d < reach[h], 0.0, -math.inf))
        )
