"""Evaluate a content-dependent scheme without a model, and reference attention per document, in
float64.

The references share no code with the schemes: the convolution is PyTorch's, rotations are products
of complex numbers.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from model import SCHEMES, TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext, ContentPlan, HeadGeometry, PositionalScheme
from tests.model.zoo import G, H, packed

B = 2
C = 14
D = 8
S = 13
LAYOUTS = {
    "plain": TokenPositions.plain(S),
    "ragged": TokenPositions.left_padded([S, S - 4], S),
    "packed": packed([[5, S - 5], [7, 2, S - 9]]),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scheme_of(name: str, seed: int = 0, **keys) -> PositionalScheme:
    """The scheme alone, every parameter drawn, in float64."""
    settings, kind = SCHEMES[name]
    scheme = kind(settings(**keys), HeadGeometry(C, H, D, S, S, kv_heads=G)).double()
    with torch.no_grad():
        for n, p in enumerate(scheme.parameters()):
            p.copy_(normal(*p.shape, seed=seed + n) * (p.shape[-1] ** -0.5 if p.ndim == 2 else 1))
    return scheme


def context_of(
    scheme: PositionalScheme, positions: TokenPositions, rows: int = B, window: int | None = None
) -> AttentionContext:
    tables = scheme.tables(positions, torch.float64)
    return AttentionContext(
        positions, positions, positions, rows, H, torch.device("cpu"), tables, window
    )


def tensors() -> tuple[torch.Tensor, ...]:
    """x (B, S, C); q (B, H, S, D), k and v (B, G, S, D)."""
    x, q, k, v = (
        normal(*s, seed=9 + n)
        for n, s in enumerate([(B, S, C), (B, H, S, D), (B, G, S, D), (B, G, S, D)])
    )
    return x, 2 * q, k, v


def output_of(
    scheme: PositionalScheme, positions: TokenPositions, kernel: str, window: int | None = None
) -> torch.Tensor:
    x, q, k, v = tensors()
    plan = scheme.plan(context_of(scheme, positions, window=window)).bind(x, None)
    return attend(plan.read(q, plan.write(k)), v, D**-0.5, kernel)


class KeptExtras:
    """A layer cache that stores the extras of one pass after those of earlier tokens."""

    def __init__(self, past: torch.Tensor | None):
        self.past = past

    def extend_extras(self, features, accumulate, new) -> torch.Tensor:
        self.extras = accumulate(features, self.past, new)
        return self.extras


def extras_of(plan: ContentPlan, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
    """(B, T, E) of new tokens with the layer inputs x."""
    kept = KeptExtras(past)
    plan.bind(x, kept)
    return kept.extras


def documents(positions: TokenPositions) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every document."""
    found = []
    for b, row in enumerate(positions.document.expand(B, -1).tolist()):
        for value, group in itertools.groupby(range(S), key=lambda n: row[n]):
            slots = list(group)
            if value >= 0:
                found.append((b, slots[0], slots[-1] + 1))
    return found


def by_documents(positions: TokenPositions, logits_of, window: int | None = None) -> torch.Tensor:
    """(B, H, S, D) attention of each document by itself; logits_of(x (t, C), q (H, t, D), k (H, t,
    D)) → (H, t, t)."""
    x, q, k, v = tensors()
    k, v = (y.repeat_interleave(H // G, dim=1) for y in (k, v))
    out = torch.zeros_like(q)
    for b, start, stop in documents(positions):
        t = slice(start, stop)
        logits = logits_of(x[b, t], q[b, :, t], k[b, :, t])
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        hidden = (back < 0) | (back >= (window or S))
        out[b, :, t] = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v[b, :, t]
    return out


def real(positions: TokenPositions, x: torch.Tensor) -> torch.Tensor:
    """Padding has no output to speak of."""
    return x.transpose(1, 2)[positions.document.expand(B, -1) >= 0]


def convolved(
    x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, conv: torch.Tensor
) -> torch.Tensor:
    """(t, E) of one document, by PyTorch's convolution: its last tap is the token itself."""
    series = F.pad((x @ down.mT @ up.mT).mT[None], (conv.shape[1] - 1, 0))
    return F.conv1d(series, conv.flip(1)[:, None], groups=conv.shape[0])[0].mT


def turned(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """(H, t, t) logits of pairs (n, n + D/2) as complex numbers, turned by angle (H, t, D/2)."""
    turn = torch.polar(torch.ones_like(angle), angle)
    a, b = (torch.complex(y[..., : D // 2], y[..., D // 2 :]) * turn for y in (q, k))
    return torch.einsum("htd,hsd->hts", a, b.conj()).real / math.sqrt(D)
