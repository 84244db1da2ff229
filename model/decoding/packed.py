"""Blocks of single-token passes: the arithmetic of `model/block.py` in few operations on joined
weights.

One token of a small model takes about a millisecond on a CPU, half of it overhead of single
operations, and matrix-vector products with (out, in) weights are up to 2.6 times as slow as with
(in, out) weights. A GPU reads either at the same speed, but fewer and larger matrices faster.

The plain form is `model/block.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.mask import PRECISE, precise
from model.block import Block, Norm
from model.cache import LayerCache
from model.mixers.mixer import AttentionPass
from model.mixers.softmax import Attention
from model.position.table import trainable
from model.transformer import TokenChunk, Transformer


def is_transposed(weight: Tensor) -> bool:
    """Whether `joined_weight` stores a weight as (in, out): on a CPU."""
    return weight.device.type == "cpu"


def joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """The weights of linear layers with the same input as one matrix (in, Σ out): the matrix of
    `store_joined`, or a copy. Its rows are contiguous on a CPU; elsewhere its columns are."""
    stored = _stored_matrix(linears)
    if stored is not None:
        return stored
    weights = [linear.weight.detach() for linear in linears]
    if is_transposed(weights[0]):
        return torch.cat([weight.t() for weight in weights], dim=1).contiguous()
    return torch.cat(weights).t()


def store_joined(linears: Sequence[nn.Linear]) -> None:
    """Store the weights in the matrix of `joined_weight`; the layers' own weights become views of
    it.

    The layers keep their Parameter objects, whose values and shapes do not change, so there is no
    second copy, and loading weights in place later changes the matrix too. Weights that are already
    stored in such a matrix keep it, so models with the same parameters share it.
    """
    if _stored_matrix(linears) is not None:
        return
    widths = [linear.out_features for linear in linears]
    with trainable():
        parts = joined_weight(linears).split(widths, dim=1)
        for linear, part in zip(linears, parts, strict=True):
            linear.weight.data = part.t()


def _stored_matrix(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The matrix in which `store_joined` has stored these weights, or None."""
    first = linears[0].weight.detach()
    width = sum(linear.out_features for linear in linears)
    inputs = linears[0].in_features
    strides = (width, 1) if is_transposed(first) else (1, inputs)
    start = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for linear in linears:
        weight = linear.weight.detach().t()
        if weight.stride() != strides or weight.storage_offset() != offset:
            return None
        if weight.untyped_storage().data_ptr() != start:
            return None
        offset += linear.out_features * strides[1]
    return first.as_strided((inputs, width), strides)


def joined_layers(block: Block) -> list[list[nn.Linear]]:
    """The linear layers of a block with softmax attention, grouped by input: q, k and v; the
    output; gate and up; down; and the gate of attention, if it has one."""
    attention = block.mixer
    mlp = block.mlp
    groups = [
        [attention.wq, attention.wk, attention.wv],
        [attention.wo],
        [mlp.gate, mlp.up],
        [mlp.down],
    ]
    if attention.wg is not None:
        groups.append([attention.wg])
    return groups


class JoinedLinear:
    """Linear layers with the same input as one matrix product, x (B, in) → (B, Σ out)."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self._linears = linears
        self.weight = joined_weight(linears)
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = None
        if biases:
            self.bias = torch.cat(biases)

    def refresh(self) -> None:
        """Copy the layers' current weights, if this has copies."""
        present = JoinedLinear(self._linears)
        if _stored_matrix(self._linears) is None:
            self.weight.copy_(present.weight)
        if self.bias is not None and present.bias is not None:
            self.bias.copy_(present.bias)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.mm(x, self.weight)
        return out if self.bias is None else out + self.bias

    def add_to(self, x: Tensor, update: Tensor, multiplier: float) -> Tensor:
        """x (B, out) + multiplier · self(update), in place unless compiled."""
        if torch.compiler.is_compiling():
            # in float32, so that it is one kernel with the norm that follows, not with the product
            return torch.add(precise(x), precise(self(update)), alpha=multiplier).to(x.dtype)
        if self.bias is not None:
            return x.add_(self(update), alpha=multiplier)
        return x.addmm_(update, self.weight, alpha=multiplier)


