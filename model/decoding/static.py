"""Decoding with a cache of fixed size: every key has a slot that never moves, and the position of a
pass is a tensor.

Shapes and addresses are the same in every pass of one token. A GPU computes a pass of a small model
in less time than the host needs to launch its operations, so they are recorded once as a CUDA graph
and replayed. The model keeps the buffers and the graph for later generations of the same shapes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.flex import RECOMPILE_LIMIT
from model.cache import Cache, CacheIndex, LayerCache
from model.decoding.packed import Layer, PackedModel
from model.mixers.mixer import AttentionPass
from model.mixers.recurrence import LayerState
from model.position import AttentionContext, AttentionPlan, ContentPlan, PositionalScheme
from model.position.table import trainable
from model.token_positions import TokenPositions
from model.transformer import TokenChunk, Transformer

BUCKET = 256  # slots are rounded up to a multiple of this, or of an eighth to a sixteenth of them
EMPTY = -2  # document of a slot without a key; −1 is padding
LEAST_PASSES = 4  # recording costs as much as three passes
KEPT_BYTES = 1 << 30  # of all recordings that are kept but not used by a decoder
GRAPH_BYTES = 1 << 26  # memory of a graph, including cuBLAS's workspace of 32 MiB on an H100


def rounded(count: int) -> int:
    """`count`, rounded up; see BUCKET."""
    step = max(BUCKET, 1 << count.bit_length() >> 4)
    return -(-count // step) * step


class StaticIndex:
    """Positions of the keys of one layer kind in slots that never move, and the slot of each pass.

    There are the slots of `source`, one slot for each pass, and empty slots. With a window, the
    passes after the first `sinks` ones write to `window` slots in turn.

    Args:
        size: number of slots without a window, at least the number of keys and passes.

    Attributes:
        slot: (1,) slot of the current pass.
        positions: positions of the keys in all slots.
    """

    def __init__(
        self,
        source: CacheIndex,
        passes: int,
        size: int,
        window: int | None,
        end: int,
    ):
        stored = source.positions
        assert stored is not None
        filled = stored.count
        device = stored.device
        at = torch.arange(size, device=device).clamp(max=passes - 1)
        self.slots = size
        if window is not None:
            sinks = source.sinks
            at = torch.where(at < sinks, at, sinks + (at - sinks) % window)
            # as many slots as `CacheIndex` keeps, so that the length of the prompt does not matter
            most = max(filled, 2 * window + sinks)
            self.slots = min(size, rounded(most + sinks + window))
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

    @property
    def tensors(self) -> list[Tensor]:
        return [self.slot, self._slot_of, *tensors_of(self.positions)]

    def write(self, at: Tensor, new: TokenPositions) -> TokenPositions:
        """Store the position of the pass `at` (1,); returns the positions of all slots."""
        self.slot.copy_(self._slot_of.index_select(0, at))
        self.positions.order.index_copy_(1, self.slot, new.order)
        self.positions.position.index_copy_(1, self.slot, new.position)
        self.positions.document.index_copy_(1, self.slot, new.document)
        return self.positions


class StaticLayerCache(LayerCache):
    """Keys and values of one layer, written at the slot of the current pass; empty, see `fill`."""

    def __init__(self, source: LayerCache, index: StaticIndex):
        super().__init__(source.index, source.dtype)
        self._static = index
        self._stored = {name: torch.zeros_like(x) for name, x in source._stored.items()}
        self._buffers = {
            name: x.new_zeros(*x.shape[:2], index.slots, x.shape[3])
            for name, x in source._buffers.items()
        }

    def fill(self, source):
        """Take over the keys of `source`, whose buffers are freed."""
        assert isinstance(source, LayerCache)
        super().fill(source)
        for name, filled in source._filled.items():
            buffer = self._buffers[name]
            buffer[:, :, :filled] = source._buffers.pop(name)[:, :, :filled]
            # Zeros: empty slots are masked, but NaN times a weight of 0 would still be NaN.
            buffer[:, :, filled:] = 0

    def _append(self, name: str, x: Tensor) -> Tensor:
        return self._buffers[name].index_copy_(2, self._static.slot, x)


class StaticCache:
    """A cache for passes of one token.

    Args:
        source: the cache of the prompt.
        indices: index of each layer kind.
        layer_kinds: kind of each layer.

    Attributes:
        at: (1,) index of the current pass.
    """

    def __init__(
        self,
        source: Cache,
        indices: dict[str, StaticIndex],
        layer_kinds: Iterable[str],
    ):
        assert source.last is not None
        self.kinds = source.kinds
        self.indices = indices
        self.layers = [
            layer.static()
            if isinstance(layer, LayerState)
            else StaticLayerCache(layer, indices[kind])
            for layer, kind in zip(source.layers, layer_kinds, strict=True)
        ]
        self.at = torch.zeros(1, dtype=torch.int64, device=source.last.device)

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        """Add the token of the current pass; returns the positions of all slots by layer kind."""
        keys = dict.fromkeys(self.kinds, new)
        return keys | {kind: index.write(self.at, new) for kind, index in self.indices.items()}


@dataclass(frozen=True)
class PassInputs:
    """The inputs of the passes of a static cache, besides tokens and keys.

    Attributes:
        positions: positions of the tokens of all passes.
        tables: tables of each scheme instance, each with whether its dimension 1 is indexed by
            pass.
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
        size: int,
    ) -> PassInputs:
        """The inputs of all passes, padded to `size` passes."""
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
                tables[name].append((padded(x, 1, size) if by_pass else x.clone(), by_pass))
        factors = dict(every.factors)
        for kind, x in every.factors.items():
            if x is not None:
                factors[kind] = padded(x, 2, size) if x.shape[2] > 1 else x.clone()
        positions = positions.map(
            lambda x: padded(x, 1, size),
            layout="ragged",
            lengths=(0,),
            unit_steps=False,
        )
        return cls(positions, tables, factors)

    @property
    def tensors(self) -> list[Tensor]:
        tables = [x for every in self.tables.values() for x, _ in every]
        factors = [x for x in self.factors.values() if x is not None]
        return [*tensors_of(self.positions), *tables, *factors]

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


