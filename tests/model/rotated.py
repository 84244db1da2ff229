"""Evaluate a scheme without a model, and reference scores in float64, head by head and pair by
pair.

Positions are large, fractional and have gaps; 37 tokens are two blocks of 16 and a remainder.
"""

from __future__ import annotations

import math

import torch

from model import SCHEMES, TokenPositions
from model.attention.kernels import attend
from model.position import HeadGeometry, PositionalScheme
from tests.model.dense_remap import D, G, H, context_of

L0 = 16
THETA = 50.0
POSITIONS = [0, 1, 2, 4.5, 5, 5.25, 9, 30, 31, 32.5]
POSITIONS += [*range(33, 53), 90, 91, 91.5, 92, 700, 701, 5000]
LAYOUTS = ["half", "interleaved"]


def made(name: str, features: int = D, spread: float = 0.4, **keys) -> PositionalScheme:
    """The scheme alone, in float64, its parameters moved away from their initial values."""
    settings, scheme = SCHEMES[name]
    out = scheme(
        settings(**{"theta": THETA, **keys}), HeadGeometry(28, H, features, L0, L0, G)
    ).double()
    generator = torch.Generator().manual_seed(3)
    out.initialize(generator, 1.0)
    with torch.no_grad():
        for p in out.parameters():
            p += spread * torch.randn(p.shape, generator=generator)
    return out


def through(
    scheme: PositionalScheme, positions: TokenPositions, q, k, v, kernel: str = "auto"
) -> torch.Tensor:
    plan = scheme.plan(context_of(scheme, positions))
    return attend(plan.read(q, plan.write(k)), v, D**-0.5, kernel)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, h // (H // G)] for h in range(H)], dim=1)


def answers(
    scores: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    count = scores.shape[-1]
    seen = torch.ones(count, count).tril().bool() if seen is None else seen
    return (scores * D**-0.5).masked_fill(~seen, -math.inf).softmax(-1) @ by_head(v)


def distances(positions) -> torch.Tensor:
    """(T, T), 0 in the future."""
    n = torch.tensor(positions, dtype=torch.float64)
    return (n[:, None] - n[None, :]).tril()


def pair_of(k: int, layout: str) -> tuple[int, int]:
    return (k, k + D // 2) if layout == "half" else (2 * k, 2 * k + 1)


def rope_pair(q, k, features: tuple[int, int], angle: torch.Tensor) -> torch.Tensor:
    """(B, T, T) q_nᵀ R(−angle) k_m of one head's pair; angle (T, T) is that of n − m."""
    a, b = features
    qa = q[..., a, None]
    qb = q[..., b, None]
    ka = k[..., None, :, a]
    kb = k[..., None, :, b]
    return (qa * ka + qb * kb) * angle.cos() + (qa * kb - qb * ka) * angle.sin()


def spelled_out(q, k, of_pair) -> torch.Tensor:
    """(B, H, T, T): of_pair(q (B, T, D), k, group, pair) over all heads and pairs."""
    k = by_head(k)
    heads = [
        sum(of_pair(q[:, h], k[:, h], h // (H // G), p) for p in range(D // 2)) for h in range(H)
    ]
    return torch.stack(heads, dim=1)
