"""Context parallelism: windows of tokens that are sharded over the ranks of a context group.

A window of L tokens is divided into 2N chunks of equal length for N ranks; rank r owns chunks r (its head)
and 2N − 1 − r (its tail), which balances causal attention. In each layer a rank runs its head and then its
tail as two passes with cached keys: each pass gathers the chunks of all ranks, and its keys end with its own
chunk. docs/context_sharding.md describes the design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
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

    def chunk_length(self, length: int) -> int:
        """Tokens per chunk of a window of `length` tokens.

        Raises:
            ModelError: the window cannot be divided into 2N chunks of equal length.
        """
        if length % (2 * self.size):
            raise ModelError(
                f"a window of {length} tokens cannot be divided into {2 * self.size} chunks of equal length: "
                f"use a multiple of {2 * self.size}"
            )
        return length // (2 * self.size)

    def select(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, 2c) of whole windows (B, L), head and tail."""
        size = self.chunk_length(x.shape[1])
        return torch.cat([x[:, chunk * size : (chunk + 1) * size] for chunk in self.chunks], dim=1)

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

    @property
    def chunk_length(self) -> int:
        return self.shard.chunk_length(self.positions.order.shape[1])

    def chunk(self, index: int) -> TokenPositions:
        """The positions of one chunk."""
        size = self.chunk_length
        return self.positions.part(index * size, (index + 1) * size)

    @property
    def own(self) -> list[TokenPositions]:
        """The positions of this rank's head and tail."""
        return [self.chunk(index) for index in self.shard.chunks]

    def keys(self, mixer: str) -> list[TokenPositions]:
        """The positions of the keys of the passes of head and tail. Linear attention caches sums instead of
        earlier keys."""
        if mixer == "linear":
            return self.own
        return [self.positions.part(0, (index + 1) * self.chunk_length) for index in self.shard.chunks]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Head and tail of x (B, 2c, ·)."""
        head, tail = x.split(self.chunk_length, dim=1)
        return head, tail

    def cache_for(self, mixer: str) -> GatheredLayer:
        """An empty cache for the two passes of one layer."""
        return (GatheredSums if mixer == "linear" else GatheredKeys)(self)


class GatheredLayer:
    """The cache of one layer in the passes of head and tail, filled with the chunks of all ranks."""

    def __init__(self, window: ShardedWindow):
        self.window, self.shard = window, window.shard
        self._chunks: dict[str, list[Tensor]] = {}  # in the order of the sequence

    def _gather(self, name: str, x: Tensor) -> int:
        """Gather a tensor of this pass; returns the index of this rank's chunk."""
        found = self.shard.gather(x)
        is_head = name not in self._chunks
        # Heads are in the order of ranks, tails in reverse.
        self._chunks[name] = found if is_head else [*self._chunks[name], *reversed(found)]
        return self.shard.chunks[0 if is_head else 1]


class GatheredKeys(GatheredLayer):
    """Keys, values and extras of softmax attention; see `LayerCache`."""

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._extras: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values (B, G, c, ·); returns those up to this rank's chunk (B, G, S, ·)."""
        return self._append("k", k), self._append("v", v)

    def _append(self, name: str, x: Tensor) -> Tensor:
        index = self._gather(name, x)
        return torch.cat(self._chunks[name][: index + 1], dim=2)

    def extend_extras(self, features: Tensor, accumulate: Accumulate, new: TokenPositions) -> Tensor:
        """Gather features (B, c, F); returns the extras up to this rank's chunk (B, S, E).

        Extras are accumulated on each rank from the features of all earlier tokens, as in one process.
        """
        index = self._gather("features", features)
        size, count = self.window.chunk_length, self.shard.size
        begin = 0 if self._extras is None else count
        stop = max(index + 1, count)  # the tails continue from all heads
        found = torch.cat(self._chunks["features"][begin:stop], dim=1)
        extras = accumulate(found, self._extras, self.window.positions.part(begin * size, stop * size))
        whole = extras if self._extras is None else torch.cat([self._extras, extras], dim=1)
        self._extras = whole
        return whole[:, : (index + 1) * size]


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
