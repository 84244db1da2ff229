"""Positions drawn for training: SHAPE, randomized positions, RFS, CAPE, PoSE, CLEX.

A sampler replaces the positions that a token has from `packing.py`. Its random draws are a pure
function of (seed, step, row in the whole step, document).

Evaluation and generation use positions 0, 1, 2, ...; only tasks on symbols can be evaluated at
sampled positions, if the settings request it. Schemes that use absolute positions therefore do not
benefit from `center`, which trains them around 0.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from data.random_draws import ROUNDS, below, bits, fractions, key_of, shuffled
from data.sampling.packing import PositionedTokens
from settings.fields import StrictSettings, setting


@dataclass(frozen=True)
class PositionDraws:
    """Random bits for the texts and tokens in some rows of one step."""

    seed: int
    step: int
    rows: np.ndarray  # (b, 1) int64, row indices in the whole step
    document: np.ndarray  # (b or 1, T) int64

    def draw(self, what: str, *token: np.ndarray) -> np.ndarray:
        """Return (b, T) uint64, equal for all tokens of a text, or different for each `token` (its
        order)."""
        return bits(
            key_of(self.seed, self.step, "positions", what),
            self.rows,
            self.document,
            *token,
        )


class PlainPositions(StrictSettings):
    """Positions count from 0 in each text."""

    fractional: ClassVar[bool] = False  # whether positions are real-valued
    bound: ClassVar[str | None] = None  # the setting whose value exceeds all positions

    name: Literal["plain"] = "plain"

    def position_end(self, length: int) -> int:
        """1 + the largest possible position, rounded up, in texts of `length` tokens."""
        return length if self.bound is None else getattr(self, self.bound)

    def check(self, length: int) -> None:
        """Raise ValueError if texts of `length` tokens do not fit."""
        if self.position_end(length) < length:
            setting = f"data.positions.{self.bound} = {self.position_end(length)}"
            raise ValueError(f"{setting} is less than the {length} tokens of a window; increase it")

    def apply(self, placed: PositionedTokens, draws: PositionDraws) -> PositionedTokens:
        """Replace the positions, which equal `order`, by the positions of this sampler."""
        return placed


PLAIN = PlainPositions()


def _sorted(placed: PositionedTokens, drawn: np.ndarray, base: np.ndarray) -> PositionedTokens:
    """Sort the positions within each document; `base` increases from document to document."""
    return placed._replace(position=np.sort(base + drawn, axis=1) - base, unit_steps=False)


class OffsetPositions(PlainPositions):
    """SHAPE (Kiyono et al. 2021, arXiv:2109.05644): one random offset for all positions of a text.

    k ~ U{0 ... max_offset} per text, and offset 0 in evaluation. (The authors' code draws 0 ... K−1
    and evaluates at K.) No effect on schemes that depend on distances only.
    """

    name: Literal["random_offset"] = "random_offset"
    max_offset: int = setting(500, "largest offset K", ge=1, le=1_000_000)

    def position_end(self, length):
        return length + self.max_offset

    def apply(self, placed, draws):
        # Steps stay 1, so schemes that use only distances keep their fast paths.
        offset = below(draws.draw("offset"), self.max_offset + 1)
        return placed._replace(position=placed.order + offset)


class SubsetPositions(PlainPositions):
    """Randomized positions (Ruoss et al. 2023, arXiv:2305.16843): a random ordered subset of a
    longer range.

    The positions of a text are drawn from 0 ... max_length−1 without replacement, and sorted.
    """

    bound: ClassVar[str | None] = "max_length"

    name: Literal["random_subset"] = "random_subset"
    max_length: int = setting(
        2048,
        "end of the range; should exceed all evaluated lengths",
        ge=2,
        le=1_000_000,
    )
    per: Literal["row", "batch"] = setting(
        "row",
        "one draw per text, or one per batch as in the authors' code",
    )

    def apply(self, placed, draws):
        """Map a text of n tokens to the sorted images of 0 ... n−1 under a random permutation."""
        if self.per == "batch":
            first = np.zeros_like(draws.document)
            draws = replace(draws, rows=np.zeros_like(draws.rows), document=first)
        keys = [draws.draw(f"subset {r}") for r in range(ROUNDS)]
        order = np.broadcast_to(placed.order, keys[0].shape)
        drawn = shuffled(order, self.max_length, keys)
        return _sorted(placed, drawn, placed.document * self.max_length)


class MultiplePositions(PlainPositions):
    """Positions of CLEX (Chen et al. 2024, arXiv:2310.16450): a random ordered subset of t times as
    many positions, with t ~ U{1 ... max_factor} per text.

    A text of n tokens has the positions 0, n·t − 1, and others in between, drawn without
    replacement. (The authors' code draws one t per batch.)
    """

    name: Literal["random_multiple"] = "random_multiple"
    max_factor: int = setting(16, "largest t; equal to the scheme's max_factor", ge=1, le=10_000)

    def position_end(self, length):
        return length * self.max_factor

    def apply(self, placed, draws):
        n = placed.lengths()
        end = n * (1 + below(draws.draw("factor"), self.max_factor))
        keys = [draws.draw(f"subset {r}") for r in range(ROUNDS)]
        order, end, n, *keys = np.broadcast_arrays(placed.order, end, n, *keys)
        drawn = np.where(order == 0, 0, end - 1)
        inner = (order > 0) & (order < n - 1)
        for size in np.unique(end[inner]):
            at = inner & (end == size)
            drawn[at] = 1 + shuffled(order[at] - 1, int(size) - 2, [key[at] for key in keys])
        return _sorted(placed, drawn, placed.document * (order.shape[1] * self.max_factor))


class FloatPositions(PlainPositions):
    """Random float sampling (RFS, Shimizu et al. 2026, arXiv:2602.14050): sorted real positions
    from a fixed range, whatever the length.

    The positions of a text are uniform in [0, max_length]. Requires a scheme that supports
    real-valued positions.
    """

    fractional: ClassVar[bool] = True

    name: Literal["random_float"] = "random_float"
    max_length: int = setting(2048, "end of the range", ge=1, le=1_000_000)

    def position_end(self, length):
        return 1 + self.max_length

    def check(self, length):
        """Texts of any length fit."""

    def apply(self, placed, draws):
        drawn = fractions(draws.draw("float", placed.order)) * self.max_length
        return _sorted(placed, drawn, placed.document * float(self.max_length))


class CapePositions(PlainPositions):
    """CAPE (Likhomanenko et al. 2021, arXiv:2106.03143): shifted, jittered and scaled real
    positions.

    (n + U(−global_shift, global_shift) + U_n(−local_shift, local_shift)) · exp(U(−ln scale, ln
    scale)); one shift and scale per text, one jitter per token. Requires a scheme that supports
    real-valued positions.
    """

    fractional: ClassVar[bool] = True

    name: Literal["cape"] = "cape"
    global_shift: float = setting(5.0, "maximum shift of a text in tokens", ge=0, le=1e6)
    local_shift: float = setting(
        0.25,
        "maximum jitter of a token; below 1/2, which preserves the order",
        ge=0,
        lt=0.5,
    )
    scale: float = setting(
        1.03,
        "maximum factor on positions; the minimum is 1/scale",
        ge=1,
        le=100,
    )
    center: bool = setting(
        False,
        "subtract the mean first; for schemes that depend on distances only",
    )

    def position_end(self, length):
        return 1 + math.ceil((length - 1 + self.global_shift + self.local_shift) * self.scale)

    def apply(self, placed, draws):
        """Draw real positions, float64. They may be negative; with `center`, half of them are."""

        def symmetric(random: np.ndarray, most: float) -> np.ndarray:
            """Map random bits to uniform values in [−most, most)."""
            return (2 * fractions(random) - 1) * most

        position = placed.order.astype(np.float64)
        if self.center:
            position = position - (placed.lengths() - 1) / 2
        position = position + symmetric(draws.draw("shift"), self.global_shift)
        position = position + symmetric(draws.draw("jitter", placed.order), self.local_shift)
        position = position * np.exp(symmetric(draws.draw("scale"), np.log(self.scale)))
        return placed._replace(position=position, unit_steps=False)


class PosePositions(PlainPositions):
    """PoSE (Zhu et al. 2023, arXiv:2309.10400): one skip in positions, so that long distances occur
    in training.

    A text of n tokens is cut after r ~ U{1 ... (n+1)//2} tokens; positions of the second part are
    shifted by U{0 ... target−n}. The authors' code also skips text between the parts; here it is
    contiguous.
    """

    bound: ClassVar[str | None] = "target"

    name: Literal["pose"] = "pose"
    target: int = setting(2048, "target length T", ge=2, le=1_000_000)

    def apply(self, placed, draws):
        n = placed.lengths()
        cut = 1 + below(draws.draw("cut"), (n + 1) // 2)
        leap = below(draws.draw("leap"), self.target - n + 1)
        position = placed.order + np.where(placed.order < cut, 0, leap)
        return placed._replace(position=position, unit_steps=False)


PositionsSettings = Annotated[
    PlainPositions
    | OffsetPositions
    | SubsetPositions
    | MultiplePositions
    | FloatPositions
    | CapePositions
    | PosePositions,
    Field(discriminator="name"),
]
