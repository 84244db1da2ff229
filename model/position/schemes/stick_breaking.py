"""Stick-breaking attention: each key takes a fraction of the weight that nearer keys leave."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from errors import ModelError
from model.attention.mask import MaskFunction, QueryBlock
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
)
from model.position.pairwise import UNROLLED, sum_after
from settings.fields import setting


class StickBreakingSettings(PositionSettings):
    """Stick-breaking weights, from the nearest key backwards, instead of a softmax (Tan et al.
    2024)."""

    name: Literal["stick_breaking"] = "stick_breaking"
    remainder: Literal["self", "drop"] = setting(
        "self",
        "add the remaining weight to the query's own value, or drop it",
    )


class StickBreaking(PositionalScheme):
    """A_nm = σ(z_nm)·Π_{m<j<n} (1 − σ(z_nj)) for m < n, z = q·k/√D; the rest Π_{j<n} (1 − σ(z_nj))
    of the stick goes to v_n or is dropped. Tan et al. 2024 (arXiv:2410.17980).

    Only strictly earlier keys get weights: a window of w contains w − 1 of them, and the first
    token of a document has only its remainder. Computed by sums of logarithms. Without a softmax
    there is no sink; the remainder has that role.
    """

    uses_position = False
    exempt = UNROLLED
    settings: StickBreakingSettings

    def setup(self):
        s = self.settings
        if (s.sink_logit, s.weights) != ("none", "softmax"):
            raise ModelError(
                "'stick_breaking' has weights of its own: set model.position.sink_logit to none "
                "and model.position.weights to softmax; remainder = drop makes weights sum to less "
                "than 1"
            )

    def plan(self, context):
        is_own = self._is_own_key(context)
        mask = context.mask(mask_mod=lambda b, h, i, j: ~is_own(b, h, i, j))
        keep = self.settings.remainder == "self"

        def weights_fn(block: QueryBlock) -> Tensor:
            z = block.scores
            hidden = ~block.visible
            passed = F.logsigmoid(-z).masked_fill(hidden, 0.0)  # ln(1 − σ(z)), (B, H, t, s)
            weights = (F.logsigmoid(z) + sum_after(passed)).exp().masked_fill(hidden, 0.0)
            if not keep:
                return weights
            own = is_own(*mask.indices(block.start, block.stop, block.keys))
            return weights + passed.sum(-1, keepdim=True).exp() * own

        return AttentionPlan.from_mask(mask, weights_fn)

    @staticmethod
    def _is_own_key(context: AttentionContext) -> MaskFunction:
        """Whether a key is that of the query's token."""
        keys = context.keys
        queries = context.queries
        if queries.layout == "plain":
            before = keys.count - queries.count  # the queries are the last keys
            return lambda b, h, i, j: j == i + before
        q_order = queries.order.expand(context.batch, -1)
        q_document = queries.document.expand(context.batch, -1)
        k_order = keys.order.expand(context.batch, -1)
        k_document = keys.document.expand(context.batch, -1)

        def is_own(b, h, i, j):
            return (q_order[b, i] == k_order[b, j]) & (q_document[b, i] == k_document[b, j])

        return is_own
