"""From text to batches: sources, tokenizers, token shards and the data order of training."""

import importlib
from typing import TYPE_CHECKING, Any

from data.data_settings import DataSettings
from data.preparation.prepare import prepare
from data.preparation.prepared import (
    PreparedData,
    check_texts,
    expected_vocabulary,
    open_prepared,
    prepared_folder,
)
from data.store import TokenStore
from data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_folder_tokenizer,
    load_tokenizer,
)
from errors import DataError

if TYPE_CHECKING:
    from data.sampling.batches import Batch, BatchSampler

__all__ = [
    "Batch",
    "BatchSampler",
    "ByteTokenizer",
    "DataError",
    "DataSettings",
    "HuggingFaceTokenizer",
    "PreparedData",
    "SentencePieceTokenizer",
    "TokenStore",
    "Tokenizer",
    "check_texts",
    "expected_vocabulary",
    "load_folder_tokenizer",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "prepared_folder",
]


def __getattr__(name: str) -> Any:
    """Import batches lazily: they need torch, which takes longer to import than a tokenizing worker
    runs."""
    if name in ("Batch", "BatchSampler"):
        return getattr(importlib.import_module("data.sampling.batches"), name)
    raise AttributeError(f"module 'data' has no attribute {name!r}")
