"""The decoder and its positional schemes. Knows nothing of files, data or training."""

from model.cache import Cache
from model.errors import ModelError
from model.loss import IGNORED
from model.position import SCHEMES, Places
from model.settings import AnyPosition, LinearMixer, ModelSettings, check_override, legal_overrides
from model.transformer import Transformer

__all__ = [
    "IGNORED",
    "SCHEMES",
    "AnyPosition",
    "Cache",
    "LinearMixer",
    "ModelError",
    "ModelSettings",
    "Places",
    "Transformer",
    "check_override",
    "legal_overrides",
]
