"""Remaps of the tokens kept beside a window: LM-Infinite's distance limit, and StreamingLLM's
positions."""

from __future__ import annotations

import pytest
import torch

from model import TokenPositions
from tests.model.dense_remap import (
    T,
    dense,
    drawn,
    matrix_of,
    scheme_of,
    shown_by,
    through,
)
from tests.model.zoo import close

WINDOW = 6
SINKS = 3


def lambda_shape(limit: int):
    return lambda n, m: min(n - m, limit) if m < SINKS else n - m


def streaming(n, m):
    return min(n, SINKS + WINDOW - 1) - m if m < SINKS else n - m


CASES = {
    "lambda": ({"name": "lambda", "limit": 4}, lambda_shape(4)),
    "lambda-default": ({"name": "lambda"}, lambda_shape(WINDOW)),
    "lambda-wide": ({"name": "lambda", "limit": 9}, lambda_shape(9)),
    "streaming": ({"name": "streaming"}, streaming),
}
every_case = pytest.mark.parametrize("case", CASES)
KEPT = {"window": WINDOW, "sinks": SINKS}


def seen(orders: list[int], window: int = WINDOW, sinks: int = SINKS) -> torch.Tensor:
    """(T, T): in the window, or among the sinks; orders of one document."""
    return torch.tensor(
        [[m <= n and (n - m < window or m < sinks) for m in orders] for n in orders]
    )


@every_case
@pytest.mark.parametrize("kernel", ["explicit", "dense"])
def test_scores_use_remapped_distances(case, kernel):
    remap, distance = CASES[case]
    (q, k, v), numbers = drawn(T), list(range(T))
    found = through(scheme_of(remap, **KEPT), TokenPositions.plain(T), q, k, v, kernel)
    close(found, dense(q, k, v, matrix_of(numbers, distance), seen(numbers)))


def test_streaming_matches_paper_figure():
    """Section 3.2: with tokens 0 1 2 3 6 7 8 kept, decoding token 9, positions are 0 1 2 3 4 5 6
    7."""
    shown = shown_by({"name": "streaming"}, 10, window=4, sinks=4)[9]
    assert [round(x) for x in shown[:4].tolist()] == [7, 6, 5, 4]
    assert [round(x) for x in shown[6:].tolist()] == [3, 2, 1, 0]
