"""Position remaps: which distance a rotation shows for a pair, past the distances a model was trained on.

A remap sends positions to *rotary positions* before frequencies are applied, by one map for queries and one
for keys, and has several *lanes*: pairs of such maps, each serving some pairs of tokens. The score of a pair
is (R(a(n) θ) q_n)·(R(c(m) θ) k_m), which knows a(n) − c(m) alone; a and c are the maps of the lane that
serves (n, m). Distances d = n − m are in positions; who sees whom stays with order, document and window.

Maps are elementwise and are baked into the tables, which stay indexed by the position itself: a key is
rotated once by every key map there is, and its forms are remembered side by side. Nothing is rotated anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from model.errors import ModelError

# (query's position, key's position, key's order in its document) -> is the pair served? Elementwise.
Serves = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Lane:
    """A map for queries and a map for keys, by their places in what `maps` returns, and the pairs served."""

    query: int
    key: int
    serves: Serves | None = None  # None: every pair


@dataclass(frozen=True)
class Around:
    """What a remap may know beside its own settings: L0, and the scheme's window and sinks."""

    original_length: int
    window: int | None
    sinks: int


class Remap(BaseModel):
    """What the remaps have in common; this one leaves positions as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Checks of the conformance suite that do not hold under this remap, each with its reason.
    exempt: ClassVar[dict[str, str]] = {}
    # Whether it is about sinks beside a window, and means nothing without them.
    needs_sinks: ClassVar[bool] = False

    name: str

    def describe(self, length: int, original_length: int) -> str:
        """Its name and those settings that are not null or off: `leaky_rerope factor 16.0`."""
        given = [f"{key} {value}" for key, value in self if key != "name" and value]
        return " ".join([self.name, *given])

    @property
    def follows_length(self) -> bool:
        """Whether the declared length of a sequence changes its maps."""
        return False

    def stretch(self, length: int, around: Around) -> float:
        """The number by which a sequence of `length` tokens changes the maps or the amplitude."""
        return 1.0

    def amplitude(self, stretch: float) -> float:
        """A factor on cos and sin of every map; the logits get its square."""
        return 1.0

    def maps(self, n: Tensor, stretch: float, around: Around) -> tuple[Tensor, ...]:
        """Rotary positions of positions n (any shape, float64) under each map."""
        return (n,)

    def lanes(self, around: Around) -> tuple[Lane, ...]:
        """The lanes, over disjoint pairs.

        Raises:
            ModelError: sizes that do not fit each other or the original length.
        """
        return (Lane(0, 0),)


class NoRemap(Remap):
    """Positions as they are."""

    name: Literal["none"] = "none"


class ReRope(Remap):
    """ReRoPE: distances from w on all look like w, min(d, w). Su 2023 (kexue.fm/archives/9708).

    Two lanes: d < w as trained; beyond, queries at the fixed position w meet unrotated keys. The author's
    code (bojone/rerope) also multiplies queries by max(1, ln(n + 1) / ln L0); that is a temperature, and is
    left out here so that the remap can be measured alone.
    """

    name: Literal["rerope"] = "rerope"
    distance: int | None = Field(
        None, ge=1, description="w, the distance from which on all look alike; null: half the original length"
    )

    def _w(self, around: Around) -> int:
        return self.distance or max(1, around.original_length // 2)

    def maps(self, n, stretch, around):
        return n, torch.full_like(n, self._w(around)), torch.zeros_like(n)

    def lanes(self, around):
        w = self._w(around)
        return Lane(0, 0, lambda n, m, order: n - m < w), Lane(1, 2, lambda n, m, order: n - m >= w)


class LeakyReRope(ReRope):
    """Leaky ReRoPE: from w on distances grow s times slower, w + (d − w)/s. Su 2023 (kexue.fm/archives/9708).

    With positions n/s the query stands w (1 − 1/s) further on: n/s + w (1 − 1/s) − m/s = w + (d − w)/s. At
    s = 1 it is plain RoPE. Reaches (L0 − w)·s + w tokens within trained distances. The ln n of the author's
    code is left out, as in `rerope`.
    """

    name: Literal["leaky_rerope"] = "leaky_rerope"
    factor: Annotated[float, Field(ge=1)] | Literal["auto"] = Field(
        16.0,
        description="s; auto: max(1, (L − w) / (L0 − w)), by which the last of L tokens sees the first at L0",
    )

    @property
    def follows_length(self):
        return self.factor == "auto"

    def stretch(self, length, around):
        if self.factor != "auto":
            return self.factor
        w = self._w(around)
        return max(1.0, (length - w) / (around.original_length - w))

    def maps(self, n, stretch, around):
        return n, n / stretch + self._w(around) * (1 - 1 / stretch), n / stretch

    def lanes(self, around):
        w = self._w(around)
        if self.factor == "auto" and w >= around.original_length:
            raise ModelError(
                f"remap.factor auto keeps distances below the original length {around.original_length}, and "
                f"remap.distance {w} is none of them: make it smaller, or give factor a number"
            )
        return super().lanes(around)


class SelfExtend(Remap):
    """Self-Extend: d < W as trained; beyond, ⌊n/G⌋ − ⌊m/G⌋ + W − W/G. Jin et al. 2024 (arXiv:2401.01325).

    Distances stay within the trained ones up to (L0 − W)·G + W tokens, of which the authors advise a half to
    two thirds; longer inputs are not refused. Floors are of positions: a shift by other than a multiple of G
    groups the tokens otherwise.
    """

    exempt = {"shift": "groups are counted from position 0, so that a shift groups tokens otherwise"}

    name: Literal["self_extend"] = "self_extend"
    neighbours: int | None = Field(
        None,
        ge=1,
        description="W, distances below it stay as trained; a multiple of group; "
        "null: half the original length, rounded down to a multiple of group",
    )
    group: int = Field(8, ge=1, description="G, so many positions beyond the neighbours share one")

    @model_validator(mode="after")
    def _whole_groups(self):
        if self.neighbours is not None and self.neighbours % self.group:
            raise ValueError(
                f"remap.neighbours {self.neighbours} must be a multiple of remap.group {self.group}: else "
                "grouped distances are no whole numbers"
            )
        return self

    def _neighbours(self, around: Around) -> int:
        return self.neighbours or around.original_length // 2 // self.group * self.group

    def maps(self, n, stretch, around):
        w, grouped = self._neighbours(around), torch.floor(n / self.group)
        return n, grouped + (w - w // self.group), grouped

    def lanes(self, around):
        w = self._neighbours(around)
        if not w:
            raise ModelError(
                f"half the original length {around.original_length} holds no group of {self.group} "
                "positions: make remap.group smaller, or give remap.neighbours"
            )
        return Lane(0, 0, lambda n, m, order: n - m < w), Lane(1, 2, lambda n, m, order: n - m >= w)


class DualChunk(Remap):
    """Dual Chunk Attention. An, Huang, Zhang et al. 2024 (arXiv:2402.17463).

    Keys turn once, at m mod S with S = chunk − local. Queries turn three ways, by the chunk of S positions in
    which the key lies: their own, n mod S; the one before, min(n mod S + S, chunk); older, chunk. So none
    exceeds `chunk`, those up to `local` are true ones (while local is at most S), and they do not rise evenly
    with d.
    """

    exempt = {"shift": "chunks are counted from position 0, so that a shift moves their borders"}

    name: Literal["dual_chunk"] = "dual_chunk"
    chunk: int | None = Field(
        None, ge=2, description="largest distance shown; null: three quarters of the original length"
    )
    local: int | None = Field(
        None,
        ge=1,
        description="distances up to it are true across the border of chunks; null: original length / 8",
    )
    mscale: bool = Field(
        False,
        description="multiply cos and sin by 0.05 ln s + 1, s = max(1, L / L0): in the authors' code, not in "
        "the paper",
    )

    @model_validator(mode="after")
    def _local_is_smaller(self):
        if self.chunk is not None and self.local is not None and self.local >= self.chunk:
            raise ValueError(self._too_long(self.local, self.chunk))
        return self

    @staticmethod
    def _too_long(local: int, chunk: int) -> str:
        return (
            f"remap.local {local} must be smaller than remap.chunk {chunk}: keys turn at positions modulo "
            "their difference"
        )

    def _sizes(self, around: Around) -> tuple[int, int]:
        """C and S."""
        chunk = self.chunk or max(2, around.original_length * 3 // 4)
        return chunk, chunk - (self.local or max(1, around.original_length // 8))

    @property
    def follows_length(self):
        return self.mscale

    def stretch(self, length, around):
        return max(1.0, length / around.original_length) if self.mscale else 1.0

    def amplitude(self, stretch):
        return 0.05 * math.log(stretch) + 1.0

    def maps(self, n, stretch, around):
        chunk, step = self._sizes(around)
        here = torch.remainder(n, step)
        return here, (here + step).clamp(max=chunk), torch.full_like(n, chunk)

    def lanes(self, around):
        chunk, step = self._sizes(around)
        if step < 1:
            raise ModelError(self._too_long(chunk - step, chunk))

        def back(n: Tensor, m: Tensor) -> Tensor:
            """How many chunks the key lies behind the query's."""
            return n // step - m // step

        return (
            Lane(0, 0, lambda n, m, order: back(n, m) < 1),
            Lane(1, 0, lambda n, m, order: back(n, m) == 1),
            Lane(2, 0, lambda n, m, order: back(n, m) > 1),
        )


