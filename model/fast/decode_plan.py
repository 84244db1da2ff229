"""Passes of one token per row on a CPU whose positions are known in advance, prepared in chunks.

A small model takes about a millisecond per token, so every object that is created for a token
matters. A chunk of passes is planned as one pass over its tokens, which creates positions, tables,
plans and masks; the pass of a token is then one query of it.

The plain form is `decode_pass` in `model/decoding.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.explicit import query_block
from model.attention.mask import softmax
from model.cache import Cache, LayerCache
from model.fast.packed import PackedBlock, PackedModel
from model.position import AttentionPlan, ContentPlan, PositionalScheme
from model.position.base import Rotation
from model.position.rotation import apply_rotation
from model.token_positions import TokenPositions
from model.transformer import Transformer

# Passes that are prepared together; each attends to the keys of all of them, later ones masked.
CHUNK = 32


class DecodePlan:
    """The remaining passes of a generation, with a growing cache; see `make_decoder`."""

    def __init__(
        self, model: Transformer, packed: PackedModel, cache: Cache, positions: TokenPositions
    ):
        self.model = model
        self.packed = packed
        self.cache = cache
        self.positions = positions
        self._start = 0  # the first pass of the chunk
        self._count = 0  # passes of the chunk
        self._at = 0  # in the chunk
        self._layers: list[LayerPasses] = []
        self._embedding = [
            name
            for name, scheme in model.schemes.items()
            if type(scheme).embed is not PositionalScheme.embed
        ]
        for layer_cache in cache.layers:
            assert isinstance(layer_cache, LayerCache)
            layer_cache.transpose_keys()

    @staticmethod
    def supports(packed: PackedModel, plans: dict[str, AttentionPlan | ContentPlan]) -> bool:
        """Whether all blocks are packed and all plans have an `AttentionPlan.mask`."""
        is_packed = all(isinstance(block, PackedBlock) for block in packed.blocks)
        return is_packed and all(
            isinstance(plan, AttentionPlan) and plan.mask is not None for plan in plans.values()
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,)."""
        if self._at == self._count:
            self._prepare()
        at = self._at
        self._at += 1
        x = self.model.embed_tokens(tokens[:, None])
        for name in self._embedding:
            tables = tuple(table[:, at : at + 1] for table in self._chunk.tables[name])
            position = self._chunk.positions.part(at, at + 1)
            x = self.model.schemes[name].embed(x, tables, position)
        x = x.squeeze(1)
        for layer in self._layers:
            layer.at = at
            x = layer.block.step(x, layer)
        return self.model.logits(self.packed.norm(x))

    def _prepare(self) -> None:
        """Plan the next chunk and reserve its slots of the cache."""
        model = self.model
        batch = self.cache.batch
        self._start += self._count
        self._at = 0
        left = self.positions.order.shape[1] - self._start
        # A rolling cache has room for as many tokens as its window, besides the keys they attend
        # to.
        kinds = model.kinds.values()
        windows = [kind.position.window for kind in kinds if kind.position.window]
        heads = max(kind.heads for kind in kinds)
        self._count = min(
            CHUNK,
            left,
            query_block(batch * heads, self.cache.capacity),
            *windows,
        )
        end = self.positions.position_end - (left - self._count)
        positions = self.positions.part(
            self._start,
            self._start + self._count,
            position_end=end,
        )
        self._chunk = model.prepare(positions)
        prepared = {}
        kind_of = dict(model.layer_schemes)
        passes = model.passes(batch, self._chunk, self.cache.advance(positions))
        for name, each in passes.items():
            assert isinstance(each.plan, AttentionPlan) and each.plan.mask is not None
            kind = model.kinds[kind_of[name]]
            prepared[name] = ChunkPasses(
                masks=each.plan.mask.by_query(kind.kv_heads, model.embed.weight.dtype),
                rotations=rotations_of(
                    each.plan.rotation, batch, kind.heads, kind.kv_heads, kind.head_dim
                ),
                factors=each.factors,
            )
        layers = zip(
            self.packed.blocks,
            self.cache.layers,
            model.layer_schemes,
            strict=True,
        )
        self._layers = []
        for block, layer_cache, (name, _) in layers:
            assert isinstance(block, PackedBlock)
            self._layers.append(
                LayerPasses(
                    block,
                    layer_cache,
                    batch,
                    prepared[name],
                )
            )


