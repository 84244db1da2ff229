"""Rotation parameters per model, per layer, or per key/value head."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.position.base import HeadGeometry, PositionSettings

Share = Literal["model", "layer", "head"]


class SharedSettings(PositionSettings):
    """Settings shared by schemes with learned angles."""

    share: Share = Field(
        "model",
        description="one set of parameters per model, per layer, or per key/value head of each layer",
    )

    @property
    def per_layer(self) -> bool:
        return self.share != "model"


def parameter(share: Share, geometry: HeadGeometry, features: int) -> nn.Parameter:
    """(R,), or (G, R) if each key/value head has its own; q and k of a group share them."""
    shape = (geometry.kv_heads, features) if share == "head" else (features,)
    return nn.Parameter(torch.empty(shape))


def to_queries(x: Tensor, geometry: HeadGeometry) -> Tensor:
    """(B or 1, G, T, R) of key/value heads → (B or 1, H, T, R) of query heads; (B or 1, T, R) is
    unchanged."""
    return x if x.ndim == 3 else x.repeat_interleave(geometry.heads // geometry.kv_heads, dim=1)
