"""Evaluate a positional scheme without a model: what it adds to token embeddings, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from model import SCHEMES, TokenPositions
from model.position import HeadGeometry, PositionalScheme


def made(
    name: str, dim: int, train: int = 16, original: int | None = None, **keys
) -> PositionalScheme:
    """The scheme alone, its parameters drawn."""
    settings, scheme = SCHEMES[name]
    geometry = HeadGeometry(dim, 2, dim // 2, train, original or train, 2)
    out = scheme(settings(**keys), geometry).double()
    out.initialize(torch.Generator().manual_seed(3), 1.0)
    return out


def added(scheme: PositionalScheme, positions: TokenPositions, rows: int = 1) -> torch.Tensor:
    """(rows, T, C) what the scheme adds to a token, as the model would have it."""
    x = torch.zeros(rows, positions.order.shape[1], scheme.geometry.dim, dtype=torch.float64)
    return scheme.embed(x, scheme.tables(positions, torch.float64), positions)


def doubles(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at(positions: list, length: int) -> TokenPositions:
    """Tokens at any positions, of a sequence declared to have that length."""
    position = torch.tensor(positions)[None]
    reach = math.floor(max(positions)) + 1
    return replace(
        TokenPositions.plain(len(positions)),
        position=position,
        position_end=reach,
        lengths=(length,),
        unit_steps=False,
    )
