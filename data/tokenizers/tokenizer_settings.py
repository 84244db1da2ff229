"""Settings of the tokenizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from settings.fields import StrictSettings, setting


class SentencePieceSettings(StrictSettings):
    """Subwords by sentencepiece, trained on the training documents or read from a model file."""

    file: ClassVar[str] = "tokenizer.model"  # the name of a saved model
    name: Literal["sentencepiece"] = "sentencepiece"
    model: str | None = setting(None, "an existing .model file; null trains one")
    kind: Literal["bpe", "unigram"] = setting("bpe", "algorithm; unigram trains 20 times slower")
    vocab_size: int = setting(
        4096,
        "vocabulary size, including control symbols",
        ge=264,
        le=1_000_000,
    )
    byte_fallback: bool = setting(
        True,
        "encode unknown characters as bytes, so that encoding is lossless",
    )
    split_digits: bool = setting(True, "each digit is its own token")
    space_runs: bool = setting(True, "allow tokens of several spaces (indentation of code)")
    train_bytes: int = setting(
        16_000_000,
        "maximum training text of the tokenizer in bytes, sampled evenly",
        ge=1,
    )
    character_coverage: float = setting(
        0.9995,
        "fraction of characters with their own token id",
        gt=0.9,
        le=1.0,
    )


class HuggingFaceSettings(StrictSettings):
    """Byte-level BPE of the tokenizers library, trained on the training documents, or any
    tokenizer.json."""

    file: ClassVar[str] = "tokenizer.json"  # the name of a saved model
    name: Literal["huggingface"] = "huggingface"
    model: str | None = setting(
        None,
        "an existing tokenizer.json, with BOS and EOS in the files beside it; null trains one",
    )
    vocab_size: int = setting(
        4096,
        "vocabulary size, including control symbols",
        ge=264,
        le=1_000_000,
    )
    pre_tokenizer: Literal["llama3", "gpt2"] = setting(
        "llama3",
        "regular expression that splits text into words; no token extends over two words",
    )
    split_digits: bool = setting(
        True,
        "each digit is its own token; false: up to 3 (llama3) or any number (gpt2)",
    )
    train_bytes: int = setting(
        16_000_000,
        "maximum training text of the tokenizer in bytes, sampled evenly",
        ge=1,
    )


class BytesSettings(StrictSettings):
    """One token per UTF-8 byte."""

    name: Literal["bytes"] = "bytes"


class SymbolsSettings(StrictSettings):
    """One token per symbol of the task in data.source."""

    name: Literal["symbols"] = "symbols"


TokenizerSettings = Annotated[
    SentencePieceSettings | HuggingFaceSettings | BytesSettings | SymbolsSettings,
    Field(discriminator="name"),
]
