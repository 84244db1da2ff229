"""Transformer-XL's relative attention: sinusoids of the distance, projected, with two global biases."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.pairs import Block, View, mask_dtype
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.places import Places
from model.position.table import Table
from model.position.weighing import UNROLLED, distances, pairs_by_position, refuse_fractions

THETA = 10_000.0


class TransformerXLSettings(PositionSettings):
    """Logits of the content and of a projected sinusoid of the distance, each with a learned bias in place
    of the query (Dai et al. 2019)."""

    name: Literal["transformer_xl"] = "transformer_xl"
    shared: bool = Field(False, description="one W, u and v for all layers; false: each layer has its own")

    @property
    def per_layer(self) -> bool:
        return not self.shared


class TransformerXL(Position):
    """logit = (q_n·k_m + q_n·W r_d + u·k_m + v·W r_d)/√D, d = n − m, with sinusoids of width C
    r_d = [sin(dθ_i) | cos(dθ_i)], θ_i = 10000^(−2i/C). Dai et al. 2019 (arXiv:1901.02860), section 3.3.

    W (H·D, C) is drawn from N(0, 1/C); u and v (H, D) start at 0. A logit temperature scales q, not u and v.
    The products with r are taken once for each distance and gathered; `rel_shift`, which is off by one where
    the cache is longer than the queries, is not used, so that positions may skip and documents be packed.
    """

    takes_fractions: ClassVar[bool] = False
    exempt: ClassVar[dict[str, str]] = UNROLLED
    settings: TransformerXLSettings

    def __init__(self, settings: TransformerXLSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        heads, dim = geometry.heads, geometry.head_dim
        self.weight = nn.Parameter(torch.empty(heads * dim, geometry.dim))
        self.u = nn.Parameter(torch.empty(heads, dim))
        self.v = nn.Parameter(torch.empty(heads, dim))
        self._table = Table(self._rows)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        drawn = torch.randn(self.weight.shape, generator=generator) * self.geometry.dim**-0.5
        with torch.no_grad():
            self.weight.copy_(drawn)
            self.u.zero_()
            self.v.zero_()

    def _rows(self, distance: Tensor) -> tuple[Tensor, ...]:
        dim = self.geometry.dim
        speeds = THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = distance[..., None] * speeds
        return (torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim],)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(1, reach, C) r of every distance from 0: none is longer than the largest position."""
        refuse_fractions(places, self.settings.name)
        every = torch.arange(places.reach, device=places.position.device)[None]
        return self._table.look_up(every, places.reach, dtype)

    def plan(self, span: Span) -> Plan:
        pairs, keys = pairs_by_position(span), span.keys
        r = span.tables[0][0]  # (N, C), N distances
        if keys.layout == "plain" and keys.unit_steps:
            r = r[: keys.order.shape[1]]  # wherever the positions start
        # The projections of all distances, or those of the queries: whichever are fewer products.
        few = span.queries.order.shape[1] < self.geometry.head_dim

        def read(q: Tensor, k: Tensor) -> list[View]:
            rows, dtype = r.to(mask_dtype(q)), mask_dtype(q)
            weight = self.weight.to(dtype).unflatten(0, self.u.shape)  # (H, D, C)
            with torch.autocast(q.device.type, enabled=False):
                projected = None if few else torch.einsum("hdc,nc->hdn", weight, rows)

            def weigh(block: Block) -> Tensor:
                asks = block.q + self.v.to(dtype)[:, None]  # (B, H, t, D)
                by_distance = asks @ weight @ rows.T if projected is None else asks @ projected
                content = block.scores + self.u.to(dtype)[:, None] @ block.k.mT * block.scale
                found = by_distance.gather(-1, distances(block, rows.shape[0] - 1))
                return block.softmax(content + found * block.scale)

            return [View(q, k, pairs, weigh=weigh)]

        return Plan(read=read)
