"""Decoding with a cache of fixed size: every key has a slot that never moves, and the position of a
pass is a tensor.

Shapes and addresses are the same in every pass of one token. A GPU computes a pass of a small model
in less time than the host needs to launch its operations, so they are recorded once as a CUDA graph
and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache, CacheIndex, LayerCache
from model.decoding.packed import PackedModel
from model.mixers.recurrence import LayerState
from model.position import AttentionPlan
from model.token_positions import TokenPositions
from model.transformer import TokenChunk, Transformer

BUCKET = 256  # slots and passes are rounded up to a multiple of this
EMPTY = -2  # document of a slot without a key; −1 is padding
LEAST_PASSES = 4  # recording costs as much as three passes


def rounded(count: int) -> int:
    """`count`, rounded up to a multiple of BUCKET."""
    return -(-count // BUCKET) * BUCKET


class StaticIndex:
    """Positions of the keys of one layer kind in slots that never move, and the slot of each pass.

    The slots are those of `source`, one for each pass, and empty ones. With a window, the passes
    write to as many slots in turn, after those of the first `sinks` passes.

    Attributes:
        slot: (1,) slot of the current pass.
        positions: of the keys in all slots.
    """

    def __init__(
        self,
        source: CacheIndex,
        passes: int,
        window: int | None,
        end: int,
    ):
        stored = source.positions
        assert stored is not None
        filled = stored.count
        device = stored.device
        at = torch.arange(rounded(passes), device=device).clamp(max=passes - 1)
        if window is not None:
            sinks = source.sinks
            at = torch.where(at < sinks, at, sinks + (at - sinks) % window)
            passes = min(passes, sinks + window)
        self.slots = rounded(filled + passes)
        self._slot_of = filled + at
        self.slot = self._slot_of[:1].clone()
        room = (0, self.slots - filled)
        self.positions = TokenPositions(
            order=F.pad(stored.order, room),
            position=F.pad(stored.position, room),
            document=F.pad(stored.document, room, value=EMPTY),
            layout="ragged",
            position_end=end,
            lengths=(end,),
            unit_steps=False,
        )

    def write(self, at: Tensor, new: TokenPositions) -> TokenPositions:
        """Store the position of the pass `at` (1,); returns those of all slots."""
        self.slot.copy_(self._slot_of.index_select(0, at))
        self.positions.order.index_copy_(1, self.slot, new.order)
        self.positions.position.index_copy_(1, self.slot, new.position)
        self.positions.document.index_copy_(1, self.slot, new.document)
        return self.positions


class StaticLayerCache(LayerCache):
    """Keys and values of one layer, written at the slot of the current pass. It takes over the
    buffers of `source`."""

    def __init__(self, source: LayerCache, index: StaticIndex):
        super().__init__(source.index, source.dtype)
        self._static = index
        self._stored = source._stored
        self.mark()
        for name, filled in source._filled.items():
            stored = source._buffers.pop(name)[:, :, :filled]
            # Zeros: empty slots are masked, but NaN times a weight of 0 would still be NaN.
            self._buffers[name] = F.pad(stored, (0, 0, 0, index.slots - filled))

    def _append(self, name: str, x: Tensor) -> Tensor:
        return self._buffers[name].index_copy_(2, self._static.slot, x)


class StaticCache:
    """A cache with slots for `passes` more tokens, which takes over the keys of `source`.

    Args:
        windows: by layer kind, how many tokens back a query attends to; None: all.
        end: `position_end` of all passes.

    Attributes:
        at: (1,) index of the current pass.
    """

    def __init__(
        self,
        model: Transformer,
        source: Cache,
        passes: int,
        windows: dict[str, int | None],
        end: int,
    ):
        assert source.last is not None
        self.kinds = source.kinds
        self.indices = {
            kind: StaticIndex(index, passes, windows[kind], end)
            for kind, index in source.indices.items()
        }
        self.layers = [
            layer.static()
            if isinstance(layer, LayerState)
            else StaticLayerCache(layer, self.indices[kind])
            for layer, kind in zip(source.layers, model.settings.layer_kinds, strict=True)
        ]
        self.at = torch.zeros(1, dtype=torch.int64, device=source.last.device)

    def restart(self) -> None:
        """Undo all passes: the next ones overwrite the slots of their keys."""
        self.at.zero_()
        for layer in self.layers:
            layer.restart()

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        """Add the token of the current pass; returns the positions of all slots by layer kind."""
        keys = dict.fromkeys(self.kinds, new)
        return keys | {kind: index.write(self.at, new) for kind, index in self.indices.items()}


@dataclass(frozen=True)
class PassInputs:
    """What the passes of a static cache read besides tokens and keys.

    Attributes:
        positions: of the tokens of all passes.
        tables: by scheme instance, each with whether it is indexed by pass along dimension 1.
        factors: temperature factors by layer kind, (B or 1, H or 1, passes or 1), or None.
    """

    positions: TokenPositions
    tables: dict[str, list[tuple[Tensor, bool]]]
    factors: dict[str, Tensor | None]

    @classmethod
    def create(
        cls,
        model: Transformer,
        positions: TokenPositions,
    ) -> PassInputs:
        """The inputs of all passes, padded to a rounded number of passes."""
        size = rounded(positions.count)
        every = model.prepare(positions)
        single = model.prepare(positions.part(0, 1))
        tables = {}
        for name in every.tables:
            tables[name] = []
            for x, of_one in zip(
                every.tables[name],
                single.tables[name],
                strict=True,
            ):
                # Tables of tokens are as long as there are tokens. All others are the same in every
                # pass.
                by_pass = x.shape != of_one.shape
                tables[name].append((padded(x, 1, size) if by_pass else x, by_pass))
        factors = dict(every.factors)
        for kind, x in every.factors.items():
            if x is not None and x.shape[2] > 1:
                factors[kind] = padded(x, 2, size)
        positions = positions.map(
            lambda x: padded(x, 1, size),
            layout="ragged",
            lengths=(0,),
            unit_steps=False,
        )
        return cls(positions, tables, factors)

    def of(self, at: Tensor) -> TokenChunk:
        """The token of the pass `at` (1,)."""
        tables = {
            name: tuple(x.index_select(1, at) if by_pass else x for x, by_pass in every)
            for name, every in self.tables.items()
        }
        factors = {
            kind: x if x is None or x.shape[2] == 1 else x.index_select(2, at)
            for kind, x in self.factors.items()
        }
        return TokenChunk(
            self.positions.map(lambda x: x.index_select(1, at)),
            tables,
            factors,
        )


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with its last entry along `dim` repeated up to `size` entries."""
    return x.index_select(dim, torch.arange(size, device=x.device).clamp(max=x.shape[dim] - 1))


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep a workspace for each stream that they have been used
    on, and torch.cuda.graph's own stream is one of the device that recorded first."""
    return torch.cuda.Stream(device)


