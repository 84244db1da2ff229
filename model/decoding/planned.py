"""Passes of one token per row on a CPU, planned in chunks.

A small model takes about a millisecond per token, most of it for Python objects and single
operations. A chunk of passes is therefore planned as one pass over its tokens, which creates
tables, masks and slots of the cache; later slots are masked until they are written. The plain form
is `PackedModel.step`.
"""

import torch
from torch import Tensor

from model.attention.kernels import query_block
from model.attention.mask import PRECISE
from model.cache import Cache, LayerCache
from model.decoding.packed import PackedBlock, PackedModel
from model.mixers.mixer import AttentionPass
from model.mixers.softmax import Attention
from model.position import AttentionPlan, ContentPlan, PositionalScheme
from model.token_positions import TokenPositions

CHUNK = 32  # passes that are planned together


class PlannedLayer:
    """Attention of one layer in the passes of a chunk; it is called once for each pass.

    A plan that `supports` accepts maps queries and keys linearly, alike in all rows and heads, so a
    matrix for each token replaces the operations of the plan.
    """

    def __init__(self, attention: Attention, step: AttentionPass, layer_cache: LayerCache):
        context = step.context
        count = context.new.count
        heads = attention.heads
        groups = attention.kv_heads
        features = attention.head_dim
        # zeros: they are masked, but NaN times a weight of 0 would still be NaN
        empty = torch.zeros(context.batch, groups, count, features, dtype=layer_cache.dtype)
        k, v = layer_cache.append(empty, empty)
        # one for each token, (B, G, D)
        self._new_keys = k[:, :, -count:].unbind(2)
        self._new_values = v[:, :, -count:].unbind(2)
        self._keys = k.view(context.batch * groups, -1, features).mT
        self._values = v.view(context.batch * groups, -1, features)
        unit_vectors = torch.eye(features, dtype=empty.dtype)[:, None, None]
        q = unit_vectors.expand(-1, heads, count, -1)
        k = unit_vectors.expand(-1, groups, count, -1)
        plan = step.plan.bind(q, None)
        (view,) = plan.read(q, plan.write(k))
        self._is_mapped = not (torch.equal(view.q, q) and torch.equal(view.k, k))
        # one for each token, (D, D)
        self._query_maps = view.q[:, 0].unbind(1)
        self._key_maps = view.k[:, 0].unbind(1)
        self._masks = view.mask.by_query(slice(0, view.mask.keys), groups, empty.dtype)
        self._step = step
        self._attention = attention
        self._normalizer = attention.position.normalizer(empty.device)
        self._at = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs (B, H·D) of the next token, for its queries (B, H, D), keys and values
        (B, G, D) and layer input x (B, C)."""
        at = self._at
        self._at += 1
        if self._is_mapped:
            q = q @ self._query_maps[at]
            k = k @ self._key_maps[at]
        self._new_keys[at].copy_(k)
        self._new_values[at].copy_(v)
        position = self._attention.position
        factors = self._step.factors
        if factors is not None or position.scale is not None:
            if factors is not None and factors.shape[2] > 1:
                factors = factors[:, :, at : at + 1]
            q = position.scale_queries(q[:, :, None], factors, x[:, None])
        rows = len(self._keys)
        scores = torch.baddbmm(
            self._masks[at],
            q.reshape(rows, -1, q.shape[-1]),
            self._keys,
            alpha=self._attention.scale,
        )  # (B·G, H / G, S)
        if self._normalizer.is_softmax:
            weights = scores.softmax(-1)
        else:
            by_head = scores.view(len(x), -1, 1, scores.shape[2])
            weights = self._normalizer(by_head).view_as(scores)
        out = torch.bmm(weights, self._values).view(len(x), -1, 1, v.shape[2])
        return self._attention.excluding(out, v[:, :, None]).view(len(x), -1)


class PlannedDecoder:
    """The passes after a prompt, with keys in a growing cache; see `make_decoder`."""

    def __init__(
        self,
        packed: PackedModel,
        cache: Cache,
        positions: TokenPositions,
    ):
        self.packed = packed
        # `supports` requires all of them to be packed
        self.blocks = [block for block in packed.blocks if isinstance(block, PackedBlock)]
        self.cache = cache
        self.positions = positions
        self._layers: list[PlannedLayer] = []
        self._start = 0  # first pass of the next chunk
        self._left = 0  # remaining passes of the current chunk

    @staticmethod
    def supports(
        packed: PackedModel,
        positions: TokenPositions,
        plans: dict[str, AttentionPlan | ContentPlan],
    ) -> bool:
        """Whether all layers are attention to all earlier tokens of rows of equal length, under
        schemes that map queries and keys linearly, or act on distances alone."""
        model = packed.model
        weight = model.embed.weight
        choices = [kind.position for kind in model.kinds.values()]
        return (
            weight.device.type == "cpu"
            and weight.dtype in PRECISE
            and positions.layout == "plain"
            and all(isinstance(block, PackedBlock) for block in packed.blocks)
            and all(choice.window is None and choice.shifted_keys == 0 for choice in choices)
            and all(type(x).embed is PositionalScheme.embed for x in model.position.values())
            and all(plan.is_uniform for plan in plans.values())
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,)."""
        if self._left == 0:
            self._plan()
        self._left -= 1
        x = self.packed.model.embed_tokens(tokens)
        for block, layer in zip(self.blocks, self._layers, strict=True):
            x = block.step(x, layer)
        return self.packed.logits(x)

    def _plan(self) -> None:
        """Plan the next chunk."""
        model = self.packed.model
        passes = self.positions.count
        heads = max(kind.heads for kind in model.kinds.values())
        block = query_block(self.cache.batch * heads, self.cache.capacity)
        self._left = min(CHUNK, block, passes - self._start)
        stop = self._start + self._left
        end = self.positions.position_end - (passes - stop)
        chunk = model.prepare(self.positions.part(self._start, stop, position_end=end))
        made = model.passes(self.cache.batch, chunk, self.cache.advance(chunk.positions))
        layers = zip(self.blocks, self.cache.layers, model.layer_schemes, strict=True)
        self._layers = [
            PlannedLayer(block.attention, made[name], layer_cache)
            for block, layer_cache, name in layers
        ]
        self._start = stop
