"""A plain implementation of LLaMA, as a baseline for speed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Transformer


def plain_llama(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean NLL of `targets` (B, T) after `tokens` (B, T), under a model with RoPE and the weights
    of `model`."""
    s = model.settings
    x = model.embed(tokens)
    turns = rotations(tokens.shape[1], s.head_dim, tokens.device)
    for block in model.layers:
        x = x + attention(block.attention, norm(block.attention_norm, x), s.head_dim, turns)
        h = norm(block.mlp_norm, x)
        x = x + block.mlp.down(F.silu(block.mlp.gate(h)) * block.mlp.up(h))
    assert model.head is not None
    logits = F.linear(norm(model.norm, x), model.head.weight)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def attention(layer: Any, x: Tensor, head_dim: int, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention of `x` (B, T, C)."""
    q, k, v = (
        linear(x).unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, H or G, T, D)
        for linear in (layer.wq, layer.wk, layer.wv)
    )
    q = rotated(q, turns)
    k = rotated(k, turns)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.wo(out.transpose(1, 2).flatten(2))


def rotations(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (T, D), of RoPE's angles."""
    exponents = torch.arange(0, head_dim, 2, device=device) / head_dim
    angles = torch.arange(length, device=device)[:, None] * 10_000.0**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, H, T, D) with feature k and k + D/2 as pairs."""
    cos, sin = turns
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def norm(of: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, of.normalized_shape, of.weight, of.eps)
