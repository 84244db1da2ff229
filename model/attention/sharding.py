"""Context parallelism: windows of tokens that are sharded over the ranks of a context group.

A window of L tokens is divided into 2·m·N chunks for N ranks. Ranks take chunks in turns, forward
and then backward, which balances causal attention: with m = 1, rank r owns chunks r and 2N − 1 − r.
In each layer a rank runs its chunks in order as passes with cached keys: each pass gathers the
chunks of all ranks in this turn, and its keys end with its own chunk. In a layer with a window, a
rank receives only the keys that its queries attend to. docs/context_sharding.md describes the
design.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_single,
    all_reduce,
    all_to_all_single,
    wait_tensor,
)

from errors import ModelError
from model.position import Accumulate, PositionSettings
from model.token_positions import TokenPositions

TokenRanges = list[tuple[int, int]]  # (first token, last token + 1), in order


@dataclass(frozen=True)
class ContextShard:
    """The part of every window that one rank of a context group owns.

    Attributes:
        rank: of this process in the group.
        size: N, ranks of the group.
        group: name of the process group.
        chunks_per_rank: number of chunks that each rank owns, 2·m.
        on_gloo: types of devices whose tensors are gathered with an all-to-all. With gloo in torch
            2.13, `all_gather_into_tensor` can corrupt memory if another collective is under way.
    """

    rank: int
    size: int
    group: str
    chunks_per_rank: int = 2
    on_gloo: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextShard:
        """The part of this process in a context group."""
        backends = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        on_gloo = tuple(device for device, backend in backends if backend == "gloo")
        return cls(
            group.rank(),
            group.size(),
            group.group_name,
            on_gloo=on_gloo,
        )

    def divided(self, length: int, at_most: int) -> ContextShard:
        """This part of windows of `length` tokens, in chunks of about `at_most` tokens or fewer."""
        pairs = -(-length // (2 * self.size * at_most))
        return replace(self, chunks_per_rank=2 * max(1, min(pairs, length // (2 * self.size))))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Indices of this rank's chunks, in order."""
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Indices of the chunks of a rank of the group, in order."""
        turns = range(self.chunks_per_rank)
        return tuple(self.size * t + (self.size - 1 - rank if t % 2 else rank) for t in turns)

    def bounds(self, length: int, chunk: int) -> tuple[int, int]:
        """Indices of the first token of a chunk of `length` tokens, and of the next chunk's. The
        lengths of chunks differ by at most one token.

        Raises:
            ModelError: there are fewer tokens than chunks.
        """
        count = self.chunks_per_rank * self.size
        if length < count:
            raise ModelError(
                f"a window of {length} tokens cannot be divided into {count} chunks, "
                f"{self.chunks_per_rank} for each process: use {count} tokens or more, or fewer "
                f"processes"
            )
        return chunk * length // count, (chunk + 1) * length // count

    def select(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, T) of whole windows (B, L), in order."""
        parts = [self.bounds(x.shape[1], chunk) for chunk in self.chunks]
        return torch.cat([x[:, start:stop] for start, stop in parts], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, without gradients."""
        return wait_tensor(all_reduce(x, "sum", self.group))

    def gather(self, x: Tensor) -> Tensor:
        """Start to gather x of each rank; `gathered` waits for the result. The gradient of x is the
        sum over ranks of those of its copies. On every rank, the loss must depend on the result,
        else the others wait for its backward pass."""
        if x.device.type in self.on_gloo:
            rows = [len(x)] * self.size
            return self.exchange(torch.cat([x] * self.size), rows, rows)
        return all_gather_single(x.contiguous(), 0, self.group)

    def gathered(self, whole: Tensor) -> list[Tensor]:
        """The tensors of each rank, by rank; waits for what `gather` has started."""
        return list(wait_tensor(whole).chunk(self.size))

    def exchange(
        self,
        x: Tensor,
        sent: list[int],
        received: list[int],
    ) -> Tensor:
        """Start to send the rows of x, sent[r] of them to rank r, in order, and to receive
        received[r] rows from it; `wait_tensor` waits for the result. As with `gather`, the loss
        must depend on the result."""
        return all_to_all_single(x.contiguous(), received, sent, self.group)


@dataclass(frozen=True)
class ShardedWindow:
    """Windows whose tokens are sharded, and their positions, which every rank has in full.

    Attributes:
        streamed: without gradients. A block updates hidden states in place, chunk by chunk, and
            gathers keys into one buffer, so that a rank holds its hidden states and the keys of one
            layer.
    """

    shard: ContextShard
    positions: TokenPositions
    streamed: bool = False

    @property
    def length(self) -> int:
        """L, tokens of a window."""
        return self.positions.order.shape[1]

    def bounds(self, index: int) -> tuple[int, int]:
        """See `ContextShard.bounds`."""
        return self.shard.bounds(self.length, index)

    def chunk(self, index: int) -> TokenPositions:
        """The positions of one chunk."""
        return self.positions.part(*self.bounds(index))

    @property
    def own(self) -> list[TokenPositions]:
        """The positions of this rank's chunks."""
        return [self.chunk(index) for index in self.shard.chunks]

    def last(self, keep: int) -> list[TokenPositions]:
        """The positions of the last `keep` tokens of this rank, by chunk."""
        parts: list[TokenPositions] = []
        for positions in reversed(self.own):
            count = min(keep, positions.order.shape[1])
            parts.insert(0, positions.last(count))
            keep -= count
        return parts

    def keys(self, settings: PositionSettings) -> list[TokenPositions]:
        """The positions of the keys of the passes of this rank's chunks."""
        return [self._joined(self.visible(index, settings)) for index in self.shard.chunks]

    def is_local(self, settings: PositionSettings) -> bool:
        """Whether the tokens outside the reach of a query are known from their order in the window
        alone. The sinks of packed documents are anywhere."""
        is_plain = self.positions.layout == "plain"
        return settings.window is not None and (is_plain or not settings.sinks)

    def visible(self, index: int, settings: PositionSettings) -> TokenRanges:
        """The tokens that any query of a chunk may attend to: sinks, and those up to the chunk's
        last."""
        start, stop = self.bounds(index)
        if settings.window is None or not self.is_local(settings):
            return [(0, stop)]
        first = max(0, start - settings.window + 1)
        if first <= settings.sinks:
            return [(0, stop)]
        return [(0, settings.sinks), (first, stop)] if settings.sinks else [(first, stop)]

    def _joined(self, ranges: TokenRanges) -> TokenPositions:
        if len(ranges) == 1:
            return self.positions.part(*ranges[0])
        return self.positions.map(
            lambda x: torch.cat([x[:, start:stop] for start, stop in ranges], dim=1),
            unit_steps=False,
        )

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The chunks of this rank's tokens x (B, T, ·)."""
        return x.split([stop - start for start, stop in map(self.bounds, self.shard.chunks)], dim=1)

    def cache_for(self, settings: PositionSettings) -> GatheredKeys:
        """An empty cache of keys for the passes of one layer."""
        return (ExchangedKeys if self.is_local(settings) else GatheredKeys)(self, settings)


class GatheredLayer:
    """The cache of one layer in the passes of a rank's chunks, filled with the chunks of all
    ranks."""

    def __init__(self, window: ShardedWindow):
        self.window = window
        self.shard = window.shard
        self._turns: dict[str, int] = {}  # passes that have gathered each tensor

    def _gather(
        self,
        name: str,
        x: Tensor,
        dim: int | None = None,
    ) -> tuple[int, list[Tensor]]:
        """Gather a tensor of this pass, whose dimension `dim` is that of the tokens of a chunk.

        Returns:
            The index of this rank's chunk, and the chunks of all ranks in the order of the
            sequence.
        """
        return self._gathered(
            name,
            self._start(x, self._turns.get(name, 0), dim),
            dim,
        )

    def _start(self, x: Tensor, turn: int, dim: int | None) -> Tensor:
        """Start to gather a tensor of pass `turn`; see `_gather`."""
        if dim is not None:
            padding = max(self._lengths(turn)) - x.shape[dim]  # gathered tensors have equal sizes
            x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, padding)) if padding else x
        return self.shard.gather(x)

    def _gathered(
        self,
        name: str,
        started: Tensor,
        dim: int | None,
    ) -> tuple[int, list[Tensor]]:
        """Wait for the next tensor of this name; see `_gather`."""
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        found = self.shard.gathered(started)
        if turn % 2:
            found.reverse()
        if dim is not None:
            found = [
                each.narrow(dim, 0, length)
                for each, length in zip(found, self._lengths(turn), strict=True)
            ]
        return self.shard.chunks[turn], found

    def _lengths(self, turn: int) -> list[int]:
        """The tokens of the chunks of all ranks in pass `turn`, in the order of the sequence."""
        chunks = range(turn * self.shard.size, (turn + 1) * self.shard.size)
        return [stop - start for start, stop in map(self.window.bounds, chunks)]