def tensors_of(positions: TokenPositions) -> list[Tensor]:
    """Order, document and position, which may be the order."""
    shared = positions.position is positions.order
    return [positions.order, positions.document, *([] if shared else [positions.position])]


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep a workspace for each stream on which they were
    used, and torch.cuda.graph's own stream belongs to the device that recorded first."""
    return torch.cuda.Stream(device)


class CudaGraph:
    """A function of one tensor recorded as a CUDA graph. It runs twice before the recording, which
    compiles it and initializes libraries. Tensors that it reads must stay at their addresses."""

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
            # cuBLAS's workspace must be in the memory of this graph, which keeps its address. torch
            # frees others with any graph of the same stream (pytorch#193402).
            torch._C._cuda_clearCublasWorkspaces()
            # Other threads, such as loaders that pin memory, may use CUDA meanwhile.
            with torch.cuda.graph(
                self._graph,
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._output = function(self._input)
            torch._C._cuda_clearCublasWorkspaces()

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which the next call overwrites."""
        self._input.copy_(x)
        self._graph.replay()
        return self._output


def recorded(function: Callable[[Tensor], Tensor], x: Tensor) -> CudaGraph | None:
    """The CUDA graph of a function of x, which is called for the recording; None on a CPU."""
    return CudaGraph(function, x) if x.device.type == "cuda" else None


def _begin(
    packed: PackedModel,
    inputs: PassInputs,
    cache: StaticCache,
    tokens: Tensor,
) -> tuple[Tensor, TokenChunk, dict[str, TokenPositions]]:
    """The embeddings (B, C) of the tokens (B,) of a pass, the pass, and positions of keys by layer
    kind."""
    chunk = inputs.of(cache.at)
    keys = cache.advance(chunk.positions)
    cache.at.add_(1)
    return packed.embed(chunk, tokens), chunk, keys


def _layer(
    block: Layer,
    scheme: PositionalScheme,
    x: Tensor,
    new: TokenPositions,
    keys: TokenPositions,
    tables: tuple[Tensor, ...],
    factors: Tensor | None,
    layer_cache: Any,
) -> Tensor:
    """x (B, C) → (B, C) with a plan of its own, so that equal layers are one compiled function."""
    context = AttentionContext(
        new=new,
        queries=new,
        keys=keys,
        batch=len(x),
        heads=scheme.geometry.heads,
        device=x.device,
        tables=tables,
        window=scheme.settings.window,
        sinks=scheme.settings.sinks,
    )
    return block(x, AttentionPass(context, scheme.plan(context), factors), layer_cache)


def _end(packed: PackedModel, x: Tensor) -> Tensor:
    return packed.logits(x)


def compiled(function: FunctionType) -> Callable:
    """`function` compiled. torch keeps graphs with the code, so each recording has its own."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.specialize_float = True  # settings are constants
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True, dynamic=False)


@dataclass(eq=False)
class Recording:
    """Recorded passes that a model keeps for later generations. It has no reference to the model.

    Attributes:
        key: everything that the graph depends on; equal for generations that can use it.
        blocks: see `PackedModel`.
        compiled: compiled `_begin`, `_layer` and `_end`; None: the blocks run as they are.
        graph: the CUDA graph; None on a CPU.
        user: returns the decoder that used the recording last.
    """

    key: tuple
    blocks: list[Layer]
    inputs: PassInputs
    cache: StaticCache
    compiled: tuple[Callable, Callable, Callable] | None
    graph: CudaGraph | None = None
    user: Callable[[], Any] = lambda: None

    @property
    def nbytes(self) -> int:
        """Estimated memory in bytes."""
        return GRAPH_BYTES + sum(x.nbytes for layer in self.cache.layers for x in layer.tensors)


