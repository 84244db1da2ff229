"""Passes of one token per row on a GPU as one graph: a cache of fixed size, and the position as a tensor.

A GPU computes a pass of a small model in less time than the host needs to launch its operations. Here shapes
and addresses are the same in every pass, so the operations are recorded once as a CUDA graph and replayed.
Sizes are rounded up to multiples of BUCKET. Once a model has generated many tokens with the same rounded
sizes, their pass is compiled before it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache as memoize
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache, CacheIndex, LayerCache
from model.position import AttentionPlan, TokenPositions
from model.transformer import TokenChunk, Transformer

BUCKET = 256  # slots and passes are rounded up to a multiple of this
LEAST_PASSES = 4  # recording costs as much as three passes
COMPILED_PASSES = 32_768  # of the same sizes; fewer would gain less time than the compilation takes
EMPTY = -2  # document of a slot without a key; −1 is padding


def rounded(count: int) -> int:
    return -(-count // BUCKET) * BUCKET


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with its last entry along `dim` repeated up to `size` entries."""
    return x.index_select(dim, torch.arange(size, device=x.device).clamp(max=x.shape[dim] - 1))


class StaticIndex:
    """Positions of the keys of one layer kind in slots that never move, and the slot of each pass.

    The slots are those of `source`, one for each pass, and empty ones. With a window, the passes write to
    as many slots in turn, after those of the first `sinks` passes.

    Attributes:
        slot: (1,) slot of the current pass.
        positions: of the keys in all slots.
    """

    def __init__(self, source: CacheIndex, passes: int, window: int | None, end: int):
        stored = source.positions
        assert stored is not None
        filled = stored.order.shape[1]
        device = stored.order.device
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
            F.pad(stored.order, room),
            F.pad(stored.position, room),
            F.pad(stored.document, room, value=EMPTY),
            layout="ragged",
            position_end=end,
            lengths=(end,),
            unit_steps=False,
        )

    def write(self, at: Tensor, new: TokenPositions) -> TokenPositions:
        """Store the position of the pass `at` (1,); returns those of all slots."""
        self.slot.copy_(self._slot_of.index_select(0, at))
        for name in ("order", "position", "document"):
            getattr(self.positions, name).index_copy_(1, self.slot, getattr(new, name))
        return self.positions


class StaticLayerCache(LayerCache):
    """Keys and values of one layer, written at the slot of the current pass. It takes over the buffers of
    `source`, which must not be used afterwards."""

    def __init__(self, source: LayerCache, index: StaticIndex):
        self.static = index
        self.dtype = source.dtype
        self._buffers = {}
        for name, filled in source._filled.items():
            stored = source._buffers.pop(name)[:, :, :filled]
            # Zeros: empty slots are masked, but NaN times a weight of 0 would still be NaN.
            self._buffers[name] = F.pad(stored, (0, 0, 0, index.slots - filled))

    def _append(self, name: str, x: Tensor) -> Tensor:
        return self._buffers[name].index_copy_(2, self.static.slot, x)


