"""Hyperbolic rotation, which is a decay of its own for every feature."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.pairs import Block, View, mask_dtype
from model.position.base import Geometry, Plan, Position, PositionSettings, Span
from model.position.rotary import check_even
from model.position.scaling import plain_frequencies
from model.position.table import wide

QUERIES = 16  # queries whose scores with each other are taken pair by pair: QUERIES² · D numbers a head


class HyperbolicSettings(PositionSettings):
    """Hyperbolic rotations, whose scores decay with the distance (HoPE, Dai et al. 2025)."""

    name: Literal["hyperbolic"] = "hyperbolic"
    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies fastest·b^(−2k/D)")
    fastest: float = Field(1.0, gt=0, description="largest frequency θ_0, per token")
    margin: float = Field(
        0.1, gt=0, description="decay rate θ' = θ_0·(1 + margin); the slowest feature decays at θ_0·margin"
    )
    damping: Literal["fixed", "learned"] = Field(
        "fixed", description="learned: every layer has a margin of its own, which starts at margin"
    )

    @property
    def per_layer(self) -> bool:
        return self.damping == "learned"


class Hyperbolic(Position):
    """HoPE: score = Σ_k e^(−dθ') q_kᵀ [[cosh dθ_k, sinh dθ_k], [sinh dθ_k, cosh dθ_k]] k_k over pairs of
    features (k, k + D/2), θ' > θ_k. Dai et al. 2025 (arXiv:2509.05218). Not Chen et al.'s HoPE, see p_rope.

    With u = (x1 + x2)/√2 and w = (x1 − x2)/√2 of a pair the matrix is diagonal:
    score = Σ_k e^(−(θ' − θ_k)d) u_q u_k + e^(−(θ' + θ_k)d) w_q w_k, a decay of its own for every feature.
    This is what is computed. The printed form, applied to q and k apart, cancels: e^(40θ) terms of opposite
    sign leave nothing of float64 after 40 tokens, and float32 overflows after 88.

    No factor exceeds 1, for whatever positions rise along a document (skipped, drawn or fractional). A query
    meets the keys before its block of 16 through e^(−γ(n − n0)) e^(−γ(n0 − m)), n0 the first position of the
    block's queries that see such keys, n0 ≥ m: where a factor vanishes, so does the score. The keys inside
    the block are taken pair by pair. Where positions fall along a document distances are negative and scores
    grow, as the formula has it. Keys are remembered in the coordinates u, w, without their positions.
    """

    remembers: ClassVar[str] = "plain keys, in the coordinates u and w"
    exempt: ClassVar[dict[str, str]] = {
        "graphs": "blocks of queries are unrolled: one graph for each length of a batch"
    }
    settings: HyperbolicSettings

    def __init__(self, settings: HyperbolicSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        self.log_margin = nn.Parameter(torch.empty(1)) if settings.damping == "learned" else None
        speeds = settings.fastest * plain_frequencies(settings.theta, geometry.head_dim)
        self._rests = torch.cat([speeds[0] - speeds, speeds[0] + speeds]).tolist()  # rates less θ_0·margin

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        if self.log_margin is not None:
            with torch.no_grad():
                self.log_margin.fill_(math.log(self.settings.margin))

    def rates(self, device: torch.device) -> Tensor:
        """(D,) γ: θ' − θ_k of the features u, then θ' + θ_k of the features w, per token."""
        rests = torch.tensor(self._rests, dtype=wide(device), device=device)
        if self.log_margin is None:
            return rests + self.settings.fastest * self.settings.margin
        return rests + self.settings.fastest * self.log_margin.to(rests.dtype).exp()

    def plan(self, span: Span) -> Plan:
        rates, dtype = self.rates(span.device), wide(span.device)
        q_position, k_position = span.queries.position.to(dtype), span.keys.position.to(dtype)
        pairs = span.pairs()

        def weigh(block: Block) -> Tensor:
            n, m = q_position[:, block.start : block.stop], k_position[:, block.keys]
            return block.softmax(decayed(block, n, m, rates.to(block.q.dtype)) * block.scale)

        return Plan(read=lambda q, k: [View(diagonal(q), k, pairs, weigh)], write=diagonal)


def diagonal(x: Tensor) -> Tensor:
    """(..., D) features → [u | w], the coordinates in which hyperbolic rotations are diagonal."""
    a, b = x.to(mask_dtype(x)).chunk(2, dim=-1)
    return (torch.cat([a + b, a - b], dim=-1) * math.sqrt(0.5)).to(x.dtype)


def decayed(block: Block, n: Tensor, m: Tensor, rates: Tensor) -> Tensor:
    """(B, H, t, s) Σ_c e^(−γ_c (n − m)) q_c k_c of the pairs that are seen; any finite number elsewhere.

    Args:
        block: the keys of its queries are its last, or where all keys are given those at the queries' index.
        n, m: positions (B or 1, t) and (B or 1, s).
        rates: (D,) γ.
    """
    queries, keys, seen = n.shape[1], m.shape[1], block.seen[:, 0]  # (R, t, s)
    # Queries are the last tokens of the pass, and a band's keys end with the block's queries.
    whole = block.pairs.keys - block.pairs.queries + block.start
    own = whole if keys == block.pairs.keys else keys - queries
    rows = []
    for start in range(0, queries, QUERIES):
        stop = min(start + QUERIES, queries)
        first, last = own + start, own + stop
        q, here, meets = block.q[:, :, start:stop], n[:, start:stop], seen[:, start:stop]
        near = block.k[:, :, first:last]
        parts = [_near(q, near, here, m[:, first:last], meets[:, :, first:last], rates)]
        if first > 0:
            far = block.k[:, :, :first]
            parts.insert(0, _far(q, far, here, m[:, :first], meets[:, :, :first], rates))
        if last < keys:  # the future
            parts.append(q.new_zeros(*q.shape[:3], keys - last))
        rows.append(torch.cat(parts, dim=-1))
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)


def _factors(exponent: Tensor, rates: Tensor) -> Tensor:
    """(B or 1, t) → (B or 1, 1, t, D) e^(−γ · exponent)."""
    return (-exponent.to(rates.dtype)[:, None, :, None] * rates).exp()


def _near(q: Tensor, k: Tensor, n: Tensor, m: Tensor, seen: Tensor, rates: Tensor) -> Tensor:
    """Pair by pair. Hidden pairs may have any distance, in another document, and count as near."""
    distance = torch.where(seen, n[:, :, None] - m[:, None, :], 0.0).to(rates.dtype)  # (B or 1, t, s)
    decay = (-distance[..., None] * rates).exp()[:, None]  # (B or 1, 1, t, s, D)
    return torch.einsum("bhtsc,bhsc->bhts", q[:, :, :, None] * decay, k)


def _far(q: Tensor, k: Tensor, n: Tensor, m: Tensor, seen: Tensor, rates: Tensor) -> Tensor:
    """Keys before all queries, rebased to the first query that sees any of them.

    Queries that see none, because their document begins in this block, and keys that are not seen, because
    theirs has ended, have no say in the base and no factor."""
    asks, asked = seen.any(2), seen.any(1)  # (R, t), (R, s)
    base = torch.where(asks, n, math.inf).amin(1, keepdim=True)  # (B or 1, 1)
    q = q * _factors(torch.where(asks, n - base, 0.0), rates)
    k = k * _factors(torch.where(asked, base - m, 0.0), rates)
    return q @ k.transpose(-1, -2)
