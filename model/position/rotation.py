"""Rotation of queries and keys by given angles, and the settings that rotary schemes share."""

from typing import Literal

import torch
from torch import Tensor

from errors import ModelError
from model.attention.mask import AttentionView, repeated
from model.position.base import (
    AttentionContext,
    AttentionPlan,
    HeadGeometry,
    PositionSettings,
)
from settings.fields import setting

Layout = Literal["half", "interleaved"]
Share = Literal["model", "layer", "head"]
# of each feature and of its partner, each (B or 1, 1 or H, T, 2·R)
Factors = tuple[Tensor, Tensor]
Turns = tuple[Tensor, Tensor]  # cos and sin, each (B or 1, T, R), or (B or 1, G or H, T, R)


class RotationSettings(PositionSettings):
    """Settings of rotations whose initial frequencies are a geometric series."""

    theta: float = setting(10_000.0, "base b of the frequencies b^(−2k/r)", gt=1)
    layout: Layout = setting(
        "half",
        "features of a pair of r rotated ones: (k, k + r/2) or (2k, 2k + 1)",
    )


class AngleSharingSettings(PositionSettings):
    """Settings shared by schemes with learned angles."""

    share: Share = setting(
        "model",
        "one set of parameters per model, per layer, or per key/value head of each layer",
    )

    @property
    def per_layer(self):
        return self.share != "model"

    def shape(self, geometry: HeadGeometry, features: int) -> tuple[int, ...]:
        """(R,), or (G, R) if each key/value head has its own; q and k of a group share them."""
        return (geometry.kv_heads, features) if self.share == "head" else (features,)


def rotation_factors(cos: Tensor, sin: Tensor, layout: str) -> Factors:
    """The factors of each feature and of its partner in `apply_rotation`, computed once per pass.

    Args:
        cos, sin: (B or 1, T, R), or (B or 1, H, T, R) where heads differ.
        layout: ``half`` pairs feature k with k + R, ``interleaved`` pairs 2k with 2k + 1.

    Returns:
        cos and ∓sin for all features, each (B or 1, 1 or H, T, 2·R).
    """
    if cos.ndim == 3:
        cos = cos[:, None]
        sin = sin[:, None]
    # (B or 1, 1 or H, T, 2, R) or, interleaved, (B or 1, 1 or H, T, R, 2)
    pairs = -2 if layout == "half" else -1
    own = torch.stack([cos, cos], dim=pairs)
    partner = torch.stack([-sin, sin], dim=pairs)
    return own.flatten(-2), partner.flatten(-2)


def apply_rotation(x: Tensor, factors: Factors, layout: str) -> Tensor:
    """Rotate the first 2·R features of each head of x (B, H, T, D); further features pass through.

    Args:
        factors: `rotation_factors`; float32 or float64, the dtype of the computation.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    own, partner = factors
    count = own.shape[-1]
    rotated = x[..., :count].to(own.dtype)
    if layout == "half":
        swapped = rotated.roll(count // 2, dims=-1)
    else:
        swapped = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(rotated * own, swapped, partner).to(x.dtype)
    return out if count == x.shape[-1] else torch.cat([out, x[..., count:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·R features of each head of x (B, H, T, D), paired as k and k + R, by the
    angles of `rotation_factors`."""
    return apply_rotation(x, rotation_factors(cos, sin, "half"), "half")


def rotation_plan(
    context: AttentionContext,
    layout: str,
    keys: Turns,
    queries: Turns | None = None,
) -> AttentionPlan:
    """Keys are rotated by the cos and sin of the new tokens and cached so; queries are rotated by
    the same, or by their own."""
    mask = context.mask()
    of_keys = rotation_factors(*keys, layout)
    of_queries = of_keys if queries is None else rotation_factors(*queries, layout)
    own, partner = (context.of_queries(x, dim=2) for x in of_queries)
    if own.shape[1] > 1:  # of key/value heads (B or 1, G, K, 2·R)
        own = repeated(own, context.heads)
        partner = repeated(partner, context.heads)

    def read(q: Tensor, k: Tensor) -> list[AttentionView]:
        return [AttentionView(apply_rotation(q, (own, partner), layout), k, mask)]

    return AttentionPlan(
        read,
        write=lambda k: apply_rotation(k, of_keys, layout),
        is_unordered=True,
        is_uniform=own.shape[:2] == of_keys[0].shape[:2] == (1, 1),
    )


def check_even(name: str, geometry: HeadGeometry) -> None:
    """Raise ModelError for an odd head dimension."""
    if geometry.head_dim % 2:
        raise ModelError(
            f"{name} rotates pairs of features and requires an even head dimension, got "
            f"{geometry.head_dim}: change model.dim, model.heads or model.head_dim"
        )
