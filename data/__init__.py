"""Text to batches: sources, tokenizers, token shards, and the order in which training sees them."""

import importlib
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.preparation import Prepared, open_prepared, prepare, prepared_folder
from data.presence import check_texts, expected_vocabulary
from data.settings import DataSettings
from data.store import Store
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from data.batches import Batch, Batches

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "DataError",
    "DataSettings",
    "Prepared",
    "SentencePieceTokenizer",
    "Store",
    "Tokenizer",
    "check_texts",
    "expected_vocabulary",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "prepared_folder",
]


def __getattr__(name: str) -> Any:
    """Batches need torch, which takes longer to load than a tokenising worker takes for its work."""
    if name in ("Batch", "Batches"):
        return getattr(importlib.import_module("data.batches"), name)
    raise AttributeError(f"module 'data' has no attribute {name!r}")
