"""Packing of documents into the windows of training, and the order, document and position of every
token.

`order` is the index of a token in its text and alone determines the attention mask. `position`, the
input of positional schemes, equals `order` unless a sampler of `position_samplers.py` replaces it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

IGNORED = -100  # a target that is excluded from the loss


class PositionedTokens(NamedTuple):
    """Arrays (b, T) or (1, T) int64, and host-side facts that the kernels need."""

    order: np.ndarray
    position: np.ndarray  # float64 if the sampler draws real numbers
    document: np.ndarray
    layout: str  # "plain": each row is one text from 0; "packed": several texts per row
    unit_steps: bool  # positions of neighboring tokens in a document differ by 1

    @property
    def position_end(self) -> int:
        """1 + the largest position, rounded up."""
        return 1 + max(0, math.ceil(self.position.max()))

    def lengths(self) -> np.ndarray:
        """Return (b or 1, T): for each token, the number of tokens of its text in this window."""
        width = self.document.shape[1]
        is_last = np.diff(self.document, axis=1, append=-2) != 0
        ends = np.where(is_last, np.arange(width), width)
        # end of each token's text
        ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        return np.take_along_axis(self.order, ends, axis=1) + 1


def concatenated(begins: np.ndarray) -> PositionedTokens:
    """Treat the window as one text with order 0 ... T-1. begins: (b, T) bool."""
    line = np.arange(begins.shape[1], dtype=np.int64)[None]
    return PositionedTokens(line, line, np.zeros_like(line), "plain", True)


def per_document(begins: np.ndarray) -> PositionedTokens:
    """Start the order and the positions over at 0 where a document begins. begins: (b, T) bool."""
    places = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    first = np.where(begins, places, 0)
    order = places - np.maximum.accumulate(first, axis=1)
    inner = begins.copy()
    inner[:, 0] = False  # the first fragment is document 0, whether or not its document begins here
    document = np.cumsum(inner, axis=1, dtype=np.int64)
    return PositionedTokens(order, order, document, "packed", True)


PACKINGS: dict[str, Callable[[np.ndarray], PositionedTokens]] = {
    "concat": concatenated,
    "intra_document": per_document,
}
