"""Rotation of queries and keys by given angles, and the settings that rotary schemes share."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from errors import ModelError
from model.attention.mask import AttentionView, repeated
from model.position.base import AttentionContext, AttentionPlan, HeadGeometry, PositionSettings

Layout = Literal["half", "interleaved"]
Share = Literal["model", "layer", "head"]
Turns = tuple[Tensor, Tensor]  # cos and sin, each (B or 1, T, R), or (B or 1, G or H, T, R)


class RotationSettings(PositionSettings):
    """Settings of rotations whose initial frequencies are a geometric series."""

    theta: float = Field(10_000.0, gt=1, description="base b of the frequencies b^(−2k/r)")
    layout: Layout = Field(
        "half", description="features of a pair of r rotated ones: (k, k + r/2) or (2k, 2k + 1)"
    )


class AngleSharingSettings(PositionSettings):
    """Settings shared by schemes with learned angles."""

    share: Share = Field(
        "model",
        description="one set of parameters per model, per layer, or per key/value head of each layer",
    )

    @property
    def per_layer(self) -> bool:
        return self.share != "model"

    def shape(self, geometry: HeadGeometry, features: int) -> tuple[int, ...]:
        """(R,), or (G, R) if each key/value head has its own; q and k of a group share them."""
        return (geometry.kv_heads, features) if self.share == "head" else (features,)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first 2·R features of each head by the given angles, pair by pair.

    Args:
        x: (B, H, T, D); features past 2·R pass through.
        cos, sin: (B or 1, T, R), or (B or 1, H, T, R) where heads differ; float32 or float64, the dtype
            of the computation.
        layout: ``half`` pairs feature k with k + R, ``interleaved`` pairs 2k with 2k + 1.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    count = cos.shape[-1]
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]  # (B or 1, 1, T, R)
    rotated, rest = x[..., : 2 * count].to(cos.dtype), x[..., 2 * count :]
    if layout == "half":
        a, b = rotated[..., :count], rotated[..., count:]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    out = out.to(x.dtype)
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


def rotation_plan(context: AttentionContext, queries: Turns, keys: Turns, layout: str) -> AttentionPlan:
    """Queries and keys are rotated, each by the cos and sin of the new tokens; keys are cached rotated."""
    pairs = context.pairs()
    q_cos, q_sin = (context.of_queries(x, dim=x.ndim - 2) for x in queries)
    if q_cos.ndim == 4:  # of key/value heads (B or 1, G, K, R)
        q_cos, q_sin = repeated(q_cos, context.heads), repeated(q_sin, context.heads)
    return AttentionPlan(
        read=lambda q, k: [AttentionView(rotate(q, q_cos, q_sin, layout), k, pairs)],
        write=lambda k: rotate(k, *keys, layout),
    )


def check_even(name: str, geometry: HeadGeometry) -> None:
    """Raise ModelError for an odd head dimension."""
    if geometry.head_dim % 2:
        raise ModelError(
            f"{name} rotates pairs of features and requires an even head dimension, got "
            f"{geometry.head_dim}: change model.dim, model.heads or model.head_dim"
        )
