"""Context parallelism: windows of tokens that are sharded over the ranks of a context group.

A window of L tokens is divided into 2·m·N chunks for N ranks. Ranks take chunks in turns, forward
and then backward, which balances causal attention: with m = 1, rank r owns chunks r and 2N − 1 − r.
In each layer a rank runs its chunks in order as passes with cached keys: each pass gathers the
chunks of all ranks in this turn, and its keys end with its own chunk. docs/context_sharding.md
describes the design.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor
from torch.distributed.distributed_c10d import GroupName

from errors import ModelError
from model.attention.mask import joined
from model.position import Accumulate, PositionSettings
from model.token_positions import TokenPositions

collectives = torch.ops._c10d_functional
TokenRanges = list[tuple[int, int]]  # (first token, last token + 1), in order
Parts = list[tuple[int, Tensor]]  # (first token, keys or values (B, G, n, ·)), in order


@dataclass(frozen=True)
class ContextShard:
    """The part of every window that one rank of a context group owns.

    Attributes:
        rank: rank of this process in the group.
        size: N, the number of ranks of the group.
        group: name of the process group.
        chunks_per_rank: number of chunks that each rank owns, 2·m.
        on_gloo: types of devices whose tensors are gathered with an all-to-all. With gloo in torch
            2.13, `all_gather_into_tensor` can corrupt memory if another collective is under way.
    """

    rank: int
    size: int
    group: GroupName
    chunks_per_rank: int = 2
    on_gloo: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextShard:
        """The part of this process in a context group."""
        pairs = dist.get_backend_config(group).split(",")  # such as cpu:gloo
        on_gloo = tuple(pair.partition(":")[0] for pair in pairs if pair.endswith(":gloo"))
        return cls(group.rank(), group.size(), group.group_name, on_gloo=on_gloo)

    def divided(self, length: int, at_most: int) -> ContextShard:
        """This part of windows of `length` tokens, in chunks of about `at_most` tokens or fewer."""
        pairs = -(-length // (2 * self.size * at_most))
        most_pairs = length // (2 * self.size)
        return replace(self, chunks_per_rank=2 * max(1, min(pairs, most_pairs)))

    @property
    def chunks(self) -> list[int]:
        """Indices of this rank's chunks, in order."""
        chunks = []
        for turn in range(self.chunks_per_rank):
            place = self.size - 1 - self.rank if turn % 2 else self.rank
            chunks.append(self.size * turn + place)
        return chunks

    def bounds(self, length: int, chunk: int) -> tuple[int, int]:
        """Indices of the first token of a chunk in a window of `length` tokens, and of the first
        token of the next chunk. The lengths of chunks differ by at most one token.

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
        return cut(x, [self.bounds(x.shape[1], chunk) for chunk in self.chunks])

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, without gradients."""
        return wait_tensor(all_reduce(x, "sum", self.group))

    def gather(self, x: Tensor) -> Tensor:
        """Start to gather x of each rank; `gathered` waits for the result. The gradient of x is the
        sum of the gradients of its copies on all ranks. On every rank, the loss must depend on the
        result, else the others wait for its backward pass."""
        return _Gather.apply(x.contiguous(), self)

    def gathered(self, whole: Tensor) -> list[Tensor]:
        """The tensors of each rank, by rank; waits for what `gather` has started."""
        return list(_Wait.apply(whole).chunk(self.size))


class _Gather(torch.autograd.Function):
    """See `ContextShard.gather`. The collectives of torch < 2.13 have no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        if x.device.type in shard.on_gloo:
            rows = [len(x)] * shard.size
            return all_to_all_single(torch.cat([x] * shard.size), rows, rows, shard.group)
        return collectives.all_gather_into_tensor(x, shard.size, shard.group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        grad = upstream[0].contiguous()
        if grad.device.type in shard.on_gloo:
            rows = [len(grad) // shard.size] * shard.size
            parts = wait_tensor(all_to_all_single(grad, rows, rows, shard.group))
            return torch.stack(parts.chunk(shard.size)).sum(0), None
        own = collectives.reduce_scatter_tensor(grad, "sum", shard.size, shard.group)
        return wait_tensor(own), None


class _Wait(torch.autograd.Function):
    """Wait for the result of a collective, which torch < 2.13 cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return wait_tensor(whole)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0]


