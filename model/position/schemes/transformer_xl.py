"""Transformer-XL relative attention: projected sinusoids of the distance, and two global biases."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import AttentionView, QueryBlock, mask_dtype, no_autocast
from model.position.interface import (
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
    constant,
    normal,
)
from model.position.pairwise import UNROLLED, distances, mask_per_row
from model.position.scaling import plain_frequencies
from model.position.table import LookupTable

THETA = 10_000.0


class TransformerXLSettings(SharableSettings):
    """Content logits plus logits of a projected sinusoid of the distance, each with a learned bias
    (Dai et al. 2019)."""

    name: Literal["transformer_xl"] = "transformer_xl"


class TransformerXL(PositionalScheme):
    """logit = (q_n·k_m + q_n·W r_d + u·k_m + v·W r_d)/√D, d = n − m, with sinusoids of width C r_d
    = [sin(dθ_i) | cos(dθ_i)], θ_i = 10000^(−2i/C). Dai et al. 2019 (arXiv:1901.02860), section 3.3.

    W (H·D, C) is initialized from N(0, 1/C), u and v (H, D) to 0. A logit temperature scales q, not
    u and v. The products with r are computed once per distance and gathered, which supports skipped
    positions and packed documents. `rel_shift` is not used; it is off by one if there are more
    cached keys than queries.
    """

    supports_fractions = False
    reads_features = True
    exempt = UNROLLED
    projections = ("weight",)
    settings: TransformerXLSettings

    def setup(self):
        heads = self.geometry.heads
        features = self.geometry.head_dim
        dim = self.geometry.dim
        self.weight = self.learned((heads * features, dim), normal(dim**-0.5))
        self.u = self.learned((heads, features), constant(0.0))
        self.v = self.learned((heads, features), constant(0.0))
        self._table = LookupTable(self._rows)

    def _rows(self, distance: Tensor) -> tuple[Tensor, ...]:
        dim = self.geometry.dim
        angles = distance[..., None] * plain_frequencies(THETA, dim)
        return (torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim],)

    def tables(self, positions, dtype):
        """(1, N, C) r of the distances 0, ..., N − 1, N = `position_end`."""
        every = torch.arange(positions.position_end, device=positions.device)[None]
        return self._table.look_up(every, positions.position_end, dtype)

    def plan(self, context):
        mask = mask_per_row(context)
        keys = context.keys
        r = context.tables[0][0]  # (N, C), N distances
        if keys.layout == "plain" and keys.unit_steps:
            r = r[: keys.count]  # independent of the first position
        # Project all distances, or the queries, whichever is cheaper.
        few = context.queries.count < self.geometry.head_dim

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            dtype = mask_dtype(q)
            rows = r.to(dtype)
            weight = self.weight.to(dtype).unflatten(0, self.u.shape)  # (H, D, C)
            with no_autocast(q):
                projected = None if few else torch.einsum("hdc,nc->hdn", weight, rows)

            def weights_fn(block: QueryBlock) -> Tensor:
                asks = block.q + self.v.to(dtype)[:, None]  # (B, H, t, D)
                by_distance = asks @ weight @ rows.T if projected is None else asks @ projected
                content = block.scores + self.u.to(dtype)[:, None] @ block.k.mT * block.scale
                positional = by_distance.gather(-1, distances(block, rows.shape[0] - 1))
                return block.weights_of(content + positional * block.scale)

            return [AttentionView(q, k, mask, weights_fn)]

        return AttentionPlan(read=read)
