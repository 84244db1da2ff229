"""Dense reference of the position remaps.

The remapped distance P[n, m] of every pair comes from a double loop over the formula, and each
score from the angle P·θ, in float64. Only settings and token positions are taken from the product.
"""

from __future__ import annotations

import math

import torch

from model import TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext, HeadGeometry, PositionalScheme
from model.position.schemes.rope import Rope, RopeSettings

B = 2
H = 6
G = 3
D = 10
L0 = 16
T = 23


def scheme_of(remap: dict, length: int = L0, features: int = D, **keys) -> Rope:
    return Rope(
        RopeSettings(remap=remap, theta=50.0, **keys),
        HeadGeometry(28, H, features, length, length, H),
    )


def drawn(tokens: int, features: int = D, batch: int = B) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        torch.randn(batch, heads, tokens, features, generator=generator, dtype=torch.float64)
        for heads in (H, G, G)
    )


def context_of(
    scheme: PositionalScheme,
    new: TokenPositions,
    keys: TokenPositions | None = None,
    queries: int | None = None,
) -> AttentionContext:
    return AttentionContext(
        new=new,
        queries=new if queries is None else new.last(queries),
        keys=keys or new,
        batch=B,
        heads=H,
        device=torch.device("cpu"),
        tables=scheme.tables(new, torch.float64),
        window=scheme.settings.window,
        sinks=scheme.settings.sinks,
    )


def dense_scores(
    q, k, shown, theta: float = 50.0, rotated: int = D, layout: str = "half"
) -> torch.Tensor:
    """(B, H, T, T) of q·k with the first `rotated` features turned by P·θ; `shown` (B or 1, T, T)
    is P."""
    k = torch.stack([k[:, h // (H // G)] for h in range(H)], dim=1)
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for pair in range(rotated // 2):
        first, second = (
            (pair, pair + rotated // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        )
        angle = shown[:, None] * theta ** (-2 * pair / rotated)
        qa = q[..., first, None]
        qb = q[..., second, None]
        ka = k[..., None, :, first]
        kb = k[..., None, :, second]
        total += (qa * ka + qb * kb) * angle.cos() + (qa * kb - qb * ka) * angle.sin()
    for feature in range(rotated, q.shape[-1]):
        total += q[..., feature, None] * k[..., None, :, feature]
    return total


def matrix_of(positions: list[float], distance) -> torch.Tensor:
    """(1, T, T): P for every pair, the future included, where it is not seen."""
    rows = [[float(distance(n, m)) if n >= m else 0.0 for m in positions] for n in positions]
    return torch.tensor([rows], dtype=torch.float64)


def dense(q, k, v, shown, seen=None, **keys) -> torch.Tensor:
    scores = dense_scores(q, k, shown, **keys) * q.shape[-1] ** -0.5
    seen = torch.ones(q.shape[2], q.shape[2]).tril().bool() if seen is None else seen
    v = torch.stack([v[:, h // (H // G)] for h in range(H)], dim=1)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def through(
    scheme: PositionalScheme, positions: TokenPositions, q, k, v, kernel: str = "blocks"
) -> torch.Tensor:
    plan = scheme.plan(context_of(scheme, positions))
    return attend(plan.read(q, plan.write(k)), v, q.shape[-1] ** -0.5, kernel)


def shown_by(remap: dict, tokens: int, **keys) -> torch.Tensor:
    """(T, T) the distance a rotation shows, read off the second of two pairs, which turns 0.01 a
    token."""
    scheme = Rope(RopeSettings(remap=remap, **keys), HeadGeometry(28, H, 4, L0, L0, H))
    unit = torch.eye(4, dtype=torch.float64)
    plan = scheme.plan(context_of(scheme, TokenPositions.plain(tokens)))
    zero = torch.zeros((), dtype=torch.int64)
    n = torch.arange(tokens)
    scores = []
    for k in (unit[1], unit[3]):
        q = unit[1].expand(B, H, tokens, 4)
        k = k.expand(B, G, tokens, 4)
        total = torch.zeros(tokens, tokens, dtype=torch.float64)
        for view in plan.read(q, plan.write(k)):
            served = view.mask.mask_mod(zero, zero, n[:, None], n[None, :])
            total += torch.where(served, view.q[0, 0] @ view.k[0, 0].T, 0.0)
        scores.append(total)
    return torch.atan2(scores[1], scores[0]) * 100