class LambdaLimit(Remap):
    """The distance limit of LM-Infinite: sinks are seen at min(d, limit). Han et al. 2023 (arXiv:2308.16137).

    Its Λ-shaped mask is the scheme's `window` (2048 or 4096 there) and `sinks` (10 to 100). Queries at the
    fixed position `limit` meet unrotated sinks; distances inside the window are true ones.
    """

    needs_sinks = True

    name: Literal["lambda"] = "lambda"
    limit: int | None = Field(None, ge=1, description="largest distance a sink is seen at; null: window")

    def _limit(self, around: Around) -> int:
        return self.limit or around.window or around.original_length

    def maps(self, n, stretch, around):
        return n, torch.full_like(n, self._limit(around)), torch.zeros_like(n)

    def lanes(self, around):
        limit, sinks = self._limit(around), around.sinks
        return (
            Lane(0, 0, lambda n, m, order: (order >= sinks) | (n - m < limit)),
            Lane(1, 2, lambda n, m, order: (order < sinks) & (n - m >= limit)),
        )


class Streaming(Remap):
    """StreamingLLM: positions are places among the tokens still kept. Xiao et al. 2023 (arXiv:2309.17453).

    What is kept are the scheme's `sinks` (4 there) and its `window`. Once tokens between them are gone, every
    query stands at sinks + window − 1: sinks are seen at min(n, sinks + window − 1) − m, and the window at
    true distances. The authors' cache rotates all keys anew at each step; one more map of queries says the
    same. Positions are taken to count the document's tokens from 0.
    """

    exempt = {"shift": "places among the kept tokens are counted from position 0"}
    needs_sinks = True

    name: Literal["streaming"] = "streaming"

    def maps(self, n, stretch, around):
        return n, n.clamp(max=around.sinks + (around.window or around.original_length) - 1)

    def lanes(self, around):
        sinks = around.sinks
        return Lane(0, 0, lambda n, m, order: order >= sinks), Lane(1, 0, lambda n, m, order: order < sinks)


AnyRemap = Annotated[
    NoRemap | ReRope | LeakyReRope | SelfExtend | DualChunk | LambdaLimit | Streaming,
    Field(discriminator="name"),
]
