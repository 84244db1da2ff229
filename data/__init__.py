"""Text to batches: sources, tokenizers, token shards, and the order in which training sees them."""

from data.batches import Batch, Batches
from data.errors import DataError
from data.prepare import Prepared, open_prepared, prepare, prepared_folder
from data.settings import DataSettings
from data.store import Store
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer

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
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "prepared_folder",
]
