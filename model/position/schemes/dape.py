"""DAPE: a distance bias that a small network over the heads adapts to the attention logits."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
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
from settings.fields import counts_if_changed, setting


def kept_positive(r: Tensor) -> Tensor:
    """max(r, 0.01) with the gradient of r, so that a clamped parameter can increase again."""
    return r + (r.clamp(min=SMALLEST) - r).detach()


class DapeSettings(SharableSettings):
    """A bias of distance and a network over all heads' logits and biases (Zheng et al. 2024)."""

    name: Literal["dape"] = "dape"
    base: Literal["kerple", "alibi"] = setting("kerple", "bias B: logarithmic KERPLE, or ALiBi")
    width: int = setting(32, "hidden features of the network", ge=1)
    kernel: int = counts_if_changed(
        "neighboring keys that each layer of the network reads; 1: DAPE, 3: DAPE-V2",
        1,
        ge=1,
    )

    @model_validator(mode="after")
    def _keys_have_neighbors(self):
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} must be odd: as many keys before as after")
        if self.kernel > 1 and self.sinks:
            raise ValueError(
                f"kernel {self.kernel} reads neighboring keys and does not support window with "
                "sinks: set sinks to 0 or kernel to 1"
            )
        return self


class Dape(PositionalScheme):
    """logits = A + B + W2·LeakyReLU(W1·[A; B] + c), for each pair over the H heads: 2H → 32 → H, A
    = q·k/√D. Zheng et al. 2024 (arXiv:2405.14722) and their code.

    B_h(d) = −r1·ln(1 + r2·d) with r1 ~ U(0, 2), r2 ~ U(0, 1), as in KERPLE (Chi et al. 2022,
    arXiv:2205.09921), or ALiBi's −slope·d. The second layer has no bias, which the softmax would
    cancel. W1 ~ N(0, 1/2H); unlike in their code, W2 is initialized to 0, so training starts with
    the bias B alone.

    With `kernel: 3` it is DAPE-V2, Zheng et al. 2024 (arXiv:2410.04798): both layers are 1 × 3
    convolutions along the keys. A and B of masked keys are set to 0 before the convolutions,
    otherwise a query would read the future. The hidden features right after a query's own key are
    not 0: in the released code they are computed from the zeros beyond it, except for the last
    query, where they are 0. Here no query is such an exception, so that the result does not depend
    on later tokens.
    """

    exempt = UNROLLED
    settings: DapeSettings

    def setup(self):
        heads = self.geometry.heads
        width = self.settings.width
        inputs = 2 * heads * self.settings.kernel
        self.weight1 = self.learned((width, inputs), normal(inputs**-0.5))
        self.bias1 = self.learned((width,), constant(0.0))
        self.weight2 = self.learned((heads, width * self.settings.kernel), constant(0.0))
        kerple = self.settings.base == "kerple"
        self.r1 = self.learned((heads,), uniform(0.0, 2.0)) if kerple else None
        self.r2 = self.learned((heads,), uniform(0.0, 1.0)) if kerple else None
        self.constant_table(alibi_slopes(heads))

    def plan(self, context):
        mask = mask_per_row(context)
        (slopes,) = context.tables

        def weights_fn(block: QueryBlock) -> Tensor:
            scores = block.scores
            b = self._bias(block.distance.clamp(min=0).to(scores.dtype), slopes)  # (R, H, t, s)
            if self.settings.kernel > 1:
                mixed = self._along_keys(scores, b.expand_as(scores), block.visible)
                return block.weights_of(scores + b + mixed)
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

    def _along_keys(self, a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        """The network's output (B, H, t, s) for scores a and biases b (B, H, t, s), whose masked
        pairs are (R, 1, t, s) not visible."""
        kernel = self.settings.kernel
        reach = kernel // 2
        w1 = self.weight1.to(a.dtype).unflatten(1, (-1, 1, kernel))
        w2 = self.weight2.to(a.dtype).unflatten(1, (-1, 1, kernel))
        x = torch.where(visible, torch.cat([a, b], dim=1), 0.0)
        x = F.pad(x, (0, reach))
        hidden = F.leaky_relu(F.conv2d(x, w1, self.bias1.to(a.dtype), padding=(0, reach)))
        shifts = [F.pad(visible, (n, reach - n)) for n in range(reach + 1)]
        hidden = torch.where(torch.stack(shifts).any(0), hidden, 0.0)
        return F.conv2d(hidden, w2, padding=(0, reach))[..., : a.shape[-1]]

    def _bias(self, d: Tensor, slopes: Tensor) -> Tensor:
        """B (R, H, t, s) of distances (R, 1, t, s)."""
        if self.r1 is None or self.r2 is None:
            return -slopes[:, None, None] * d
        r1 = kept_positive(self.r1.to(d.dtype))[:, None, None]
        r2 = kept_positive(self.r2.to(d.dtype))[:, None, None]
        return -r1 * torch.log1p(r2 * d)