@dataclass(frozen=True)
class ShardedWindow:
    """Windows whose tokens are sharded, and their positions, which every rank has in full.

    Attributes:
        streamed: chunks are streamed, without gradients: a block updates hidden states in place,
            chunk by chunk, and gathers keys into one buffer, so that a rank holds its hidden states
            and the keys of one layer.
    """

    shard: ContextShard
    positions: TokenPositions
    streamed: bool = False

    @property
    def length(self) -> int:
        """L, tokens of a window."""
        return self.positions.count

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
            count = min(keep, positions.count)
            parts.insert(0, positions.last(count))
            keep -= count
        return parts

    def keys(self, settings: PositionSettings) -> list[TokenPositions]:
        """The positions of the keys of the passes of this rank's chunks."""
        return [self._joined(self.visible(index, settings)) for index in self.shard.chunks]

    def is_local(self, settings: PositionSettings) -> bool:
        """Whether the tokens outside the reach of a query are known from their order in the window
        alone. The sinks of packed documents can be anywhere."""
        is_plain = self.positions.layout == "plain"
        return settings.window is not None and (is_plain or not settings.sinks)

    def visible(self, index: int, settings: PositionSettings) -> TokenRanges:
        """The tokens that any query of a chunk may attend to: sinks, and the tokens up to the
        chunk's last."""
        start, stop = self.bounds(index)
        if settings.window is None or not self.is_local(settings):
            return [(0, stop)]
        first = max(0, start - settings.window + 1)
        if first <= settings.sinks:
            return [(0, stop)]
        near = (first, stop)
        return [(0, settings.sinks), near] if settings.sinks else [near]

    def _joined(self, ranges: TokenRanges) -> TokenPositions:
        if len(ranges) == 1:
            return self.positions.part(*ranges[0])
        return self.positions.map(lambda x: cut(x, ranges), unit_steps=False)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The chunks of this rank's tokens x (B, T, ·)."""
        return x.split([chunk.count for chunk in self.own], dim=1)

    def run(self, block: Any, x: Tensor, passes: Iterable[Any], hook: Any) -> Tensor:
        """One layer over the chunks of this rank's tokens; see `Block.forward`."""
        chunks = zip(self.split(x), passes, strict=True)
        cache = block.mixer.sharded_cache(self)
        if not self.streamed and isinstance(cache, GatheredKeys):
            return self._overlapped(block, list(chunks), cache, hook)
        parts = []
        for cache.turn, (part, step) in enumerate(chunks):
            out = block.chunk(part, step, cache, hook)
            parts.append(part.copy_(out) if self.streamed and out.shape == part.shape else out)
        is_updated = self.streamed and sum(part.shape[1] for part in parts) == x.shape[1]
        return x if is_updated else torch.cat(parts, dim=1)

    def _overlapped(
        self, block: Any, chunks: list[tuple[Tensor, Any]], cache: GatheredKeys, hook: Any
    ) -> Tensor:
        """`run` in which all gathers start before the first attention, in the same order on all
        ranks, so that those of later chunks overlap with it."""
        started = []
        for cache.turn, (part, step) in enumerate(chunks):
            own = block.mixer_input(part, step, cache)
            projected = block.mixer.project(own, step, cache)
            started.append((own, projected, cache.start(projected.k, projected.v)))
        outputs = []
        for cache.turn, (part, step) in enumerate(chunks):
            own, projected, gathers = started[cache.turn]
            mixed = block.mixer.attend(own, step, projected, *cache.finish(*gathers), hook)
            outputs.append(block.finish(part, step, mixed, cache))
        return torch.cat(outputs, dim=1)


