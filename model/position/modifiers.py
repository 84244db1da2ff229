"""What any scheme can be combined with in a layer: a logit temperature and a sink in the softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.errors import ModelError
from model.position.base import ContentPlan, Plan, PositionSettings, Span
from model.position.places import Places
from model.position.temperature import Temperature


def temperature_factors(
    settings: PositionSettings, original_length: int, places: Places, dtype: torch.dtype
) -> Tensor | None:
    """(B or 1, T or 1) factors on the queries of a pass; None where there are none. Called eagerly."""
    if type(settings.temperature).factor is Temperature.factor:
        return None
    count = places.order.clamp(min=0).double() + 1  # padding stands before 0 and sees itself
    if settings.window is not None:
        count = count.clamp(max=settings.window + settings.sinks)
    lengths = torch.tensor(places.lengths, dtype=torch.float64, device=count.device)[:, None]
    factor = settings.temperature.factor(count, original_length, lengths)
    return None if factor is None else factor.to(dtype)


class Modifiers(nn.Module):
    """One layer's temperature and sink, with what they learn: one number a head each."""

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
                f"model.position.temperature.value: {heads} heads need {heads} factors, got {len(given)}"
            )

    def initialise(self) -> None:
        with torch.no_grad():
            if self.scale is not None:
                self.scale.fill_(self.settings.temperature.initial)
            if self.sink is not None:
                self.sink.zero_()

    def forward(self, plan: Plan | ContentPlan, span: Span, factors: Tensor | None) -> Plan | ContentPlan:
        """The plan with its queries scaled by `factors` (B or 1, T or 1) of the new tokens, and the sink."""
        sink: Tensor | None = self.sink
        if self.settings.sink_logit == "zero":
            sink = torch.zeros(self._heads, device=span.device)
        scale, given = self.scale, self.settings.temperature.by_head
        if given is not None:
            scale = torch.tensor(given, dtype=torch.float64, device=span.device)
        if factors is None and scale is None:
            return plan if sink is None else plan.modified(None, sink)
        rows = factors if factors is None or factors.shape[1] == 1 else span.of_queries(factors)

        def temper(q: Tensor) -> Tensor:  # (B, H, K, D)
            if scale is not None:
                q = q * scale[:, None, None].to(q.dtype)
            return q if rows is None else (q * rows[:, None, :, None]).to(q.dtype)

        return plan.modified(temper, sink)
