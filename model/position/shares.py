"""Parameters of a rotation that the whole model, a layer, or a group of heads has for itself."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.position.base import Geometry, PositionSettings

Share = Literal["model", "layer", "head"]


class SharedSettings(PositionSettings):
    """What schemes with learned angles have in common."""

    share: Share = Field(
        "model",
        description="who has parameters of its own: the model, each layer, or each key/value head of each "
        "layer, which its query heads follow",
    )

    @property
    def per_layer(self) -> bool:
        return self.share != "model"


def parameter(share: Share, geometry: Geometry, features: int) -> nn.Parameter:
    """(R,), or (G, R) where every key/value head has its own: q and k of one group must turn alike."""
    shape = (geometry.kv_heads, features) if share == "head" else (features,)
    return nn.Parameter(torch.empty(shape))


def to_queries(x: Tensor, geometry: Geometry) -> Tensor:
    """(B or 1, G, T, R) of key/value heads → (B or 1, H, T, R) of query heads; (B or 1, T, R) as it is."""
    return x if x.ndim == 3 else x.repeat_interleave(geometry.heads // geometry.kv_heads, dim=1)