class StaticCache(Cache):
    """A cache with slots for `passes` more tokens, which takes over the keys of `source`.

    Args:
        windows: by layer kind, how many tokens back a query attends to; None: all.
        end: `position_end` of all passes.

    Attributes:
        at: (1,) index of the current pass.
    """

    def __init__(self, source: Cache, passes: int, windows: dict[str, int | None], end: int):
        self._static = {
            kind: StaticIndex(index, passes, windows[kind], end)
            for kind, index in source._indices.items()
        }
        of_index = {id(index): self._static[kind] for kind, index in source._indices.items()}
        self.layers = [
            StaticLayerCache(layer, of_index[id(layer.index)])
            for layer in source.layers
            if isinstance(layer, LayerCache)
        ]
        first = next(iter(self._static.values())).positions
        self.at = torch.zeros(1, dtype=torch.int64, device=first.order.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of slots of each layer kind."""
        return tuple(index.slots for index in self._static.values())

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        return {kind: index.write(self.at, new) for kind, index in self._static.items()}


@dataclass(frozen=True)
class PassInputs:
    """What the passes read besides tokens and keys.

    Attributes:
        positions: of the tokens of all passes.
        tables: by scheme instance, each with whether it is indexed by pass along dimension 1.
        factors: temperature factors by layer kind, (B or 1, H or 1, passes or 1), or None.
    """

    positions: TokenPositions
    tables: dict[str, list[tuple[Tensor, bool]]]
    factors: dict[str, Tensor | None]

    @classmethod
    def create(cls, model: Transformer, positions: TokenPositions) -> PassInputs:
        size = rounded(positions.order.shape[1])
        tables, factors = model.prepare(positions)
        of_one, _ = model.prepare(positions.part(0, 1))
        found = {}
        for name, every in tables.items():
            # Tables of tokens are as long as there are tokens. All others are the same in every pass.
            by_pass = [x.shape != one.shape for x, one in zip(every, of_one[name], strict=True)]
            found[name] = [
                (padded(x, 1, size) if each else x, each)
                for x, each in zip(every, by_pass, strict=True)
            ]
        by_kind = {
            kind: x if x is None or x.shape[2] == 1 else padded(x, 2, size)
            for kind, x in factors.items()
        }
        changes: dict[str, Any] = {"layout": "ragged", "lengths": (0,), "unit_steps": False}
        return cls(positions.map(lambda x: padded(x, 1, size), **changes), found, by_kind)

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
        return TokenChunk(self.positions.map(lambda x: x.index_select(1, at)), tables, factors)


def decode_step(
    model: Transformer, cache: StaticCache, inputs: PassInputs, tokens: Tensor
) -> Tensor:
    """(B, V) logits of the next pass after the tokens (B,)."""
    chunk = inputs.of(cache.at)
    logits = model.forward_chunks(
        tokens[:, None], [chunk], None, cache, 1, None, "none", None, None
    )
    cache.at.add_(1)
    return logits[:, -1]


@memoize
def compiled_step(
    sizes: tuple[int, ...], dtype: torch.dtype, settings: str
) -> Callable[..., Tensor]:
    """`decode_step` compiled on its first call, with a recompile limit of its own for these sizes and model
    settings."""
    # Matrix-vector products become reductions, which reach the memory bandwidth with tuned block sizes.
    options: dict[str, Any] = {
        "isolate_recompiles": True,  # not in the type stubs of torch.compile
        "options": {"coordinate_descent_tuning": True},
    }
    return torch.compile(decode_step, dynamic=False, fullgraph=True, **options)


class StaticDecodePlan:
    """The remaining passes of a generation, each a replay of one CUDA graph. On a CPU, the passes run one by
    one.

    Args:
        model: a packed model in evaluation mode.
        cache: cache of the preceding tokens, which must not be used afterwards.
        positions: positions of the tokens of all passes.
        windows: see `StaticCache`.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        positions: TokenPositions,
        windows: dict[str, int | None],
    ):
        passes = positions.order.shape[1]
        end = min(rounded(positions.position_end), model.limit or math.inf)
        positions = replace(positions, position_end=int(end))
        self._inputs = PassInputs.create(model, positions)
        self.cache = StaticCache(cache, passes, windows, int(end))
        step = decode_step
        sizes = (cache.batch, rounded(passes), int(end), *self.cache.sizes)
        model.decoded_passes[sizes] += passes
        if model.decoded_passes[sizes] >= COMPILED_PASSES:
            step = compiled_step(sizes, model.embed.weight.dtype, model.settings.model_dump_json())
        self._step = partial(step, model, self.cache, self._inputs)
        self._graph: CudaGraph | None = None

    @classmethod
    def create(
        cls, model: Transformer, cache: Cache, positions: TokenPositions
    ) -> StaticDecodePlan | None:
        """None if passes are not the same operations: the model is not packed, under autocast, or a scheme
        caches more than keys; or if there are not enough passes."""
        device = model.embed.weight.device.type
        if not model.packed_blocks or torch.is_autocast_enabled(device):
            return None
        if positions.order.shape[1] < LEAST_PASSES:
            return None
        first = positions.part(0, 1)
        tables, _ = model.prepare(first)
        keys = dict.fromkeys(model.settings.kinds, first)
        plans = model.contexts(cache.batch, first, keys, tables, first)
        windows = {kind: choice.window for kind, choice in model.settings.kinds.items()}
        for name, kind in model.layer_schemes:
            _, plan = plans[name]
            if not isinstance(plan, AttentionPlan):
                return None
            if plan.mask is None:  # it may depend on the order of the slots
                windows[kind] = None
        return cls(model, cache, positions, windows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,). The next call overwrites them."""
        if tokens.device.type != "cuda":
            return self._step(tokens)
        if self._graph is None:
            self._graph = CudaGraph(self._step, tokens)
            # the recorded passes have written to slots that the next ones overwrite
            self.cache.at.zero_()
        return self._graph(tokens)


@memoize
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep a workspace for each stream that they have been used on, and
    torch.cuda.graph's own stream is one of the device that recorded first."""
    return torch.cuda.Stream(device)


class CudaGraph:
    """A function of one tensor recorded as a CUDA graph. It runs twice before the recording, which compiles
    it and initializes libraries."""

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
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._output = function(self._input)

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which the next call overwrites."""
        self._input.copy_(x)
        self._graph.replay()
        return self._output
