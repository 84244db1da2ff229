"""Utilities of schemes that compute weights per pair: networks over pairs, sums along keys, distances."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.attention.mask import AttentionMask, QueryBlock
from model.errors import ModelError
from model.position.base import AttentionContext
from model.position.token_positions import TokenPositions

# `PositionalScheme.exempt` of these schemes.
UNROLLED = {"graphs": "blocks of queries are unrolled when compiled: one graph per length"}


PAIRS_AT_ONCE = 8192  # pairs whose hidden features fit into a CPU cache


def over_pairs(network: Callable[..., Tensor], features: int, *inputs: Tensor) -> Tensor:
    """network(*inputs) (features, N), for inputs (·, N) whose columns, the pairs, are independent.

    Without gradients on a CPU, runs on blocks of columns, so that hidden features stay in the CPU cache.
    """
    count = inputs[0].shape[1]
    if torch.is_grad_enabled() or inputs[0].device.type != "cpu":
        return network(*inputs)
    out = inputs[0].new_empty(features, count)
    for start in range(0, count, PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        out[:, part] = network(*(x[:, part] for x in inputs))
    return out


def sum_from(x: Tensor) -> Tensor:
    """(…, s) → the sum of each entry and all later ones. Within a document, keys are in temporal order, sinks
    before the window, so later keys are nearer to the query."""
    return x.flip(-1).cumsum(-1).flip(-1)


def sum_after(x: Tensor) -> Tensor:
    """(…, s) → the sum of all later entries; 0 for the last. `sum_from(x) − x` would suffer from
    cancellation."""
    return sum_from(torch.cat([x[..., 1:], torch.zeros_like(x[..., :1])], dim=-1))


def pairs_by_position(context: AttentionContext) -> AttentionMask:
    """The visible pairs, such that `QueryBlock.distance` is correct per row even if rows differ in positions
    only."""
    rows = max(context.queries.position.shape[0], context.keys.position.shape[0])
    return context.pairs(by_row=rows > 1)


def distances(block: QueryBlock, last: int) -> Tensor:
    """(B, H, t, s) distances as indices, at most `last`; 0 for future keys, which are masked."""
    d = block.distance.clamp(0, last)
    return d.expand(*block.q.shape[:3], block.k.shape[2])


def refuse_fractions(positions: TokenPositions, name: str) -> None:
    """Raise ModelError for real-valued positions."""
    if positions.position.is_floating_point():
        raise ModelError(
            f"position scheme '{name}' does not support real-valued positions; use integer positions"
        )
