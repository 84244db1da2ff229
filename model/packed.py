"""Blocks of single-token passes: the arithmetic of `model/block.py` in few operations on joined weights.

One token of a small model takes about a millisecond on a CPU, half of it overhead of single operations, and
matrix-vector products with (out, in) weights are up to 2.6 times as slow as with (in, out) weights. A GPU
reads either at the same speed, but fewer and larger matrices faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.kernels import AttentionHook, attend
from model.attention.softmax import Attention, AttentionPass
from model.block import Block
from model.cache import LayerCache


def store_joined(linears: Sequence[nn.Linear]) -> Tensor:
    """Store the weights of linear layers with the same input in one matrix, returned as (in, Σ out). Its rows
    are contiguous on a CPU; elsewhere its columns are, like those of the layers' own weights.

    The layers keep their Parameter objects, whose values and shapes do not change: they become views of the
    matrix, so there is no second copy, and weights loaded in place later are those of the matrix too. Weights
    that are stored so already keep their matrix, which models with the same parameters then share.
    """
    if (stored := _stored_matrix(linears)) is not None:
        return stored
    weights = [linear.weight.detach() for linear in linears]
    if weights[0].device.type == "cpu":
        joined = torch.cat([weight.t() for weight in weights], dim=1).contiguous()
    else:
        joined = torch.cat(weights).t()
    parts = joined.split([linear.out_features for linear in linears], dim=1)
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part.t()
    return joined


def _stored_matrix(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The matrix in which `store_joined` has stored these weights, or None."""
    first = linears[0].weight.detach()
    width = sum(linear.out_features for linear in linears)
    inputs = linears[0].in_features
    offset = first.storage_offset()
    strides = (width, 1) if first.device.type == "cpu" else (1, inputs)  # of the (in, Σ out) matrix
    for linear in linears:
        weight = linear.weight.detach()
        is_part = weight.stride() == strides[::-1] and weight.storage_offset() == offset
        if not is_part or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        offset += linear.out_features * strides[1]
    return first.as_strided((inputs, width), strides)


class JoinedLinear:
    """Linear layers with the same input as one matrix product, x (B, in) → (B, Σ out)."""

    def __init__(self, *linears: nn.Linear):
        self.weight = store_joined(linears)
        self.biases = [linear.bias for linear in linears if linear.bias is not None]

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.mm(x, self.weight)
        if not self.biases:
            return out
        return out + (self.biases[0] if len(self.biases) == 1 else torch.cat(self.biases))

    def add_to(self, x: Tensor, update: Tensor, multiplier: float) -> Tensor:
        """Add multiplier · self(update) to x (B, out) in place."""
        if self.biases:
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
        is_precise = self.weight.dtype in (torch.float32, torch.float64)
        self._is_fast = is_precise and self.weight.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_fast or x.dtype != self.weight.dtype:
            return F.rms_norm(x, self.shape, self.weight.to(x.dtype), self.eps)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least)
        return torch.addcdiv(self._zero, x * self.weight, size, value=self._root)


class PackedBlock:
    """A block in passes of one token per row, with the call of `Block`. It joins the block's weights
    (`store_joined`)."""

    def __init__(self, block: Block):
        assert isinstance(block.attention, Attention)
        self.block = block
        self.attention = block.attention
        mlp = block.mlp
        attention = block.attention
        self.qkv = JoinedLinear(attention.wq, attention.wk, attention.wv)
        self.out = JoinedLinear(attention.wo)
        self.gate_up = JoinedLinear(mlp.gate, mlp.up)
        self.down = JoinedLinear(mlp.down)
        self.attention_norm = PackedNorm(block.attention_norm)
        self.mlp_norm = PackedNorm(block.mlp_norm)
        self.before = block.norm_placement == "input"
        self.multiplier = block.residual_multiplier
        self.heads = (attention.heads, attention.kv_heads)
        self.head_dim = attention.head_dim
        self.sizes = attention.heads + attention.kv_heads, attention.kv_heads
        self.width = sum(self.sizes)
        self.has_head_norms = not isinstance(attention.q_norm, nn.Identity)

    def __call__(
        self,
        x: Tensor,
        passes: Sequence[AttentionPass],
        layer_cache: LayerCache,
        hook: AttentionHook | None = None,
        window: None = None,
    ) -> Tensor:
        """x (B, 1, C) → (B, 1, C); see `Block.forward`."""
        (only,) = passes
        row = self.step(x.squeeze(1), lambda row: self._attend(row, only, layer_cache))
        return row.unsqueeze(1)

    def step(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, C) → (B, C), in place; `attend` maps (B, C) to the heads' outputs (B, H·D)."""
        if not self.before:
            x = x + self.attention_norm(self.out(attend(x))) * self.multiplier
            return x + self.mlp_norm(self.down(self._mlp(x))) * self.multiplier
        x = self.out.add_to(x, attend(self.attention_norm(x)), self.multiplier)
        return self.down.add_to(x, self._mlp(self.mlp_norm(x)), self.multiplier)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, C) → queries and keys (B, H + G, D) with their norms, and values (B, G, D)."""
        qk, v = self.qkv(x).view(-1, self.width, self.head_dim).split_with_sizes(self.sizes, 1)
        if self.has_head_norms:
            q, k = qk[:, :, None].split_with_sizes(self.heads, 1)
            qk = torch.cat(self.attention.normalized(q, k), 1).squeeze(2)
        return qk, v

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return F.silu(gate, inplace=True).mul_(up)

    def _attend(self, x: Tensor, step: AttentionPass, layer_cache: LayerCache) -> Tensor:
        """x (B, C) → the heads' outputs (B, H·D)."""
        attention = self.attention
        bound = step.plan.bind(x.unsqueeze(1), layer_cache)
        qk, v = (x.unsqueeze(2) for x in self.project(x))
        q, k = qk.split_with_sizes(self.heads, 1)
        k, v = layer_cache.append(bound.write(k), v)  # (B, G, S, ·)
        views = attention.views(bound, q, k, step.context, step.factors)
        out = attend(views, v, attention.scale, sink=attention.position.sink_logits(x.device))
        return out.reshape(len(x), -1)
