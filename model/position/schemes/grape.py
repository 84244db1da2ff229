"""GRAPE's additive biases: ALiBi with a rate computed from the query, and sums of gates along the
path between query and key."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import ModelError
from model.attention.mask import AttentionView, QueryBlock, by_head, precise
from model.position.content import ContentSettings, linear
from model.position.interface import (
    AttentionPlan,
    ContentScheme,
    PositionalScheme,
    PositionSettings,
    constant,
    normal,
)
from model.position.pairwise import UNROLLED, sum_after
from model.position.schemes.alibi import alibi_slopes
from model.position.schemes.rope import rotate
from model.position.table import LookupTable
from settings.fields import setting


class GrapeASettings(PositionSettings):
    """ALiBi with a rate computed from each query (query-gated GRAPE-A, Zhang et al. 2025)."""

    per_layer = True

    name: Literal["grape_a"] = "grape_a"


class GrapeA(PositionalScheme):
    """logit −= d·slope_h·softplus(w_h)·softplus(v_h·q/√D), |v_h| = 1, with ALiBi's slopes.

    Zhang et al. 2025, GRAPE (arXiv:2512.07805), in the query-gated form of the released code. The
    paper has ω_h·softplus(v_h·q); slopes, the unit length of v and 1/√D are in the code only. q is
    the query as attention uses it, after `model.qk_norm`, which the released models have. At the
    start softplus(w) = 1, so that the mean rate is near ln 2 times that of ALiBi.
    """

    reads_features = True
    settings: GrapeASettings

    def setup(self):
        heads = self.geometry.heads
        features = self.geometry.head_dim
        self.rate = self.learned((heads,), constant(math.log(math.expm1(1.0))))  # w
        self.direction = self.learned((heads, features), normal(features**-0.5))  # v
        self.constant_table(alibi_slopes(heads))

    def plan(self, context):
        separation = context.separation()
        (slopes,) = context.tables

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            v = F.normalize(precise(self.direction), dim=-1)[:, None]
            gate = F.softplus((precise(q) * v).sum(-1) / self.geometry.head_dim**0.5)
            rates = gate * (F.softplus(precise(self.rate)) * slopes)[:, None]  # (B, H, K)
            mask = context.mask(
                bias=lambda b, h, i, j: -separation(b, i, j) * rates[b, h, i],
                by_row=True,
            )
            return [AttentionView(q, k, mask)]

        return AttentionPlan(read, linear=False, is_unordered=True)


class GrapeApSettings(ContentSettings):
    """A penalty summed up along the path from key to query (GRAPE-AP, Zhang et al. 2025)."""

    reads_between = True

    name: Literal["grape_ap"] = "grape_ap"
    gate_features: int = setting(8, "F, features of p for each head, an even number", ge=2)


class GrapeAp(ContentScheme):
    """logit += slope_h·Σ_{l=m+1..n} ln σ(p_n·R(l)ᵀ p̂_l / F), p = W x with F = 8 features for each
    head, p̂ = p / RMS(p), with ALiBi's slopes; 0 for n = m.

    Zhang et al. 2025, GRAPE (arXiv:2512.07805), in the form of the released code, which was
    trained: p of the query is neither normalized nor rotated, and R(l) turns all pairs (k, k + F/2)
    by l radians. The bias therefore depends on the absolute positions of the tokens between.
    """

    cached_form = "plain keys, p and rotated p̂"
    exempt: ClassVar[dict[str, str]] = UNROLLED | {
        "shift": "p̂ is rotated by absolute positions, and p of the query is not"
    }
    projections = ("project",)
    settings: GrapeApSettings

    def setup(self):
        features = self.settings.gate_features
        if features % 2:
            raise ModelError(f"model.position.gate_features = {features} must be even")
        dim = self.geometry.dim
        heads = self.geometry.heads
        self.project = self.learned((heads * features, dim), normal(0.5 * dim**-0.5))  # W
        self.constant_table(alibi_slopes(heads))
        self._table = LookupTable(lambda n: (n.cos()[..., None], n.sin()[..., None]))

    def tables(self, positions, dtype):
        """(H,) slopes, and cos and sin of the positions, (B or 1, T, 1)."""
        turns = self._table.look_up(positions.position, positions.position_end, dtype)
        return super().tables(positions, dtype) + turns

    def features(self, x, tables):
        """(B, T, 2·H·F): p and rotated p̂."""
        features = self.settings.gate_features
        cos, sin = (table.expand(-1, -1, features // 2) for table in tables[1:])
        p = by_head(linear(x, self.project), self.geometry.heads)
        rotated = rotate(F.rms_norm(p, (features,)), cos, -sin)
        return torch.cat([p, rotated], dim=1).transpose(1, 2).flatten(2)

    def read(self, q, k, own, extras, plan):
        slopes = plan.context.tables[0][:, None, None]
        p, _ = by_head(own, 2 * self.geometry.heads).chunk(2, dim=1)  # (B, H, K, F)
        _, rotated = by_head(extras, 2 * self.geometry.heads).chunk(2, dim=1)  # (B, H, S, F)

        def weights_fn(block: QueryBlock) -> Tensor:
            products = p[:, :, block.start : block.stop] @ rotated[:, :, block.keys].mT
            gates = F.logsigmoid(products / self.settings.gate_features)
            gates = torch.where(block.visible, gates, 0.0)
            return block.weights_of(block.scores + slopes * sum_after(gates))

        return [AttentionView(q, k, plan.mask, weights_fn)]
