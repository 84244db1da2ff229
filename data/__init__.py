"""From text to batches: sources, tokenizers, token shards and the data order of training."""

from data.data_settings import DataSettings
from data.prepared import (
    PreparedData,
    RunData,
    check_items,
    check_texts,
    expected_vocabulary,
    is_prepared,
    open_prepared,
    prepared_folder,
)
from data.store import TokenStore
from data.task_data import GeneratedData
from data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_folder_tokenizer,
    load_tokenizer,
)
from errors import DataError

__all__ = [
    "ByteTokenizer",
    "DataError",
    "DataSettings",
    "GeneratedData",
    "HuggingFaceTokenizer",
    "PreparedData",
    "RunData",
    "SentencePieceTokenizer",
    "TokenStore",
    "Tokenizer",
    "check_items",
    "check_texts",
    "expected_vocabulary",
    "is_prepared",
    "load_folder_tokenizer",
    "load_tokenizer",
    "open_prepared",
    "prepared_folder",
]
