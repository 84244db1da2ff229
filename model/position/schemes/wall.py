"""Wall attention: every feature decays by gates computed from the tokens."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionView, QueryBlock, by_head
from model.position.content import ContentSettings, latest, linear, running_sum
from model.position.interface import ContentScheme, constant, normal
from model.position.pairwise import UNROLLED, decayed_scores
from settings.fields import setting


class WallSettings(ContentSettings):
    """Cumulative gates for every feature of every head, computed from each token (Wall attention,
    2026)."""

    name: Literal["wall"] = "wall"
    gate_bias: float = setting(
        8.0,
        "initial bias of the gates; at 8 a feature keeps 0.9997 per token",
    )


class Wall(ContentScheme):
    """logit = Σ_c q_nc k_mc e^(P_nc − P_mc)/√D, P_n = Σ_{t≤n} ln σ(W x_t + β) for each query head
    and feature. FoX has one gate per head, which it adds to the logit.

    Averbuch and Pai 2026, as in flash-linear-attention 0.6.0 (`parallel_wall_attn`); without a
    paper. β starts at `gate_bias`.
    """

    cached_form = "plain keys and cumulative log gates of every feature"
    uses_position = False
    reads_features = True
    exempt = UNROLLED
    projections = ("weight",)
    settings: WallSettings

    def setup(self):
        dim = self.geometry.dim
        gates = self.geometry.heads * self.geometry.head_dim
        self.weight = self.learned((gates, dim), normal(dim**-0.5))
        self.bias = self.learned((gates,), constant(self.settings.gate_bias))

    def features(self, x, tables):
        """(B, T, H·D) log gates."""
        return F.logsigmoid(linear(x, self.weight, self.bias))

    def accumulate(self, features, past, new, tables):
        # In float64, because float32 cannot resolve single gates after 50,000 tokens.
        return running_sum(features.double(), latest(past), new)

    def read(self, q, k, own, extras, plan):
        k_decay = by_head(extras, self.geometry.heads)
        q_decay = by_head(own, self.geometry.heads)

        def weights(block: QueryBlock) -> Tensor:
            here = q_decay[:, :, block.start : block.stop]
            scores = decayed_scores(block, here, k_decay[:, :, block.keys])
            return block.weights_of(scores * block.scale)

        return [AttentionView(q, k, plan.mask, weights)]
