"""CoPE: positions counted by the content between query and key."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.pairs import Block, View
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.weighing import UNROLLED, sum_from


class CopeSettings(PositionSettings):
    """Contextual positions: each query counts the keys that its gates let through (Golovneva et al. 2024)."""

    name: Literal["cope"] = "cope"
    positions: int = Field(64, ge=2, description="P: counts are clamped to P − 1; rows of the table")
    gate: Literal["scaled", "unscaled"] = Field(
        "scaled", description="gates are σ(q·k/√D), as released, or σ(q·k), as the paper writes them"
    )
    shared: bool = Field(False, description="one table for all layers; false: each layer has its own")

    @property
    def per_layer(self) -> bool:
        return not self.shared


class Cope(Position):
    """logit += (1 − w)·q_n·e[⌊p⌋] + w·q_n·e[⌊p⌋ + 1], p = min(Σ_{j=m..n} g_nj, P − 1), w = p − ⌊p⌋, with
    gates g_nj = σ(q_n·k_j/√D). Golovneva et al. 2024 (arXiv:2405.18719), section 4.

    As in the authors' listing the gates read the scaled logits (``gate: scaled``), q·e is added after the
    1/√D scale and is not scaled itself, the heads share e (P, D), and e starts at 0, which is NoPE. A logit
    temperature scales q, and so the gates too. Only visible keys are counted: with a window p ends there, and
    sinks follow on the window's oldest key. P cannot be changed after training: rows that no count has
    reached are untrained.
    """

    uses_position: ClassVar[bool] = False
    exempt: ClassVar[dict[str, str]] = UNROLLED
    settings: CopeSettings

    def __init__(self, settings: CopeSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        self.weight = nn.Parameter(torch.empty(settings.positions, geometry.head_dim))

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        nn.init.zeros_(self.weight)

    def plan(self, span: Span) -> Plan:
        pairs = span.pairs()
        return Plan(read=lambda q, k: [View(q, k, pairs, weigh=self._weigh)])

    def _weigh(self, block: Block) -> Tensor:
        scores, last = block.scores, self.settings.positions - 1
        gates = (scores if self.settings.gate == "scaled" else scores / block.scale).sigmoid()
        p = sum_from(gates.masked_fill(~block.seen, 0.0)).clamp(max=last)  # (B, H, t, s)
        rows = block.q @ self.weight.to(scores.dtype).T  # (B, H, t, P)
        low = p.detach().long().clamp(max=last - 1)  # at p = P − 1 the weight of the upper row is 1
        here, next_ = rows.gather(-1, low), rows.gather(-1, low + 1)
        return block.softmax(scores + here + (p - low) * (next_ - here))
