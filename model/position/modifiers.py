"""Modifiers that combine with any scheme: a logit temperature and a softmax sink."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import AttentionContext, AttentionPlan, ContentPlan, PositionSettings
from model.position.temperature import Temperature
from model.position.token_positions import TokenPositions


def temperature_factors(
    settings: PositionSettings, original_length: int, positions: TokenPositions, dtype: torch.dtype
) -> Tensor | None:
    """(B or 1, T or 1) factors on the queries of a pass, or None. Runs eagerly."""
    if type(settings.temperature).factor is Temperature.factor:
        return None
    count = positions.order.clamp(min=0).double() + 1  # padding has negative order and attends to itself
    if settings.window is not None:
        count = count.clamp(max=settings.window + settings.sinks)
    lengths = torch.tensor(positions.lengths, dtype=torch.float64, device=count.device)[:, None]
    factor = settings.temperature.factor(count, original_length, lengths)
    return None if factor is None else factor.to(dtype)


class Modifiers(nn.Module):
    """Temperature and sink of one layer; each learns at most one number per head."""

    def __init__(self, settings: PositionSettings, heads: int):
        super().__init__()
        self.settings = settings
        temperature = settings.temperature
        self.scale = nn.Parameter(torch.empty(heads)) if temperature.learned else None
        self.sink = nn.Parameter(torch.empty(heads)) if settings.sink_logit == "learned" else None
        self._heads = heads
        given = temperature.by_head
        if given is not None and len(given) != heads:
            raise ModelError(
                f"model.position.temperature.value must have one factor per head ({heads}), got {len(given)}"
            )

    def initialise(self) -> None:
        with torch.no_grad():
            if self.scale is not None:
                self.scale.fill_(self.settings.temperature.initial)
            if self.sink is not None:
                self.sink.zero_()

    def forward(
        self, plan: AttentionPlan | ContentPlan, context: AttentionContext, factors: Tensor | None
    ) -> AttentionPlan | ContentPlan:
        """The plan with its queries scaled by `factors` (B or 1, T or 1) of the new tokens, and the sink."""
        sink: Tensor | None = self.sink
        if self.settings.sink_logit == "zero":
            sink = torch.zeros(self._heads, device=context.device)
        scale, given = self.scale, self.settings.temperature.by_head
        if given is not None:
            scale = torch.tensor(given, dtype=torch.float64, device=context.device)
        if factors is None and scale is None:
            return plan if sink is None else plan.modified(None, sink)
        rows = factors if factors is None or factors.shape[1] == 1 else context.of_queries(factors)

        def scale_queries(q: Tensor) -> Tensor:  # (B, H, K, D)
            if scale is not None:
                q = q * scale[:, None, None].to(q.dtype)
            return q if rows is None else (q * rows[:, None, :, None]).to(q.dtype)

        return plan.modified(scale_queries, sink)
