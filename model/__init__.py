"""The decoder and its positional schemes, independent of files, data and training."""

from errors import ModelError
from model.cache import Cache
from model.devices import find_device
from model.loss import IGNORED
from model.model_settings import (
    AnyPosition,
    ModelSettings,
    check_override,
    legal_overrides,
)
from model.position import SCHEMES
from model.sharding import ContextShard
from model.token_positions import TokenPositions
from model.transformer import Transformer

__all__ = [
    "IGNORED",
    "SCHEMES",
    "AnyPosition",
    "Cache",
    "ContextShard",
    "ModelError",
    "ModelSettings",
    "TokenPositions",
    "Transformer",
    "check_override",
    "find_device",
    "legal_overrides",
]
