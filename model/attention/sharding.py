"""Context parallelism: windows of tokens that are sharded over the ranks of a context group.

A window of L tokens is divided into 2N chunks for N ranks; rank r owns chunks r (its head)
and 2N − 1 − r (its tail), which balances causal attention. In each layer a rank runs its head and then its
tail as two passes with cached keys: each pass gathers the chunks of all ranks, and its keys end with its own
chunk. docs/context_sharding.md describes the design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, wait_tensor

from errors import ModelError
from model.attention.linear import accumulated
from model.cache import LinearState
from model.position import Accumulate, TokenPositions


@dataclass(frozen=True)
class ContextShard:
    """The part of every window that one rank of a context group owns.

    Attributes:
        rank: of this process in the group.
        size: N, ranks of the group.
        group: name of the process group.
    """

    rank: int
    size: int
    group: str

    @property
    def chunks(self) -> tuple[int, int]:
        """Indices of this rank's chunks, head and tail."""
        return self.rank, 2 * self.size - 1 - self.rank

    def bounds(self, length: int, chunk: int) -> tuple[int, int]:
        """Indices of the first token of a chunk of `length` tokens, and of the next chunk's. The lengths of
        chunks differ by at most one token.

        Raises:
            ModelError: there are fewer tokens than chunks.
        """
        count = 2 * self.size
        if length < count:
            raise ModelError(
                f"a window of {length} tokens cannot be divided into {count} chunks, two for each process: "
                f"use {count} tokens or more, or fewer processes"
            )
        return chunk * length // count, (chunk + 1) * length // count

    def select(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, T) of whole windows (B, L), head and tail."""
        parts = [self.bounds(x.shape[1], chunk) for chunk in self.chunks]
        return torch.cat([x[:, start:stop] for start, stop in parts], dim=1)

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of each rank, by rank; the gradient of x is the sum over ranks of those of its copies
        (reduce-scatter). On every rank, the loss must depend on the result, else the others wait for its
        backward pass."""
        whole = wait_tensor(all_gather_single(x.contiguous(), 0, self.group))
        return list(whole.chunk(self.size))


@dataclass(frozen=True)
class ShardedWindow:
    """Windows whose tokens are sharded, and their positions, which every rank has in full."""

    shard: ContextShard
    positions: TokenPositions

    def bounds(self, index: int) -> tuple[int, int]:
        """See `ContextShard.bounds`."""
        return self.shard.bounds(self.positions.order.shape[1], index)

    def chunk(self, index: int) -> TokenPositions:
        """The positions of one chunk."""
        return self.positions.part(*self.bounds(index))

    @property
    def own(self) -> list[TokenPositions]:
        """The positions of this rank's head and tail."""
        return [self.chunk(index) for index in self.shard.chunks]

    def keys(self, mixer: str) -> list[TokenPositions]:
        """The positions of the keys of the passes of head and tail. Linear attention caches sums instead of
        earlier keys."""
        if mixer == "linear":
            return self.own
        return [self.positions.part(0, self.bounds(index)[1]) for index in self.shard.chunks]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Head and tail of x (B, T, ·)."""
        start, stop = self.bounds(self.shard.chunks[0])
        return x[:, : stop - start], x[:, stop - start :]

    def cache_for(self, mixer: str) -> GatheredLayer:
        """An empty cache for the two passes of one layer."""
        return (GatheredSums if mixer == "linear" else GatheredKeys)(self)


class GatheredLayer:
    """The cache of one layer in the passes of head and tail, filled with the chunks of all ranks."""

    def __init__(self, window: ShardedWindow):
        self.window, self.shard = window, window.shard
        self._chunks: dict[str, list[Tensor]] = {}  # in the order of the sequence

    def _gather(self, name: str, x: Tensor, dim: int | None = None) -> int:
        """Gather a tensor of this pass, whose dimension `dim` is that of the tokens of a chunk; returns the
        index of this rank's chunk."""
        done = len(self._chunks.setdefault(name, []))
        chunks = range(done, done + self.shard.size)
        lengths = [stop - start for start, stop in map(self.window.bounds, chunks)]
        if dim is not None:
            padding = max(lengths) - x.shape[dim]  # gathered tensors have equal sizes
            x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, padding)) if padding else x
        found = self.shard.gather(x)
        if done:
            found.reverse()  # heads are in the order of ranks, tails in reverse
        if dim is not None:
            found = [each.narrow(dim, 0, length) for each, length in zip(found, lengths, strict=True)]
        self._chunks[name] += found
        return self.shard.chunks[1 if done else 0]


class GatheredKeys(GatheredLayer):
    """Keys, values and extras of softmax attention; see `LayerCache`."""

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._extras: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values (B, G, T, ·); returns those up to this rank's chunk (B, G, S, ·)."""
        return self._append("k", k), self._append("v", v)

    def _append(self, name: str, x: Tensor) -> Tensor:
        index = self._gather(name, x, 2)
        return torch.cat(self._chunks[name][: index + 1], dim=2)

    def extend_extras(self, features: Tensor, accumulate: Accumulate, new: TokenPositions) -> Tensor:
        """Gather features (B, T, F); returns the extras up to this rank's chunk (B, S, E).

        Extras are accumulated on each rank from the features of all earlier tokens, as in one process.
        """
        index, count = self._gather("features", features, 1), self.shard.size
        begin = 0 if self._extras is None else count
        stop = max(index + 1, count)  # the tails continue from all heads
        found = torch.cat(self._chunks["features"][begin:stop], dim=1)
        first, last = self.window.bounds(begin)[0], self.window.bounds(stop - 1)[1]
        extras = accumulate(found, self._extras, self.window.positions.part(first, last))
        whole = extras if self._extras is None else torch.cat([self._extras, extras], dim=1)
        self._extras = whole
        return whole[:, : self.window.bounds(index)[1]]


class GatheredSums(GatheredLayer):
    """Sums of linear attention; see `LinearLayerCache`."""

    def before(self, own: Callable[[], LinearState]) -> LinearState | None:
        """Sums over the tokens before this rank's chunk: an exclusive scan over chunks.

        Args:
            own: computes the sums over the tokens of this rank's chunk.
        """
        sums = own()
        index = self._gather("values", sums.values)
        self._gather("keys", sums.keys)
        # Over all chunks, also later ones: the backward pass of a gather must run on every rank.
        chunks = zip(self._chunks["values"], self._chunks["keys"], strict=True)
        scan = accumulated([LinearState(v, k, self._end(i)) for i, (v, k) in enumerate(chunks)])
        return scan.of(index - 1, index) if index else None

    def _end(self, index: int) -> Tensor | None:
        """(B or 1, 1) document of the last token of a chunk; None in plain layout."""
        chunk = self.window.chunk(index)
        return None if chunk.layout == "plain" else chunk.document[:, -1:]

    def keep(self, sums: LinearState) -> None:
        """Later chunks do not use these sums."""
