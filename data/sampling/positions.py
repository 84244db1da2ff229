"""Computes the order, position and document id of each token in a window.

Two independent choices determine them. A packing uses the document starts in each window to compute `order`
(the index of a token in its text, which alone determines the attention mask) and `document`. A positional
sampler then computes `position`, the input of positional schemes: `order` itself, or shifted, subsampled or
scaled. Its random draws are a pure function of (seed, step, row in the whole step, document).

Only training draws random positions. Evaluation and generation always use positions 0, 1, 2, .... Schemes
that use absolute positions therefore do not benefit from `centre`, which trains them around 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data.sampling.random_draws import ROUNDS, below, bits, fractions, key_of, shuffled
from data.settings import (
    CapePositions,
    OffsetPositions,
    PlainPositions,
    PosePositions,
    SubsetPositions,
)


class PositionedTokens(NamedTuple):
    """Arrays (b, T) or (1, T) int64, and host-side facts that the kernels need."""

    order: np.ndarray
    position: np.ndarray  # float64 if the sampler draws real numbers
    document: np.ndarray
    layout: str  # "plain": each row is one text from 0; "packed": several texts per row
    unit_steps: bool  # positions of neighboring tokens in a document differ by 1


def running(begins: np.ndarray) -> PositionedTokens:
    """Treat the window as one text with order 0 ... T-1. begins: (b, T) bool."""
    line = np.arange(begins.shape[1], dtype=np.int64)[None]
    return PositionedTokens(line, line, np.zeros_like(line), "plain", True)


def per_document(begins: np.ndarray) -> PositionedTokens:
    """Treat every document fragment as a separate text with order from 0. begins: (b, T) bool."""
    places = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    first = np.where(begins, places, 0)
    order = places - np.maximum.accumulate(first, axis=1)
    inner = begins.copy()
    inner[:, 0] = False  # the first fragment is document 0, whether or not its document begins here
    return PositionedTokens(order, order, np.cumsum(inner, axis=1, dtype=np.int64), "packed", True)


PACKINGS: dict[str, Callable[[np.ndarray], PositionedTokens]] = {
    "concat": running,
    "intra_document": per_document,
}


@dataclass(frozen=True)
class PositionDraws:
    """Random bits for the texts and tokens in some rows of one step."""

    seed: int
    step: int
    rows: np.ndarray  # (b, 1) int64, row indices in the whole step
    document: np.ndarray  # (b or 1, T) int64

    def text(self, what: str) -> np.ndarray:
        """Return (b, T) uint64, equal for all tokens of a text."""
        return bits(key_of(self.seed, self.step, "positions", what), self.rows, self.document)

    def token(self, what: str, order: np.ndarray) -> np.ndarray:
        """Return (b, T) uint64, different for each token."""
        return bits(key_of(self.seed, self.step, "positions", what), self.rows, self.document, order)


def plain(settings: PlainPositions, placed: PositionedTokens, draws: PositionDraws) -> PositionedTokens:
    return placed


def random_offset(
    settings: OffsetPositions, placed: PositionedTokens, draws: PositionDraws
) -> PositionedTokens:
    """Shift each text by a random offset. Steps stay 1, so schemes that use only distances keep their fast
    paths.
    """
    return placed._replace(position=placed.order + below(draws.text("offset"), settings.max_offset + 1))


def random_subset(
    settings: SubsetPositions, placed: PositionedTokens, draws: PositionDraws
) -> PositionedTokens:
    """Map a text of n tokens to the sorted images of 0 ... n−1 under a random permutation of the range."""
    if settings.per == "batch":
        draws = PositionDraws(draws.seed, draws.step, 0 * draws.rows, 0 * draws.document)
    keys = [draws.text(f"subset {r}") for r in range(ROUNDS)]
    order, document = (np.broadcast_to(x, keys[0].shape) for x in (placed.order, placed.document))
    drawn = shuffled(order, settings.max_length, keys)
    # Documents are consecutive within a row, so one sort per row sorts each of them in place.
    base = document * settings.max_length
    return placed._replace(position=np.sort(base + drawn, axis=1) - base, unit_steps=False)


def cape(settings: CapePositions, placed: PositionedTokens, draws: PositionDraws) -> PositionedTokens:
    """Draw real positions, float64. They may be negative; with `centre`, half of them are."""

    def even(random: np.ndarray, most: float) -> np.ndarray:
        """Map random bits to uniform values in [−most, most)."""
        return (2 * fractions(random) - 1) * most

    position = placed.order.astype(np.float64)
    if settings.centre:
        position = position - (lengths_of(placed) - 1) / 2
    position = position + even(draws.text("shift"), settings.global_shift)
    position = position + even(draws.token("jitter", placed.order), settings.local_shift)
    position = position * np.exp(even(draws.text("scale"), np.log(settings.scale)))
    return placed._replace(position=position, unit_steps=False)


def pose(settings: PosePositions, placed: PositionedTokens, draws: PositionDraws) -> PositionedTokens:
    """Divide each text into two parts with steps of 1 and a random gap between them."""
    n = lengths_of(placed)
    cut = 1 + below(draws.text("cut"), (n + 1) // 2)
    leap = below(draws.text("leap"), settings.target - n + 1)
    return placed._replace(position=placed.order + np.where(placed.order < cut, 0, leap), unit_steps=False)


def lengths_of(placed: PositionedTokens) -> np.ndarray:
    """Return (b or 1, T): for each token, the number of tokens of its text in this window."""
    order, document = placed.order, placed.document
    last = np.ones(document.shape, dtype=bool)
    last[:, :-1] = document[:, 1:] != document[:, :-1]
    ends = np.where(last, np.arange(document.shape[1]), document.shape[1])
    ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]  # end of each token's text
    return np.take_along_axis(order, ends, axis=1) + 1


SAMPLERS: dict[str, Callable[[Any, PositionedTokens, PositionDraws], PositionedTokens]] = {
    "plain": plain,
    "random_offset": random_offset,
    "random_subset": random_subset,
    "cape": cape,
    "pose": pose,
}


def place(
    packing: str, positions: PlainPositions, begins: np.ndarray, *, seed: int, step: int, rows: np.ndarray
) -> PositionedTokens:
    """Compute the order, positions and document ids of some windows of a step.

    Args:
        packing: a key of PACKINGS.
        positions: settings of a positional sampler, whose name is a key of SAMPLERS.
        begins: (b, T) bool, true where a document begins.
        seed, step: with `rows`, the key of the random draws.
        rows: (b,) index of each window in the whole step.
    """
    placed = PACKINGS[packing](begins)
    draws = PositionDraws(seed, step, rows[:, None], placed.document)
    return SAMPLERS[positions.name](positions, placed, draws)
