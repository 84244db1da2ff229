"""Positional schemes: the positional interface (`base`), the schemes, and the registry."""

from model.position.base import (
    Accumulate,
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    ExtrasCache,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.registry import SCHEMES

__all__ = [
    "SCHEMES",
    "Accumulate",
    "AttentionContext",
    "AttentionPlan",
    "ContentPlan",
    "ExtrasCache",
    "HeadGeometry",
    "PositionSettings",
    "PositionalScheme",
]
