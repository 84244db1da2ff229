"""What schemes share that work out a number for each pair: networks over pairs, sums along keys, rows by
distance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.errors import ModelError
from model.pairs import Block, Pairs
from model.position.base import Span
from model.position.places import Places

# What such schemes say in `Position.exempt`.
UNROLLED = {"graphs": "blocks of queries are unrolled when compiled: one graph for each length"}


PAIRS_AT_ONCE = 8192  # hidden features of so many pairs fit into a processor's cache


def over_pairs(network: Callable[..., Tensor], features: int, *inputs: Tensor) -> Tensor:
    """network(*inputs) (features, N), for inputs (·, N) whose columns, the pairs, are independent.

    On a CPU a few columns at a time where nothing is to be differentiated: what a network has between its
    layers is many times as large as what comes out, and would go through the memory.
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
    """(…, s) → the sum of each entry and all later ones. Within a document keys stand in the order of time,
    sinks before the window, so that a later key is one nearer to the query."""
    return x.flip(-1).cumsum(-1).flip(-1)


def sum_after(x: Tensor) -> Tensor:
    """(…, s) → the sum of all later entries; 0 for the last. Not `sum_from(x) − x`, which would cancel."""
    return sum_from(torch.cat([x[..., 1:], torch.zeros_like(x[..., :1])], dim=-1))


def pairs_by_position(span: Span) -> Pairs:
    """The visible pairs, with `Block.distance` right in every row also where rows differ in position only."""
    rows = max(span.queries.position.shape[0], span.keys.position.shape[0])
    return span.pairs(by_row=rows > 1)


def distances(block: Block, last: int) -> Tensor:
    """(B, H, t, s) distances as indices, no more than `last`; of keys in the future, which are hidden, 0."""
    d = block.distance.clamp(0, last)
    return d.expand(*block.q.shape[:3], block.k.shape[2])


def refuse_fractions(places: Places, name: str) -> None:
    """Raises ModelError for real-valued positions: the scheme has a vector for each whole distance."""
    if places.position.is_floating_point():
        raise ModelError(
            f"position scheme '{name}' has vectors for whole distances only, and was given real-valued "
            "positions: give integer positions"
        )