class GatheredKeys(GatheredLayer):
    """Keys, values and extras of softmax attention; see `LayerCache`."""

    def __init__(self, window: ShardedWindow, settings: PositionSettings):
        super().__init__(window)
        self.settings = settings
        self._chunks: dict[str, list[Tensor]] = {}  # in the order of the sequence
        self._buffers: dict[str, Tensor] = {}  # in place of chunks, where the window is streamed
        self._extras: Tensor | None = None
        self._started: list[tuple[Tensor, Tensor]] = []  # keys and values of passes, being gathered

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values (B, G, T, ·); returns those visible to this rank's chunk (B, G, S,
        ·)."""
        self.start(k, v)
        return self.finish()

    def start(self, k: Tensor, v: Tensor) -> None:
        """Start to gather keys and values (B, G, T, ·) of the next pass."""
        turn = self._turns.get("k", 0) + len(self._started)
        self._started.append((self._begin("k", k, turn), self._begin("v", v, turn)))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Wait for the keys and values of the first pass that `start` has begun; see `append`."""
        k, v = self._started.pop(0)
        return self._finish("k", k), self._finish("v", v)

    def _begin(self, name: str, x: Tensor, turn: int) -> Tensor:
        """Start to gather x (B, G, T, ·) of pass `turn`."""
        return self._start(x, turn, 2)

    def _finish(self, name: str, started: Tensor) -> Tensor:
        """Wait for what `_begin` has started; the tokens visible to this rank's chunk."""
        index, found = self._gathered(name, started, 2)
        if not self.window.streamed:
            chunks = self._chunks.setdefault(name, [])
            chunks += found
            return torch.cat(chunks[: index + 1], dim=2)
        if name not in self._buffers:
            rows, heads, _, features = found[0].shape
            self._buffers[name] = found[0].new_empty(
                rows,
                heads,
                self.window.length,
                features,
            )
        first = index - index % self.shard.size
        for chunk, part in enumerate(found, first):
            start, stop = self.window.bounds(chunk)
            self._buffers[name][:, :, start:stop] = part
        return self._buffers[name][:, :, : self.window.bounds(index)[1]]

    def extend_extras(
        self, features: Tensor, accumulate: Accumulate, new: TokenPositions
    ) -> Tensor:
        """Gather features (B, T, F); returns the extras visible to this rank's chunk (B, S, E).

        Extras are accumulated on each rank from the features of all earlier tokens, as in one
        process.
        """
        index, chunks = self._gather("features", features, 1)
        begin = index - index % self.shard.size
        if self._turns["features"] == self.shard.chunks_per_rank:
            # later passes continue from all chunks of earlier ones
            chunks = chunks[: index + 1 - begin]
        first = self.window.bounds(begin)[0]
        last = self.window.bounds(begin + len(chunks) - 1)[1]
        extras = accumulate(
            torch.cat(chunks, dim=1), self._extras, self.window.positions.part(first, last)
        )
        whole = extras if self._extras is None else torch.cat([self._extras, extras], dim=1)
        self._extras = whole
        parts = [whole[:, start:stop] for start, stop in self.window.visible(index, self.settings)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class ExchangedKeys(GatheredKeys):
    """As GatheredKeys, for a layer with a window. In each pass a rank sends the keys and values of
    its chunk to the ranks whose queries can see them, in this pass or a later one."""

    def __init__(self, window: ShardedWindow, settings: PositionSettings):
        super().__init__(window, settings)
        # (first token, tokens) of passes that have begun
        self._own: dict[str, list[tuple[int, Tensor]]] = {}
        # those that are visible later, in order
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._ends: dict[str, list[Tensor]] = {}  # empty: the graph depends on every exchange

    def _begin(self, name: str, x: Tensor, turn: int) -> Tensor:
        chunk = self.shard.chunks[turn]
        ranks = range(self.shard.size)
        first = self.window.bounds(chunk)[0]
        rows = x.movedim(2, 0)
        self._own.setdefault(name, []).append((first, x))
        sent = [self._seen_by(rank, chunk) for rank in ranks]
        # Without any rows too, the backward pass of the exchange must run on this rank.
        parts = [
            rows[start - first : stop - first] for ranges in sent for start, stop in ranges
        ] or [rows[:0]]
        received = [
            self._seen_by(self.shard.rank, self.shard.chunks_of(rank)[turn]) for rank in ranks
        ]
        return self.shard.exchange(
            torch.cat(parts), [*map(_tokens, sent)], [*map(_tokens, received)]
        )

    def _finish(self, name: str, started: Tensor) -> Tensor:
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        found = wait_tensor(started)
        parts = self._parts.get(name, [])
        own = self._own[name].pop(0)
        ranks = range(self.shard.size)
        ranges = [
            self._seen_by(self.shard.rank, self.shard.chunks_of(rank)[turn]) for rank in ranks
        ]
        received = found.split([*map(_tokens, ranges)])
        for rank in reversed(ranks) if turn % 2 else ranks:  # in the order of the sequence
            parts = parts + (
                [own] if rank == self.shard.rank else _divided(received[rank], ranges[rank])
            )
        # Of no tokens: the graphs of all ranks contain all exchanges alike.
        self._ends.setdefault(name, []).append(found[:0].clone().movedim(0, 2))
        visible = self.window.visible(self.shard.chunks[turn], self.settings)
        keys = torch.cat([*_within(parts, visible), *self._ends[name]], dim=2)
        later = [
            self.window.visible(chunk, self.settings) for chunk in self.shard.chunks[turn + 1 :]
        ]
        self._parts[name] = [
            part for part in parts if any(_within([part], ranges) for ranges in later)
        ]
        return keys

    def _seen_by(self, rank: int, chunk: int) -> TokenRanges:
        """The tokens of a chunk that its owner sends to `rank`, in order and without overlap."""
        if chunk in self.shard.chunks_of(rank):
            return []
        begin, end = self.window.bounds(chunk)
        chunks = [later for later in self.shard.chunks_of(rank) if later > chunk]
        visible = [self.window.visible(later, self.settings) for later in chunks]
        sinks = [ranges[0] for ranges in visible if len(ranges) > 1]
        near = [ranges[-1] for ranges in visible]
        found: TokenRanges = []
        for start, stop in sinks + near:
            start = max(start, begin)
            stop = min(stop, end)
            if start < stop:
                found.append((start, stop))
        merged: TokenRanges = []
        for start, stop in found:
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return merged


def _tokens(ranges: TokenRanges) -> int:
    return sum(stop - start for start, stop in ranges)


def _divided(rows: Tensor, ranges: TokenRanges) -> list[tuple[int, Tensor]]:
    """(first token, (B, G, n, ·)) of each range of tokens, from the rows (T, B, G, ·) of all."""
    parts = rows.split([stop - start for start, stop in ranges]) if ranges else ()
    return [(start, part.movedim(0, 2)) for (start, _), part in zip(ranges, parts, strict=True)]


def _within(parts: list[tuple[int, Tensor]], ranges: TokenRanges) -> list[Tensor]:
    """The tokens of `ranges` in parts (first token, (B, G, n, ·)) of the sequence, in order."""
    found = []
    for start, stop in ranges:
        for first, x in parts:
            low = max(start, first)
            high = min(stop, first + x.shape[2])
            if low < high:
                found.append(x[:, :, low - first : high - first])
    return found


def is_broken_link(error: Exception) -> bool:
    """Whether an error means that a collective lost a process; gloo reports this only in the
    message."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "connection", "pair closure"))
    )
