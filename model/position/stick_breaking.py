"""Stick-breaking attention: each key takes its share of what nearer keys have left."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from model.errors import ModelError
from model.pairs import Block, View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.weighing import UNROLLED, sum_after


class StickBreakingSettings(PositionSettings):
    """Weights by breaking a stick from the nearest key back, in place of a softmax (Tan et al. 2024)."""

    name: Literal["stick_breaking"] = "stick_breaking"
    remainder: Literal["self", "drop"] = Field(
        "self", description="what no key has taken goes to the query's own value, or to nothing"
    )


class StickBreaking(Position):
    """A_nm = σ(z_nm)·Π_{m<j<n} (1 − σ(z_nj)) for m < n, z = q·k/√D; the rest Π_{j<n} (1 − σ(z_nj)) of the
    stick goes to v_n or is dropped. Tan et al. 2024 (arXiv:2410.17980).

    A query breaks strictly past keys only, so that a window of w leaves w − 1 of them, and the first token of
    a document has nothing but its remainder. Computed by sums of logarithms. There is no softmax, and hence
    no sink: the remainder is that.
    """

    uses_position: ClassVar[bool] = False
    exempt: ClassVar[dict[str, str]] = UNROLLED
    settings: StickBreakingSettings

    def __init__(self, settings: StickBreakingSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        if settings.sink_logit != "none":
            raise ModelError(
                f"model.position.sink_logit '{settings.sink_logit}' is a column of a softmax, and "
                "'stick_breaking' has none: leave it at none, and set remainder to drop for weights that may "
                "sum to less than 1"
            )

    def plan(self, span: Span) -> Plan:
        before = span.keys.order.shape[1] - span.queries.order.shape[1]  # queries are the last of the keys
        pairs = span.pairs(rule=lambda b, h, i, j: j != i + before)
        keep = self.settings.remainder == "self"

        def weigh(block: Block) -> Tensor:
            z, hidden = block.scores, ~block.seen
            passed = F.logsigmoid(-z).masked_fill(hidden, 0.0)  # ln(1 − σ(z)), (B, H, t, s)
            weights = (F.logsigmoid(z) + sum_after(passed)).exp().masked_fill(hidden, 0.0)
            if not keep:
                return weights
            _, _, i, j = pairs.indices(block.start, block.stop, block.keys)
            return weights + passed.sum(-1, keepdim=True).exp() * (j == i + before)

        return Plan(read=lambda q, k: [View(q, k, pairs, weigh=weigh)])
