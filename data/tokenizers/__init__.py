"""Conversion between text and ids: sentencepiece models, tokenizer.json files, or plain bytes."""

from data.tokenizers.huggingface import HuggingFaceTokenizer
from data.tokenizers.loading import (
    given_tokenizer,
    load_folder_tokenizer,
    load_tokenizer,
    load_tokenizer_file,
    saved_settings,
)
from data.tokenizers.sentencepiece import SentencePieceTokenizer
from data.tokenizers.tokenizer_base import ByteTokenizer, SymbolTokenizer, Tokenizer, lossless

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "SymbolTokenizer",
    "Tokenizer",
    "given_tokenizer",
    "load_folder_tokenizer",
    "load_tokenizer",
    "load_tokenizer_file",
    "lossless",
    "saved_settings",
]
