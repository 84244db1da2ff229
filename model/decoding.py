"""Passes of one token per row after a prompt, with keys in a growing or in a static cache.

A GPU computes a pass of a small model in less time than the host needs to launch its operations.
With a static cache the operations are recorded once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from model.cache import Cache
from model.cuda_graph import CudaGraph
from model.fast.packed import PackedModel
from model.fast.prepared import PreparedDecoder
from model.position import AttentionPlan, ContentPlan
from model.static_cache import StaticCache, rounded
from model.token_positions import TokenPositions
from model.transformer import TokenChunk, Transformer

LEAST_PASSES = 4  # recording costs as much as three passes


def make_decoder(
    model: Transformer,
    cache: Cache,
    positions: TokenPositions,
    static: bool | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function from the next tokens (B,) to the logits (B, V) after them.

    Args:
        model: a model in evaluation mode. It need not be packed; `Transformer.pack` saves the
            copies.
        cache: of the preceding tokens, which only the decoder may use from now on.
        positions: of the tokens of all passes; `position_end` is that of the last.
        static: use a static cache where passes are the same operations; None: on a GPU.
    """
    weight = model.embed.weight
    autocast = torch.is_autocast_enabled(weight.device.type)
    if autocast or not positions.count or not PackedModel.supports(model):
        return GrowingDecoder(model, cache, positions)
    packed = PackedModel(model)
    plans = first_plans(model, cache.batch, positions)
    if static is None:
        static = weight.device.type == "cuda"
        if PreparedDecoder.supports(model, packed, positions, plans):
            return PreparedDecoder(model, packed, cache, positions)
    if static and StaticDecoder.supports(plans, positions):
        return StaticDecoder(model, packed, cache, positions, plans)
    return GrowingDecoder(model, cache, positions, packed)


def first_plans(
    model: Transformer,
    batch: int,
    positions: TokenPositions,
) -> dict[str, AttentionPlan | ContentPlan]:
    """The plan of each scheme instance in the first of these passes."""
    first = positions.part(0, 1)
    keys = dict.fromkeys(model.kinds, first)
    passes = model.passes(batch, model.prepare(first), keys)
    return {name: each.plan for name, each in passes.items()}


def decode_pass(
    model: Transformer,
    packed: PackedModel,
    chunk: TokenChunk,
    cache: Cache | StaticCache,
    tokens: Tensor,
) -> Tensor:
    """(B, V) logits after the tokens (B,), whose keys are added to the cache."""
    x = model.embed_chunk(model.embed_tokens(tokens[:, None]), chunk).squeeze(1)
    passes = model.passes(len(x), chunk, cache.advance(chunk.positions))
    layers = zip(packed.blocks, model.layer_schemes, cache.layers, strict=True)
    for block, (name, _), layer_cache in layers:
        x = block(x, passes[name], layer_cache)
    return model.logits(packed.norm(x))


class GrowingDecoder:
    """Passes that append their keys to a growing cache.

    Args:
        packed: None for models whose weights cannot be joined: sharded ones, and under autocast.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        positions: TokenPositions,
        packed: PackedModel | None = None,
    ):
        self.model = model
        self.cache = cache
        self.positions = positions
        self.packed = packed
        self._at = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,)."""
        at = self._at
        self._at += 1
        new = self.positions.part(at, self._at)
        if new.unit_steps:
            end = new.position_end - (self.positions.count - self._at)
            new = replace(new, position_end=end)
        if self.packed is None:
            return self.model(tokens[:, None], new, cache=self.cache, keep=1)[:, -1]
        chunk = self.model.prepare(new)
        return decode_pass(self.model, self.packed, chunk, self.cache, tokens)


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


def static_pass(
    model: Transformer,
    packed: PackedModel,
    cache: StaticCache,
    inputs: PassInputs,
    tokens: Tensor,
) -> Tensor:
    """`decode_pass` of the next pass of a static cache."""
    logits = decode_pass(model, packed, inputs.of(cache.at), cache, tokens)
    cache.at.add_(1)
    return logits


class StaticDecoder:
    """Passes with a static cache, each a replay of one CUDA graph. On a CPU they run one by one."""

    def __init__(
        self,
        model: Transformer,
        packed: PackedModel,
        cache: Cache,
        positions: TokenPositions,
        plans: dict[str, AttentionPlan | ContentPlan],
    ):
        passes = positions.count
        end = int(min(rounded(positions.position_end), model.limit or math.inf))
        inputs = PassInputs.create(model, replace(positions, position_end=end))
        windows = {name: kind.position.window for name, kind in model.kinds.items()}
        for name, kind in model.layer_schemes:
            plan = plans[name]
            if isinstance(plan, AttentionPlan) and not plan.is_unordered:
                windows[kind] = None  # weights may depend on the order of the slots
        self.cache = StaticCache(
            cache,
            model.settings.layer_kinds,
            passes,
            windows,
            end,
        )
        self._step = partial(static_pass, model, packed, self.cache, inputs)
        self._graph: CudaGraph | None = None

    @staticmethod
    def supports(plans: dict[str, AttentionPlan | ContentPlan], positions: TokenPositions) -> bool:
        """Whether all passes are the same operations, i.e. no scheme caches more than keys, and
        there are enough of them."""
        is_uniform = all(isinstance(plan, AttentionPlan) for plan in plans.values())
        return is_uniform and positions.count >= LEAST_PASSES

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,). The next call overwrites them."""
        if tokens.device.type != "cuda":
            return self._step(tokens)
        if self._graph is None:
            self._graph = CudaGraph(self._step, tokens)
            self.cache.restart()  # the recorded passes have changed it
        return self._graph(tokens)
