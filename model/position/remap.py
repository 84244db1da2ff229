"""Position remaps: keep rotary distances within the trained range on longer sequences.

A remap converts positions to *rotary positions* before frequencies are applied. It has one or more
*branches*; each has one map for queries and one for keys, and applies to some of the query-key
pairs. The score of a pair is (R(a(n) θ) q_n)·(R(c(m) θ) k_m), a function of a(n) − c(m), with the
maps a and c of the branch that covers (n, m). Distances d = n − m are in positions; the attention
mask does not change.

Maps are elementwise and part of the tables, which are indexed by the original position. A key is
rotated once by each key map, and all rotated forms are cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from errors import ModelError
from model.position.scaling import Factor
from settings.fields import StrictSettings, setting

# (query position, key position, key order in its document) -> does the branch cover the pair?
# Elementwise.
Covers = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RemapBranch:
    """A query map and a key map, as indices into the result of `maps`, and the pairs they cover."""

    query: int
    key: int
    covers: Covers | None = None  # None: every pair


def near_and_far(distance: int) -> tuple[RemapBranch, RemapBranch]:
    """The first maps for distances below `distance`, the second query map and third key map from
    that distance on."""
    return (
        RemapBranch(0, 0, lambda n, m, order: n - m < distance),
        RemapBranch(1, 2, lambda n, m, order: n - m >= distance),
    )


@dataclass(frozen=True)
class RemapContext:
    """The scheme's settings that a remap uses: L0, window and sinks."""

    original_length: int
    window: int | None
    sinks: int


class Remap(StrictSettings):
    """Base class of remaps; does not change positions."""

    # Conformance checks that do not apply with this remap: {check: reason}.
    exempt: ClassVar[dict[str, str]] = {}
    # Whether it requires a window and sinks.
    needs_sinks: ClassVar[bool] = False
    # Whether the maps depend on the declared sequence length.
    depends_on_length: ClassVar[bool] = False

    name: str

    def describe(self, length: int, original_length: int) -> str:
        """The name and all settings that are not null or off, e.g. `leaky_rerope factor 16.0`."""
        given = [f"{key} {value}" for key, value in self if key != "name" and value]
        return " ".join([self.name, *given])

    def keeps(self, length: int, context: RemapContext) -> bool:
        """Whether all distances within `length` tokens are known to stay as they are."""
        return False

    def stretch(self, length: int, context: RemapContext) -> float:
        """The stretch of the maps or the amplitude for a sequence of `length` tokens."""
        return 1.0

    def amplitude(self, stretch: float) -> float:
        """Factor on cos and sin of every map; logits are multiplied by its square."""
        return 1.0

    def maps(
        self,
        n: Tensor,
        stretch: float,
        context: RemapContext,
    ) -> tuple[Tensor, ...]:
        """Rotary positions of the positions n (any shape, float64) for each map."""
        return (n,)

    def branches(self, context: RemapContext) -> tuple[RemapBranch, ...]:
        """The branches, which cover disjoint pairs.

        Raises:
            ModelError: sizes are inconsistent with each other or with the original length.
        """
        return (RemapBranch(0, 0),)


class NoRemap(Remap):
    """No remap."""

    name: Literal["none"] = "none"

    def keeps(self, length, context):
        return True


