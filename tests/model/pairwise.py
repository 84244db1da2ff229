"""Evaluate a positional scheme without a model: the bias it adds to each query-key pair, in
float64."""

from __future__ import annotations

import torch

from model import SCHEMES, TokenPositions
from model.position import AttentionContext, HeadGeometry, PositionalScheme
from tests.model.zoo import close


def scheme_of(name: str, heads: int = 6, original: int = 16, **keys) -> PositionalScheme:
    """The scheme alone, in float64, its parameters drawn."""
    settings, scheme = SCHEMES[name]
    out = scheme(settings(**keys), HeadGeometry(28, heads, 10, original, original, heads)).double()
    out.initialize(torch.Generator().manual_seed(3), 1.0)
    return out


def put(scheme: PositionalScheme, **values) -> PositionalScheme:
    with torch.no_grad():
        for name, value in values.items():
            scheme.get_parameter(name).copy_(torch.as_tensor(value, dtype=torch.float64))
    return scheme


def pairs_of(
    scheme: PositionalScheme,
    queries: TokenPositions,
    keys: TokenPositions | None = None,
    rows: int = 1,
):
    keys = queries if keys is None else keys
    heads = scheme.geometry.heads
    tables = scheme.tables(queries, torch.float64)
    context = AttentionContext(queries, queries, keys, rows, heads, torch.device("cpu"), tables)
    q = torch.zeros(rows, heads, queries.order.shape[1], 10, dtype=torch.float64)
    (view,) = scheme.plan(context).read(q, q)
    return view.mask


def bias_of(scheme: PositionalScheme, tokens: int | TokenPositions, rows: int = 1) -> torch.Tensor:
    """(R, H, T, T) of all pairs, those in the future 0; without gradients."""
    positions = TokenPositions.plain(tokens) if isinstance(tokens, int) else tokens
    pairs = pairs_of(scheme, positions, rows=rows)
    count = positions.order.shape[1]
    found = pairs.bias(*pairs.indices(0, count, slice(0, count)))
    # the same by distance: entry m is for d = T − 1 − m
    if pairs.forms.distance is not None and pairs.unit_steps:
        by_distance = pairs.by_distance()[:, :count].flip(1)
        close(by_distance, found[0, :, -1].flip(-1), atol=1e-12)
    return found.detach().tril()


def distances(tokens: int) -> torch.Tensor:
    n = torch.arange(tokens, dtype=torch.float64)
    return (n[:, None] - n[None, :]).tril()
