"""CoPE: contextual positions, counted by gates between query and key."""

from typing import Literal

from torch import Tensor

from model.attention.mask import QueryBlock
from model.position.interface import (
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
    constant,
)
from model.position.pairwise import UNROLLED, sum_from
from settings.fields import setting


class CopeSettings(SharableSettings):
    """Contextual positions: gates per query-key pair are summed to positions (Golovneva et al.
    2024)."""

    name: Literal["cope"] = "cope"
    positions: int = setting(64, "P: number of positions; counts are clamped to P − 1", ge=2)
    gate: Literal["scaled", "unscaled"] = setting(
        "scaled",
        "gates are σ(q·k/√D), as released, or σ(q·k), as in the paper",
    )


class Cope(PositionalScheme):
    """logit += (1 − w)·q_n·e[⌊p⌋] + w·q_n·e[⌊p⌋ + 1], p = min(Σ_{j=m..n} g_nj, P − 1), w = p − ⌊p⌋,
    with gates g_nj = σ(q_n·k_j/√D). Golovneva et al. 2024 (arXiv:2405.18719), section 4.

    As in the authors' listing, gates use the scaled logits (``gate: scaled``), q·e is added after
    the 1/√D scale, the heads share e (P, D), and e is initialized to 0, which is NoPE. A logit
    temperature scales q, and therefore the gates. Only visible keys are counted: with a window,
    sinks continue the count of the window's oldest key. P cannot be changed after training: rows
    that no count has reached are untrained.
    """

    uses_position = False
    reads_features = True
    exempt = UNROLLED
    settings: CopeSettings

    def setup(self):
        self.weight = self.learned((self.settings.positions, self.geometry.head_dim), constant(0.0))

    def plan(self, context):
        return AttentionPlan.from_mask(context.mask(), self._weights)

    def _weights(self, block: QueryBlock) -> Tensor:
        scores = block.scores + block.additive
        last = self.settings.positions - 1
        rows = block.q @ self.weight.to(scores.dtype).T  # (B, H, t, P)
        gates = (scores if self.settings.gate == "scaled" else scores / block.scale).sigmoid()
        p = sum_from(gates).clamp(max=last)  # (B, H, t, s)
        low = p.detach().long().clamp(max=last - 1)  # at p = P − 1 the weight of the upper row is 1
        here = rows.gather(-1, low)
        step = rows.diff(dim=-1).gather(-1, low)
        return block.weights_of(scores + here + (p - low) * step)