class PackedNorm:
    """RMSNorm of x (·, C); PyTorch's on a CPU consists of six operations.

    x·w / √(mean x² + ε) = √C · x·w / hypot(‖x‖, √(C·ε)).
    """

    def __init__(self, norm: nn.RMSNorm):
        assert norm.eps is not None
        self.weight = norm.weight
        self.eps = norm.eps
        self.shape = norm.normalized_shape
        width = self.weight.numel()
        self._root = math.sqrt(width)
        self._least = torch.tensor(math.sqrt(width * norm.eps), dtype=self.weight.dtype)
        self._zero = torch.zeros((), dtype=self.weight.dtype)
        self._is_fast = self.weight.dtype in PRECISE and self.weight.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_fast or x.dtype != self.weight.dtype:
            weight = self.weight.to(x.dtype)
            return F.rms_norm(x, self.shape, weight, self.eps)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        size.hypot_(self._least)
        return torch.addcdiv(
            self._zero,
            x * self.weight,
            size,
            value=self._root,
        )


def _packed(norm: Norm) -> Norm:
    return PackedNorm(norm) if isinstance(norm, nn.RMSNorm) else norm


# Maps queries (B, H, D), keys and values (B, G, D) of new tokens and the normalized layer input
# (B, C) to the heads' outputs (B, H·D).
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class PackedBlock:
    """A block with softmax attention in passes of one token per row. It uses the block's weights if
    `store_joined` has stored them, otherwise copies."""

    def __init__(self, block: Block):
        attention = block.mixer
        assert isinstance(attention, Attention)
        self.attention = attention
        qkv, out, gate_up, down, *gates = joined_layers(block)
        self.qkv = JoinedLinear(qkv)
        self.out = JoinedLinear(out)
        self.gate_up = JoinedLinear(gate_up)
        self.down = JoinedLinear(down)
        self.input_norms = [_packed(norm) for norm in block.input_norms]
        self.output_norms = [_packed(norm) for norm in block.output_norms]
        self.norms_outputs = block.norm_placement != "input"
        self.activation = block.mlp.activation
        self.multiplier = block.residual_multiplier
        self.scaled = block.scaled
        self.widths = [linear.out_features for linear in qkv]
        self.heads = [attention.query_heads, attention.kv_heads, attention.kv_heads]
        has_norms = not isinstance(attention.q_norm, nn.Identity)
        self.has_norms = has_norms or not isinstance(attention.v_norm, nn.Identity)
        self.gate = JoinedLinear(gates[0]) if gates else None

    def refresh(self) -> None:
        """See `JoinedLinear.refresh`."""
        for linear in (self.qkv, self.out, self.gate_up, self.down, self.gate):
            if linear is not None:
                linear.refresh()

    def __call__(self, x: Tensor, step: AttentionPass, layer_cache: LayerCache) -> Tensor:
        """x (B, C) → (B, C), in place; see `Block.forward`."""
        attention = self.attention

        def attend(q: Tensor, k: Tensor, v: Tensor, normed: Tensor) -> Tensor:
            inputs = normed.unsqueeze(1)
            plan = step.plan.bind(inputs, layer_cache)
            q, k, v = (part.unsqueeze(2) for part in (q, k, v))
            k = attention.shifted(k, step, layer_cache)
            keys, values = layer_cache.append(plan.write(k), v)  # (B, G, S, ·)
            views = attention.views(plan, q, keys, step, inputs)
            return attention.excluding(attention.weighted(views, values), v).reshape(len(x), -1)

        return self.step(x, attend)

    def step(self, x: Tensor, attend: Attend) -> Tensor:
        """x (B, C) → (B, C), in place."""
        normed = self.input_norms[0](x)
        mixed = attend(*self._projected(normed), normed)
        if self.gate is not None:
            mixed = self.attention.gated(mixed, self.gate(normed))
        x = self._added(x, self.out, mixed, self.output_norms[0])
        gate, up = self.gate_up(self.input_norms[1](x)).chunk(2, dim=1)
        hidden = self.activation(gate).mul_(up)
        return self.scaled(self._added(x, self.down, hidden, self.output_norms[1]))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, D), keys and values (B, G, D) of the normalized input x (B, C)."""
        attention = self.attention
        projected = self.qkv(x)
        if not self.has_norms:
            by_head = projected.view(len(x), -1, attention.head_dim)
            q, k, v = by_head.split_with_sizes(self.heads, 1)
            return q, k, v
        q, k, v = projected.unsqueeze(1).split_with_sizes(self.widths, 2)
        q = attention.normalized(attention.q_norm, q).squeeze(2)
        k = attention.normalized(attention.k_norm, k).squeeze(2)
        return q, k, attention.v_norm(attention.split(v)).squeeze(2)

    def _added(self, x: Tensor, linear: JoinedLinear, update: Tensor, norm: Norm) -> Tensor:
        """The residual stream x (B, C) with the projection of an update (B, ·)."""
        if self.norms_outputs:
            return x + norm(linear(update)) * self.multiplier
        return linear.add_to(x, update, self.multiplier)


def plain_step(block: Block, x: Tensor, step: AttentionPass, layer_cache: Any) -> Tensor:
    """`PackedBlock` of a block without a packed form."""
    return block(x.unsqueeze(1), [step], layer_cache).squeeze(1)


Layer = Callable[[Tensor, AttentionPass, Any], Tensor]  # x (B, C) → (B, C)


class PackedModel:
    """A model in passes of one token per row.

    Args:
        blocks: blocks of another instance; None: new blocks.
    """

    def __init__(self, model: Transformer, blocks: list[Layer] | None = None):
        self.model = model
        self.blocks = blocks or [
            PackedBlock(block)
            if isinstance(block.mixer, Attention) and not block.canons
            else partial(plain_step, block)
            for block in model.layers
        ]
        self._norm = PackedNorm(model.norm)

    def refresh(self) -> None:
        """See `JoinedLinear.refresh`."""
        for block in self.blocks:
            if isinstance(block, PackedBlock):
                block.refresh()

    def step(self, chunk: TokenChunk, cache: Any, tokens: Tensor) -> Tensor:
        """(B, V) logits after the tokens (B,), whose keys are added to the cache."""
        model = self.model
        x = self.embed(chunk, tokens)
        passes = model.passes(len(x), chunk, cache.advance(chunk.positions))
        layers = zip(self.blocks, model.layer_schemes, cache.layers, strict=True)
        for block, name, layer_cache in layers:
            x = block(x, passes[name], layer_cache)
        return self.logits(x)

    def embed(self, chunk: TokenChunk, tokens: Tensor) -> Tensor:
        """The embeddings (B, C) of the tokens (B,) of a pass."""
        model = self.model
        return model.embed_chunk(model.embed_tokens(tokens[:, None]), chunk).squeeze(1)

    def logits(self, x: Tensor) -> Tensor:
        """(B, C) hidden states → (B, V) logits."""
        return self.model.logits(self._norm(x))


def pack(model: Transformer) -> Transformer:
    """Store the weights as decoding reads them fastest: weights with the same input in one matrix,
    which is transposed on a CPU. Parameters keep their names, shapes and values; they become views.
    Moving, casting or copying the model undoes it.

    On a GPU the first generation packs the model. On a CPU, models decode equally fast without it,
    with a copy of the weights during a generation.
    """
    if model.head is not None:
        store_joined([model.head])
    for block in model.layers:
        if isinstance(block.mixer, Attention):
            for linears in joined_layers(block):
                store_joined(linears)
    return model
