"""DAPE: a distance bias that a small network over the heads adapts to the attention logits."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import QueryBlock
from model.position.interface import (
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
    constant,
    normal,
    uniform,
)
from model.position.pairwise import UNROLLED, mask_per_row, over_pairs, pair_product
from model.position.schemes.alibi import alibi_slopes
from model.position.schemes.kerple import SMALLEST
from model.position.table import Constant
from settings.fields import setting


def kept_positive(r: Tensor) -> Tensor:
    """max(r, 0.01) with the gradient of r, so that a clamped parameter can increase again."""
    return r + (r.clamp(min=SMALLEST) - r).detach()


class DapeSettings(SharableSettings):
    """A bias of distance and a network over all heads' logits and biases (Zheng et al. 2024)."""

    name: Literal["dape"] = "dape"
    base: Literal["kerple", "alibi"] = setting("kerple", "bias B: logarithmic KERPLE, or ALiBi")
    width: int = setting(32, "hidden features of the network", ge=1)


class Dape(PositionalScheme):
    """logits = A + B + W2·LeakyReLU(W1·[A; B] + c), for each pair over the H heads: 2H → 32 → H, A
    = q·k/√D. Zheng et al. 2024 (arXiv:2405.14722) and their code.

    B_h(d) = −r1·ln(1 + r2·d) with r1 ~ U(0, 2), r2 ~ U(0, 1), as in KERPLE (Chi et al. 2022,
    arXiv:2205.09921), or ALiBi's −slope·d. The second layer has no bias, which the softmax would
    cancel. W1 ~ N(0, 1/2H); unlike in their code, W2 is initialized to 0, so training starts with
    the bias B alone.
    """

    exempt = UNROLLED
    settings: DapeSettings

    def setup(self):
        heads = self.geometry.heads
        width = self.settings.width
        self.weight1 = self.learned((width, 2 * heads), normal((2 * heads) ** -0.5))
        self.bias1 = self.learned((width,), constant(0.0))
        self.weight2 = self.learned((heads, width), constant(0.0))
        kerple = self.settings.base == "kerple"
        self.r1 = self.learned((heads,), uniform(0.0, 2.0)) if kerple else None
        self.r2 = self.learned((heads,), uniform(0.0, 1.0)) if kerple else None
        self._slopes = Constant(alibi_slopes(heads)[None])

    def tables(self, positions, dtype):
        return (self._slopes.to(positions.device, dtype),)

    def plan(self, context):
        mask = mask_per_row(context)
        slopes = context.tables[0][0]

        def weights_fn(block: QueryBlock) -> Tensor:
            scores = block.scores
            b = self._bias(block.distance.clamp(min=0).to(scores.dtype), slopes)  # (R, H, t, s)
            w1 = self.weight1.to(scores.dtype)
            w2 = self.weight2.to(scores.dtype)
            of_a, of_b = w1.tensor_split(2, dim=1)
            constant = self.bias1.to(scores.dtype)[:, None]

            def network(a: Tensor, b: Tensor) -> Tensor:
                hidden = pair_product(of_a, a, constant) + pair_product(of_b, b)
                return pair_product(w2, F.leaky_relu(hidden))

            # Matrix products over the heads, with flattened pairs.
            a_pairs = scores.transpose(0, 1).flatten(1)
            b_pairs = b.expand_as(scores).transpose(0, 1).flatten(1)
            mixed = over_pairs(network, len(w2), a_pairs, b_pairs)
            mixed = mixed.view(-1, len(scores), *scores.shape[2:]).transpose(0, 1)
            return block.weights_of(scores + b + mixed)

        return AttentionPlan.from_mask(mask, weights_fn)

    def _bias(self, d: Tensor, slopes: Tensor) -> Tensor:
        """B (R, H, t, s) of distances (R, 1, t, s)."""
        if self.r1 is None or self.r2 is None:
            return -slopes[:, None, None] * d
        r1 = kept_positive(self.r1.to(d.dtype))[:, None, None]
        r2 = kept_positive(self.r2.to(d.dtype))[:, None, None]
        return -r1 * torch.log1p(r2 * d)
