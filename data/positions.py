"""Which order, position and document each token of a window gets.

A sampler sees where documents begin in each window and returns three integers a token: `order` (index in
its document, which alone decides what is visible), `position` (what positional schemes see) and `document`.
Samplers that shift or thin positions (random offset, random subset, PoSE, CAPE) change `position` only.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Placed(NamedTuple):
    """Arrays (b, T) or (1, T) int64; what kernels must know of them is said here, on the host."""

    order: np.ndarray
    position: np.ndarray
    document: np.ndarray
    layout: str  # "plain": every row is one text from 0 on; "packed": several texts a row
    unit_steps: bool  # positions of neighbours in one document differ by one


Sampler = Callable[[np.ndarray], Placed]


def running(begins: np.ndarray) -> Placed:
    """0 ... T-1 over the window, which is one text whatever it is made of. begins: (b, T) bool."""
    line = np.arange(begins.shape[1], dtype=np.int64)[None]
    return Placed(line, line, np.zeros_like(line), "plain", True)


def per_document(begins: np.ndarray) -> Placed:
    """Every fragment of a document is a text of its own, counted from 0. begins: (b, T) bool."""
    places = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    first = np.where(begins, places, 0)
    order = places - np.maximum.accumulate(first, axis=1)
    inner = begins.copy()
    inner[:, 0] = False  # the first fragment is document 0, whether it begins here or came over the edge
    return Placed(order, order, np.cumsum(inner, axis=1, dtype=np.int64), "packed", True)


SAMPLERS: dict[str, Sampler] = {
    "running": running,
    "documents": per_document,
}