@dataclass(frozen=True)
class ChunkPasses:
    """What the layers of a scheme share in the passes of a chunk.

    Attributes:
        masks: additive mask of each pass, as from `AttentionMask.by_query`.
        rotations: of the queries and keys (B, H + G, D) of each pass, as from `rotations_of`.
        factors: temperature factors (B or 1, H or 1, T or 1), or None.
    """

    masks: list[Tensor]
    rotations: list[Callable[[Tensor], Tensor]] | None
    factors: Tensor | None


def rotations_of(
    rotation: Rotation | None, batch: int, heads: int, groups: int, features: int
) -> list[Callable[[Tensor], Tensor]] | None:
    """For each token of a pass the rotation of its queries and keys (B, H + G, D).

    Where all rows and heads agree, it is a product with one (D, D) matrix instead of several
    operations.
    """
    if rotation is None:
        return None
    joined = []
    for q, k in zip(rotation.queries, rotation.keys, strict=True):
        if q is not k:
            k = torch.cat([q.expand(-1, heads, -1, -1), k.expand(-1, groups, -1, -1)], dim=1)
        joined.append(k)
    own, partner = joined
    layout = rotation.layout
    if own.shape[:2] == (1, 1):
        every = torch.eye(features, dtype=own.dtype)[:, None, None].expand(
            -1,
            -1,
            own.shape[2],
            -1,
        )
        matrices = apply_rotation(every, (own, partner), layout)  # (D, 1, T, D)
        by_row = (
            matrices[:, 0]
            .transpose(0, 1)[:, None]
            .expand(
                -1,
                batch,
                -1,
                -1,
            )
        )  # (T, B, D, D)
        return [lambda qk, matrix=matrix: torch.bmm(qk, matrix) for matrix in by_row.unbind(0)]
    by_token = zip(own.split(1, dim=2), partner.split(1, dim=2), strict=True)
    return [
        lambda qk, factors=factors: apply_rotation(qk[:, :, None], factors, layout).squeeze(2)
        for factors in by_token
    ]


class LayerPasses:
    """Attention of one layer in the passes of a chunk: x (B, C) → the heads' outputs (B, H·D).

    Attributes:
        at: index of the next pass.
    """

    def __init__(
        self, block: PackedBlock, layer_cache: LayerCache, batch: int, passes: ChunkPasses
    ):
        self.block = block
        self.passes = passes
        self.at = 0
        self._batch = batch
        attention = block.attention
        count = len(passes.masks)
        heads = attention.heads
        groups = attention.kv_heads
        features = attention.head_dim
        # Later slots are zeros: they are masked, but NaN times a weight of 0 would still be NaN.
        empty = passes.masks[0].new_zeros(batch, groups, count, features)
        k, v = layer_cache.append(empty, empty)  # views of the cache (B, G, S, D)
        self._new_k = k[:, :, -count:].unbind(2)
        self._new_v = v[:, :, -count:].unbind(2)
        self._keys = k.view(batch * groups, -1, features).transpose(1, 2)
        self._values = v.view(batch * groups, -1, features)
        self._shape = (batch * groups, heads // groups, features)
        self._sink = attention.position.sink_logits(k.device)
        self._is_scaled = passes.factors is not None or attention.position.scale is not None

    def __call__(self, x: Tensor) -> Tensor:
        at = self.at
        passes = self.passes
        attention = self.block.attention
        qk, v = self.block.project(x)  # (B, H + G, D), (B, G, D)
        if passes.rotations is not None:
            qk = passes.rotations[at](qk)
        q, k = qk.split_with_sizes(self.block.heads, 1)
        self._new_k[at].copy_(k)
        self._new_v[at].copy_(v)
        if self._is_scaled:
            factors = passes.factors
            if factors is not None and factors.shape[2] > 1:
                factors = factors[:, :, at : at + 1]
            q = attention.position.scale_queries(q[:, :, None], factors)
        mask = passes.masks[at]
        scale = attention.scale
        # (B·G, H / G, S)
        scores = torch.baddbmm(
            mask,
            q.reshape(self._shape),
            self._keys,
            alpha=scale,
        )
        if self._sink is None:
            weights = scores.softmax(-1)
        else:
            by_head = scores.view(self._batch, -1, 1, scores.shape[2])
            weights = softmax(by_head, self._sink).view_as(scores)
        return torch.bmm(weights, self._values).view(self._batch, -1)