def remaining(recordings: Iterable[Recording]) -> list[Recording]:
    """The recordings, last used first, that are kept beside a new one: all that are in use, and
    others of at most KEPT_BYTES in total."""
    room = KEPT_BYTES
    kept = []
    for recording in recordings:
        in_use = recording.user() is not None
        if not in_use:
            room -= recording.nbytes
        if in_use or room >= 0:
            kept.append(recording)
    return kept


class StaticDecoder:
    """Passes with a static cache, each a replay of one CUDA graph. On a CPU they run one by one.

    A `Recording` is found by the shapes of its inputs and the addresses of the weights; weights may
    change in place between generations.

    Args:
        is_compiled: compile the passes: fewer kernels, but other rounding, and seconds for each
            recording.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        positions: TokenPositions,
        plans: dict[str, AttentionPlan | ContentPlan],
        is_compiled: bool = False,
    ):
        self.model = model
        with trainable():
            self._start(cache, positions, plans, is_compiled)

    def _start(
        self,
        source: Cache,
        positions: TokenPositions,
        plans: dict[str, AttentionPlan | ContentPlan],
        is_compiled: bool,
    ) -> None:
        model = self.model
        windows = {name: kind.position.window for name, kind in model.kinds.items()}
        for name, plan in plans.items():
            if not plan.is_unordered:
                windows[model.kind_of[name]] = None  # weights may depend on the order of the slots
        passes = positions.count
        size = rounded(source.filled + passes)
        end = int(min(rounded(positions.position_end), model.limit or math.inf))
        inputs = PassInputs.create(model, replace(positions, position_end=end), size)
        indices = {
            kind: StaticIndex(index, passes, size, windows[kind], end)
            for kind, index in source.indices.items()
        }
        new = [*inputs.tensors, *(x for index in indices.values() for x in index.tensors)]
        key = (
            model.position,  # which `reposition` replaces
            [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in model.parameters()],
            [layer.shapes() for layer in source.layers],
            [(x.shape, x.dtype) for x in new],
            [is_by_pass for every in inputs.tables.values() for _, is_by_pass in every],
            end,
            is_compiled,
        )
        others = list(model.recordings)
        kept = next((x for x in others if x.key == key and x.user() is None), None)
        if kept is None:
            others = remaining(others)
            model.recordings[:] = others
            self._packed = PackedModel(model)
            static = StaticCache(source, indices, model.settings.layer_kinds)
            parts = None
            if is_compiled:
                parts = compiled(_begin), compiled(_layer), compiled(_end)
            kept = Recording(key, self._packed.blocks, inputs, static, parts)
            new = [x.clone() for x in new]  # the recorded passes change them
        else:
            others.remove(kept)
            self._packed = PackedModel(model, kept.blocks)
            self._packed.refresh()
        model.recordings[:] = [kept, *others]
        self._kept = kept
        kept.user = weakref.ref(self)
        if kept.graph is None:
            tokens = kept.cache.at.new_zeros(source.batch)
            kept.graph = recorded(self._step, tokens)
        indexed = [x for index in kept.cache.indices.values() for x in index.tensors]
        for x, value in zip([*kept.inputs.tensors, *indexed], new, strict=True):
            x.copy_(value)
        kept.cache.at.zero_()
        for layer, given in zip(kept.cache.layers, source.layers, strict=True):
            layer.fill(given)

    def _step(self, tokens: Tensor) -> Tensor:
        """The next pass; see `PackedModel.step`."""
        kept = self._kept
        cache = kept.cache
        if kept.compiled is None:
            logits = self._packed.step(kept.inputs.of(cache.at), cache, tokens)
            cache.at.add_(1)
            return logits
        begin, layer, end = kept.compiled
        x, chunk, keys = begin(self._packed, kept.inputs, cache, tokens)
        names = self.model.layer_schemes
        for block, name, layer_cache in zip(kept.blocks, names, cache.layers, strict=True):
            kind = self.model.kind_of[name]
            scheme = self.model.position[name]
            factors = chunk.factors[kind]
            tables = chunk.tables[name]
            x = layer(block, scheme, x, chunk.positions, keys[kind], tables, factors, layer_cache)
        return end(self._packed, x)

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,). The next call overwrites them."""
        graph = self._kept.graph
        with trainable():
            return self._step(tokens) if graph is None else graph(tokens)