class GatheredLayer:
    """The cache of one layer in the passes of a rank's chunks, filled with the chunks of all
    ranks.

    Attributes:
        turn: number of the pass, set by `ShardedWindow.run`.
    """

    def __init__(self, window: ShardedWindow):
        self.window = window
        self.shard = window.shard
        self.turn = 0
        self._inputs: dict[str, Tensor] = {}  # the last inputs of earlier passes

    def extend(self, x: Tensor, count: int, name: str = "inputs") -> Tensor:
        """See `CachedTail.extend`."""
        own = x[:, max(0, x.shape[1] - count) :]
        own = F.pad(own, (0, 0, count - own.shape[1], 0))
        tails = self._wait(self._start(own))
        last = self._inputs.get(name)
        if last is None:
            last = torch.zeros_like(tails[0])
        before = [last]
        for tail, length in zip(tails, self._lengths(), strict=True):
            new = min(count, length)
            whole = torch.cat([last, tail[:, count - new :]], dim=1)
            last = whole[:, new:]
            before.append(last)
        self._inputs[name] = last
        # Stack the inputs of all chunks, also of later ones: the backward pass of a gather must run
        # on every rank.
        return torch.cat([torch.stack(before)[self.chunk % self.shard.size], x], dim=1)

    @property
    def chunk(self) -> int:
        """The index of this rank's chunk in this pass."""
        return self.shard.chunks[self.turn]

    def _start(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Start to gather a tensor of this pass, whose dimension `dim` is that of the tokens of a
        chunk; `_wait` waits for the result."""
        if dim is not None:
            padding = max(self._lengths()) - x.shape[dim]  # gathered tensors have equal sizes
            if padding:
                x = F.pad(x, (0, 0, 0, padding))
        return self.shard.gather(x)

    def _wait(self, started: Tensor, dim: int | None = None) -> list[Tensor]:
        """The chunks of all ranks in the order of the sequence; see `_start`."""
        chunks = self.shard.gathered(started)
        if self.turn % 2:
            chunks.reverse()
        if dim is not None:
            for n, length in enumerate(self._lengths()):
                chunks[n] = chunks[n].narrow(dim, 0, length)
        return chunks

    def _bounds(self) -> TokenRanges:
        """The bounds of the chunks of all ranks in this pass, in the order of the sequence."""
        size = self.shard.size
        return [self.window.bounds(self.turn * size + n) for n in range(size)]

    def _lengths(self) -> list[int]:
        return [stop - start for start, stop in self._bounds()]


class GatheredKeys(GatheredLayer):
    """Keys, values and extras of softmax attention; see `LayerCache`. Keys outside of windows are
    gathered too, and dropped at once."""

    def __init__(self, window: ShardedWindow, settings: PositionSettings):
        super().__init__(window)
        self.settings = settings
        # keys and values visible in later passes
        self._kept_k: Parts = []
        self._kept_v: Parts = []
        self._extras: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values (B, G, T, ·); returns those visible to this rank's chunk (B, G, S,
        ·)."""
        return self.finish(*self.start(k, v))

    def start(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Start to gather keys and values (B, G, T, ·); `finish` waits for them."""
        return self._start(k, 2), self._start(v, 2)

    def finish(self, started_k: Tensor, started_v: Tensor) -> tuple[Tensor, Tensor]:
        """See `append`; passes finish in order."""
        return self._visible(self._kept_k, started_k), self._visible(self._kept_v, started_v)

    def _visible(self, parts: Parts, started: Tensor) -> Tensor:
        """Add what `start` has gathered to the parts; returns the tokens visible to this rank's
        chunk."""
        starts = [start for start, _ in self._bounds()]
        parts += zip(starts, self._wait(started, 2), strict=True)
        if self.window.streamed and not self.window.is_local(self.settings):
            parts[:] = [(0, self._stored(parts))]
        chunks = self.shard.chunks[self.turn :]
        visible, *later = [self.window.visible(chunk, self.settings) for chunk in chunks]
        keys = _within(parts, visible)
        parts[:] = [part for part in parts if any(_within([part], ranges) for ranges in later)]
        return joined(keys, 2)

    def _stored(self, parts: Parts) -> Tensor:
        """The parts in one buffer for the whole window, which is the first part if it exists."""
        first, whole = parts[0]
        if first or whole.shape[2] < self.window.length:
            size = (*whole.shape[:2], self.window.length, whole.shape[3])
            whole = whole.new_empty(size)
        for start, x in parts:
            whole[:, :, start : start + x.shape[2]] = x
        return whole

    def extend_extras(
        self,
        features: Tensor,
        accumulate: Accumulate,
        new: TokenPositions,
    ) -> tuple[Tensor, Tensor]:
        """Gather features (B, T, F); returns the extras of this rank's chunk (B, T, E), and those
        visible to it (B, S, E).

        Extras are accumulated on each rank from the features of all earlier tokens, as in one
        process.
        """
        chunks = self._wait(self._start(features, 1), 1)
        if self.turn == self.shard.chunks_per_rank - 1:
            # Earlier passes need all chunks, from which later passes continue.
            chunks = chunks[: self.chunk % self.shard.size + 1]
        bounds = self._bounds()
        start, _ = bounds[0]
        _, stop = bounds[len(chunks) - 1]
        positions = self.window.positions.part(start, stop)
        whole = accumulate(torch.cat(chunks, dim=1), self._extras, positions)
        if self._extras is not None:
            whole = torch.cat([self._extras, whole], dim=1)
        self._extras = whole
        visible = cut(whole, self.window.visible(self.chunk, self.settings))
        return visible[:, visible.shape[1] - features.shape[1] :], visible


def cut(x: Tensor, ranges: TokenRanges) -> Tensor:
    """The tokens of `ranges` of x (B, T, ...), in order."""
    return joined([x[:, start:stop] for start, stop in ranges], 1)


def _within(parts: Parts, ranges: TokenRanges) -> list[Tensor]:
    """The tokens of `ranges`, in order."""
    tokens = []
    for start, stop in ranges:
        for first, x in parts:
            low = max(start, first)
            high = min(stop, first + x.shape[2])
            if low < high:
                tokens.append(x[:, :, low - first : high - first])
    return tokens


def is_broken_link(error: Exception) -> bool:
    """Whether an error means that a collective lost a process; gloo reports this only in the
    message."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "connection", "pair closure"))
    )
