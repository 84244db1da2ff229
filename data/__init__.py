"""From text to batches: sources, tokenizers, token shards and the data order of training."""

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

__all__ = [
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
