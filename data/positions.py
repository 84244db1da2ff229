"""Which order, position and document each token of a window gets.

Two choices that know nothing of each other. A packing sees where documents begin in each window and says
`order` (index in its text, which alone decides what is visible) and `document`. A sampler then says
`position`, which is what positional schemes see: order itself, or shifted, thinned, stretched. Its draws are
a pure function of (seed, step, row of the whole step, document), whoever asks.

Only training draws positions. Evaluation and generation place text at 0, 1, 2, ... whatever it was trained
at: schemes that look at positions themselves are not helped by `centre`, which trains them around 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data.draws import ROUNDS, below, bits, fractions, key_of, shuffled
from data.settings import (
    CapePositions,
    OffsetPositions,
    PlainPositions,
    PosePositions,
    SubsetPositions,
)


class Placed(NamedTuple):
    """Arrays (b, T) or (1, T) int64; what kernels must know of them is said here, on the host."""

    order: np.ndarray
    position: np.ndarray  # float64 where a sampler draws reals
    document: np.ndarray
    layout: str  # "plain": every row is one text from 0 on; "packed": several texts a row
    unit_steps: bool  # positions of neighbours in one document differ by one


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


PACKINGS: dict[str, Callable[[np.ndarray], Placed]] = {
    "running": running,
    "documents": per_document,
}


@dataclass(frozen=True)
class Draws:
    """Random bits for the texts and tokens of some rows of one step."""

    seed: int
    step: int
    rows: np.ndarray  # (b, 1) int64, of the whole step
    document: np.ndarray  # (b or 1, T) int64

    def text(self, what: str) -> np.ndarray:
        """(b, T) uint64, the same for all tokens of a text."""
        return bits(key_of(self.seed, self.step, "positions", what), self.rows, self.document)

    def token(self, what: str, order: np.ndarray) -> np.ndarray:
        """(b, T) uint64, another for each token."""
        return bits(key_of(self.seed, self.step, "positions", what), self.rows, self.document, order)


def plain(settings: PlainPositions, placed: Placed, draws: Draws) -> Placed:
    return placed


def random_offset(settings: OffsetPositions, placed: Placed, draws: Draws) -> Placed:
    """Steps stay of one, so that whatever knows distances alone sees no change and keeps its fast paths."""
    return placed._replace(position=placed.order + below(draws.text("offset"), settings.max_offset + 1))


def random_subset(settings: SubsetPositions, placed: Placed, draws: Draws) -> Placed:
    """A text of n tokens takes what a random permutation of the range sends 0 ... n−1 to, sorted."""
    if settings.per == "batch":
        draws = Draws(draws.seed, draws.step, 0 * draws.rows, 0 * draws.document)
    keys = [draws.text(f"subset {r}") for r in range(ROUNDS)]
    order, document = (np.broadcast_to(x, keys[0].shape) for x in (placed.order, placed.document))
    drawn = shuffled(order, settings.max_length, keys)
    # Documents follow each other in a row, so that one sort a row sorts each of them in its own place.
    base = document * settings.max_length
    return placed._replace(position=np.sort(base + drawn, axis=1) - base, unit_steps=False)


def cape(settings: CapePositions, placed: Placed, draws: Draws) -> Placed:
    """Real positions, float64: they may be negative, and with `centre` half of them are."""

    def even(random: np.ndarray, most: float) -> np.ndarray:
        """Evenly spread over [−most, most)."""
        return (2 * fractions(random) - 1) * most

    position = placed.order.astype(np.float64)
    if settings.centre:
        position = position - (lengths_of(placed) - 1) / 2
    position = position + even(draws.text("shift"), settings.global_shift)
    position = position + even(draws.token("jitter", placed.order), settings.local_shift)
    position = position * np.exp(even(draws.text("scale"), np.log(settings.scale)))
    return placed._replace(position=position, unit_steps=False)


def pose(settings: PosePositions, placed: Placed, draws: Draws) -> Placed:
    """Two parts with steps of one, and a leap between them."""
    n = lengths_of(placed)
    cut = 1 + below(draws.text("cut"), (n + 1) // 2)
    leap = below(draws.text("leap"), settings.target - n + 1)
    return placed._replace(position=placed.order + np.where(placed.order < cut, 0, leap), unit_steps=False)


def lengths_of(placed: Placed) -> np.ndarray:
    """(b or 1, T): of each token, how many tokens its text has in this window."""
    order, document = placed.order, placed.document
    last = np.ones(document.shape, dtype=bool)
    last[:, :-1] = document[:, 1:] != document[:, :-1]
    ends = np.where(last, np.arange(document.shape[1]), document.shape[1])
    ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]  # where the token's text ends
    return np.take_along_axis(order, ends, axis=1) + 1


SAMPLERS: dict[str, Callable[[Any, Placed, Draws], Placed]] = {
    "plain": plain,
    "random_offset": random_offset,
    "random_subset": random_subset,
    "cape": cape,
    "pose": pose,
}


def place(
    packing: str, positions: PlainPositions, begins: np.ndarray, *, seed: int, step: int, rows: np.ndarray
) -> Placed:
    """The places of some windows of a step.

    Args:
        packing: a key of PACKINGS.
        positions: settings of a sampler, whose name is a key of SAMPLERS.
        begins: (b, T) bool, where documents begin.
        seed, step: with `rows`, what the draws depend on.
        rows: (b,) index of each window in the whole step.
    """
    placed = PACKINGS[packing](begins)
    draws = Draws(seed, step, rows[:, None], placed.document)
    return SAMPLERS[positions.name](positions, placed, draws)