class CudaGraph:
    """A function of one tensor recorded as a CUDA graph. It runs twice before the recording, which
    compiles it and initializes libraries."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        self._input = x.clone()
        stream = recording_stream(x.device)
        with torch.cuda.device(x.device):
            self._graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function(self._input)
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads, such as loaders that pin memory, may use CUDA meanwhile.
            with torch.cuda.graph(
                self._graph,
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._output = function(self._input)

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which the next call overwrites."""
        self._input.copy_(x)
        self._graph.replay()
        return self._output


class StaticDecoder:
    """Passes with a static cache, each a replay of one CUDA graph. On a CPU they run one by one."""

    def __init__(
        self,
        packed: PackedModel,
        cache: Cache,
        positions: TokenPositions,
        plans: dict[str, AttentionPlan],
    ):
        model = packed.model
        end = int(min(rounded(positions.position_end), model.limit or math.inf))
        self._packed = packed
        self._inputs = PassInputs.create(model, replace(positions, position_end=end))
        windows = {name: kind.position.window for name, kind in model.kinds.items()}
        for name, plan in plans.items():
            if not plan.is_unordered:
                windows[model.kind_of[name]] = None  # weights may depend on the order of the slots
        self.cache = StaticCache(model, cache, positions.count, windows, end)
        self._graph: CudaGraph | None = None

    def _step(self, tokens: Tensor) -> Tensor:
        """The next pass; see `PackedModel.step`."""
        at = self.cache.at
        logits = self._packed.step(self._inputs.of(at), self.cache, tokens)
        at.add_(1)
        return logits

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,). The next call overwrites them."""
        if tokens.device.type != "cuda":
            return self._step(tokens)
        if self._graph is None:
            self._graph = CudaGraph(self._step, tokens)
            self.cache.restart()  # the recorded passes have changed it
        return self._graph(tokens)