class ReRope(Remap):
    """ReRoPE: clips distances, min(d, w). Su 2023 (kexue.fm/archives/9708).

    Two branches: d < w is unchanged; otherwise the query has the fixed position w and the key is
    not rotated. The author's code (bojone/rerope) also multiplies queries by max(1, ln(n + 1) / ln
    L0). That is a temperature (`log_n`) and not part of this remap.
    """

    name: Literal["rerope"] = "rerope"
    distance: int | None = setting(None, "maximum distance w; null: half the original length", ge=1)

    def _w(self, context: RemapContext) -> int:
        return self.distance or max(1, context.original_length // 2)

    def keeps(self, length, context):
        return length <= self._w(context)

    def maps(self, n, stretch, context):
        return n, torch.full_like(n, self._w(context)), torch.zeros_like(n)

    def branches(self, context):
        return near_and_far(self._w(context))


class LeakyReRope(ReRope):
    """Leaky ReRoPE: distances above w are compressed, w + (d − w)/s. Su 2023
    (kexue.fm/archives/9708).

    Positions are n/s, and queries are shifted by w (1 − 1/s): n/s + w (1 − 1/s) − m/s = w + (d −
    w)/s. With s = 1 it equals RoPE. Up to (L0 − w)·s + w tokens stay within trained distances. As
    in `rerope`, the ln n of the author's code is not included.
    """

    name: Literal["leaky_rerope"] = "leaky_rerope"
    factor: Factor = setting(
        16.0,
        "s; auto: max(1, (L − w) / (L0 − w)), which maps the largest distance L to L0",
    )

    @property
    def depends_on_length(self):
        return self.factor == "auto"

    def stretch(self, length, context):
        if self.factor != "auto":
            return self.factor
        w = self._w(context)
        return max(1.0, (length - w) / (context.original_length - w))

    def maps(self, n, stretch, context):
        return n, n / stretch + self._w(context) * (1 - 1 / stretch), n / stretch

    def branches(self, context):
        w = self._w(context)
        if self.factor == "auto" and w >= context.original_length:
            raise ModelError(
                f"remap.factor auto requires remap.distance {w} below the original length "
                f"{context.original_length}: reduce remap.distance, or set remap.factor to a number"
            )
        return super().branches(context)


class SelfExtend(Remap):
    """Self-Extend: d < W is unchanged; otherwise ⌊n/G⌋ − ⌊m/G⌋ + W − W/G. Jin et al. 2024
    (arXiv:2401.01325).

    Up to (L0 − W)·G + W tokens stay within trained distances; the authors recommend a half to two
    thirds of that. Longer inputs are allowed. Groups start at position 0, so a shift of positions
    by other than a multiple of G changes the grouping.
    """

    exempt: ClassVar[dict[str, str]] = {"shift": "groups start at position 0: a shift changes them"}

    name: Literal["self_extend"] = "self_extend"
    neighbors: int | None = setting(
        None,
        "W: distances below it are unchanged; a multiple of group; null: half the "
        "original length, rounded down to a multiple of group",
        ge=1,
    )
    group: int = setting(8, "G: positions per group", ge=1)

    @model_validator(mode="after")
    def _whole_groups(self):
        if self.neighbors is not None and self.neighbors % self.group:
            raise ValueError(
                f"remap.neighbors {self.neighbors} must be a multiple of remap.group "
                f"{self.group}, so that grouped distances are integers"
            )
        return self

    def _neighbors(self, context: RemapContext) -> int:
        return self.neighbors or context.original_length // 2 // self.group * self.group

    def keeps(self, length, context):
        return length <= self._neighbors(context)

    def maps(self, n, stretch, context):
        w = self._neighbors(context)
        grouped = torch.floor(n / self.group)
        return n, grouped + (w - w // self.group), grouped

    def branches(self, context):
        w = self._neighbors(context)
        if not w:
            raise ModelError(
                f"half the original length {context.original_length} is smaller than remap.group "
                f"{self.group}: reduce remap.group, or set remap.neighbors"
            )
        return near_and_far(w)


class DualChunk(Remap):
    """Dual Chunk Attention. An, Huang, Zhang et al. 2024 (arXiv:2402.17463).

    Keys have the position m mod S with S = chunk − local. Queries have one of three positions, by
    the chunk of S positions that contains the key: the same chunk, n mod S; the previous one, min(n
    mod S + S, chunk); older ones, chunk. No distance exceeds `chunk`, distances up to `local` are
    exact (if local ≤ S), and distances are not monotonic in d.
    """

    exempt: ClassVar[dict[str, str]] = {
        "shift": "chunks start at position 0, so a shift moves their borders"
    }

    name: Literal["dual_chunk"] = "dual_chunk"
    chunk: int | None = setting(
        None,
        "maximum distance; null: three quarters of the original length",
        ge=2,
    )
    local: int | None = setting(
        None,
        "distances up to it are exact across chunks; null: original length / 8",
        ge=1,
    )
    mscale: bool = setting(
        False,
        "multiply cos and sin by 0.05 ln s + 1, s = max(1, L / L0); in the authors' code only",
    )

    @model_validator(mode="after")
    def _local_is_smaller(self):
        if self.chunk is not None and self.local is not None and self.local >= self.chunk:
            raise ValueError(self._too_long(self.local, self.chunk))
        return self

    @staticmethod
    def _too_long(local: int, chunk: int) -> str:
        return (
            f"remap.local {local} must be smaller than remap.chunk {chunk}: key positions are "
            "modulo their difference"
        )

    def _sizes(self, context: RemapContext) -> tuple[int, int]:
        """C and S."""
        chunk = self.chunk or max(2, context.original_length * 3 // 4)
        return chunk, chunk - (self.local or max(1, context.original_length // 8))

    @property
    def depends_on_length(self):
        return self.mscale

    def stretch(self, length, context):
        return max(1.0, length / context.original_length) if self.mscale else 1.0

    def amplitude(self, stretch):
        return 0.05 * math.log(stretch) + 1.0

    def maps(self, n, stretch, context):
        chunk, step = self._sizes(context)
        here = torch.remainder(n, step)
        return here, (here + step).clamp(max=chunk), torch.full_like(n, chunk)

    def branches(self, context):
        chunk, step = self._sizes(context)
        if step < 1:
            raise ModelError(self._too_long(chunk - step, chunk))

        def back(n: Tensor, m: Tensor) -> Tensor:
            """Number of chunks between the key and the query."""
            return n // step - m // step

        return (
            RemapBranch(0, 0, lambda n, m, order: back(n, m) < 1),
            RemapBranch(1, 0, lambda n, m, order: back(n, m) == 1),
            RemapBranch(2, 0, lambda n, m, order: back(n, m) > 1),
        )


class LambdaLimit(Remap):
    """Distance limit of LM-Infinite: sinks have distance min(d, limit). Han et al. 2023
    (arXiv:2308.16137).

    The Λ-shaped mask is given by the scheme's `window` (2048 or 4096 in the paper) and `sinks` (10
    to 100). For sinks, queries have the fixed position `limit` and keys are not rotated; distances
    within the window are unchanged.
    """

    needs_sinks = True

    name: Literal["lambda"] = "lambda"
    limit: int | None = setting(None, "maximum distance of sinks; null: window", ge=1)

    def _limit(self, context: RemapContext) -> int:
        return self.limit or context.window or context.original_length

    def keeps(self, length, context):
        return length <= self._limit(context)

    def maps(self, n, stretch, context):
        return n, torch.full_like(n, self._limit(context)), torch.zeros_like(n)

    def branches(self, context):
        limit = self._limit(context)
        sinks = context.sinks
        return (
            RemapBranch(0, 0, lambda n, m, order: (order >= sinks) | (n - m < limit)),
            RemapBranch(1, 2, lambda n, m, order: (order < sinks) & (n - m >= limit)),
        )


class Streaming(Remap):
    """StreamingLLM: positions are indices within the cache. Xiao et al. 2023 (arXiv:2309.17453).

    The cache contains the scheme's `sinks` (4 in the paper) and its `window`. Sinks have the
    distance min(n, sinks + window − 1) − m; distances within the window are unchanged. The authors'
    cache rotates all keys again at each step; a second query map is equivalent. Positions must
    start at 0 in each document.
    """

    exempt: ClassVar[dict[str, str]] = {"shift": "cache indices are counted from position 0"}
    needs_sinks = True

    name: Literal["streaming"] = "streaming"

    def keeps(self, length, context):
        return context.window is None or length <= context.sinks + context.window

    def maps(self, n, stretch, context):
        return n, n.clamp(max=context.sinks + (context.window or context.original_length) - 1)

    def branches(self, context):
        sinks = context.sinks
        return (
            RemapBranch(0, 0, lambda n, m, order: order >= sinks),
            RemapBranch(1, 0, lambda n, m, order: order < sinks),
        )


class String(Remap):
    """STRING: distances from S on become d − S + W. An et al. 2024 (arXiv:2410.18745).

    Long distances, which are rare in training, are replaced by shorter ones; up to L0 + S − W
    tokens stay within trained distances. The authors apply it within L0, with L0 − S between a
    quarter and 0.4 of L0. At the prompt, their code counts the key at distance S twice, at S and at
    W; while decoding, and here, it is at W.
    """

    name: Literal["string"] = "string"
    distance: int | None = setting(
        None,
        "S: distances below it are unchanged; null: 67% of the original length",
        ge=1,
    )
    local: int | None = setting(
        None,
        "W, the new distance of keys at distance S; null: 128, or S / 4 if that is less",
        ge=0,
    )

    def _sizes(self, context: RemapContext) -> tuple[int, int]:
        """S and W."""
        length = context.original_length
        distance = self.distance or length - int(0.33 * length)
        return distance, min(128, distance // 4) if self.local is None else self.local

    def keeps(self, length, context):
        return length <= self._sizes(context)[0]

    def maps(self, n, stretch, context):
        distance, local = self._sizes(context)
        return n, n - distance + local

    def branches(self, context):
        distance, local = self._sizes(context)
        if local >= distance:
            raise ModelError(
                f"remap.local {local} must be smaller than remap.distance {distance}: reduce it"
            )
        return (
            RemapBranch(0, 0, lambda n, m, order: n - m < distance),
            RemapBranch(1, 0, lambda n, m, order: n - m >= distance),
        )


AnyRemap = Annotated[
    NoRemap | ReRope | LeakyReRope | SelfExtend | DualChunk | LambdaLimit | Streaming | String,
    Field(discriminator="name"),
]
