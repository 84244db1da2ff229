"""PaTH attention: the path between two tokens is a product of reflections that the tokens say."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from model.pairs import Block, View, precise, repeated
from model.position.base import ContentPlan, Geometry, Position, Span
from model.position.content import (
    ContentSettings,
    causal_convolution,
    drawn,
    latest,
    linear,
    series_of,
)

CHUNK = 128  # keys whose product is worked at once; the work of a pair is D + CHUNK


class PathSettings(ContentSettings):
    """Products of Householder-like matrices between query and key (PaTH, Yang et al. 2025)."""

    name: Literal["path"] = "path"
    rank: int = Field(32, ge=1, description="features that the directions w are read from")
    width: int = Field(3, ge=2, description="tokens of the convolution, the token itself included")

    @model_validator(mode="after")
    def _every_token_between_is_remembered(self):
        if self.window is not None and self.sinks:
            raise ValueError(
                "'path' needs every token between query and key, and a window forgets those between the sinks"
                " and itself: set sinks to 0 or window to null"
            )
        return self


class Path(Position):
    """logit = q_nᵀ H_n H_{n−1} ⋯ H_{m+1} k_m / √D, H_t = I − β_t w_t w_tᵀ, β_t = 2 σ(u_g·x_t + b_g).

    w_t = silu(conv_3(W₂ W₁ x))/‖·‖, rank 32, for each key/value head. Yang et al. 2025, PaTH attention
    (arXiv:2505.16381), without the optional forgetting gate; the scale 1/√D multiplies the whole product, as
    in FLA's `naive_path_attn`. Checked against the product spelled out; run once beside that function, given
    the same w and β, outputs agreed to 1e-6 in float32; how w is made is not checked against released code.
    Keys stay plain and the product is worked anew in each pass, by the UT transform chunk by chunk, in time
    T·S·(D + chunk) and memory linear in S.
    """

    remembers: ClassVar[str] = "plain keys, directions w and strengths β"
    uses_position: ClassVar[bool] = False
    exempt: ClassVar[dict[str, str]] = {
        "window": "the product between two tokens is read from the tokens between and, by the convolution, "
        "from those just before them"
    }
    settings: PathSettings

    def __init__(self, settings: PathSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        groups, features = geometry.kv_heads, geometry.head_dim
        self.down = nn.Parameter(torch.empty(settings.rank, geometry.dim))
        self.up = nn.Parameter(torch.empty(groups * features, settings.rank))
        self.conv = nn.Parameter(torch.empty(groups * features, settings.width))
        self.strength = nn.Parameter(torch.empty(groups, geometry.dim))
        self.strength_bias = nn.Parameter(torch.empty(groups))

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """Strengths start near 1, a projection: u is N(0, 1/(100·C)), b 0. W₁ is N(0, 1/C), W₂ N(0, 1/rank),
        the convolution N(0, 1/width); the length of w is of no account."""
        drawn(self.down, self.geometry.dim**-0.5, generator)
        drawn(self.up, self.settings.rank**-0.5, generator)
        drawn(self.conv, self.settings.width**-0.5, generator)
        drawn(self.strength, 0.1 * self.geometry.dim**-0.5, generator)
        with torch.no_grad():
            self.strength_bias.zero_()

    def plan(self, span: Span) -> ContentPlan:
        groups, features = self.geometry.kv_heads, self.geometry.head_dim
        sizes = [groups * features, groups]

        def note(x: Tensor, past: Tensor | None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                x, before = precise(x), latest(past)
                history = None if before is None else before[:, sum(sizes) :]
                series, remembered = series_of(linear(x, self.down), history, self.settings.width)
                w = F.silu(causal_convolution(linear(series, self.up), self.conv, span.new.order))
                w = w.unflatten(-1, (groups, features))
                w = w * (w.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
                strength = 2 * linear(x, self.strength, self.strength_bias).sigmoid()
                return torch.cat([w.flatten(2), strength, remembered], dim=-1)

        pairs = span.pairs()

        def read(q: Tensor, k: Tensor, notes: Tensor) -> list[View]:
            w = notes[..., : sizes[0]].unflatten(-1, (groups, features)).transpose(1, 2)  # (B, G, S, D)
            strength = notes[..., sizes[0] : sum(sizes)].transpose(1, 2)[..., None]  # (B, G, S, 1)

            def weigh(block: Block) -> Tensor:
                parts = (repeated(x[:, :, block.keys], span.heads).to(block.q.dtype) for x in (w, strength))
                return block.softmax(along_paths(block, *parts) * block.scale)

            return [View(q, k, pairs, weigh=weigh)]

        return ContentPlan(note, read)


def along_paths(block: Block, w: Tensor, strength: Tensor) -> Tensor:
    """(B, H, t, s) q_nᵀ H_n ⋯ H_{m+1} k_m of a block; w is (B, H, s, D), strength (B, H, s, 1).

    The queries walk back from chunk to chunk of keys. Within one, with M = strictLower(diag(β) W Wᵀ) and
    Y = (Q Wᵀ)(I + M)⁻¹ diag(β), they meet its keys as Q Kᵀ − Y strictLower(W Kᵀ) and leave it as Q − Y W;
    Q Wᵀ is lower triangular among the queries' own tokens. What stands in other documents or in padding
    needs no mask: the product between two tokens contains the tokens between them and no other.
    """
    q, k = block.q, block.k
    keys, pairs = block.keys, block.pairs
    assert isinstance(keys, slice)  # without sinks
    own = pairs.keys - pairs.queries + block.start - keys.start  # the first query's own token
    edges = [own, *range(own - CHUNK, 0, -CHUNK), 0] if own else [0]
    parts: list[Tensor] = []
    stop = own + q.shape[2]
    future = k.shape[2] - stop
    for start in edges:
        here = slice(start, stop)
        w_here, k_here, strengths = w[:, :, here], k[:, :, here], strength[:, :, here]
        met = q @ w_here.mT
        met = met.tril() if start == own else met
        system = (strengths * (w_here @ w_here.mT)).tril(-1)
        y = torch.linalg.solve_triangular(system, met, upper=False, left=False, unitriangular=True)
        y = y * strengths.mT
        parts.insert(0, q @ k_here.mT - y @ (w_here @ k_here.mT).tril(-1))
        q, stop = q - y @ w_here, start
    return F.pad(torch.cat(parts, dim=-1), (0, future))
