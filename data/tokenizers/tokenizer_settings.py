"""Settings of the tokenizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from settings.fields import StrictSettings


class SentencePieceSettings(StrictSettings):
    """Subwords by sentencepiece, trained on the training documents or read from a model file."""

    file: ClassVar[str] = "tokenizer.model"  # the name of a saved model
    name: Literal["sentencepiece"] = "sentencepiece"
    model: str | None = Field(default=None, description="an existing .model file; null trains one")
    kind: Literal["bpe", "unigram"] = Field(
        default="bpe", description="algorithm; unigram trains 20 times slower"
    )
    vocab_size: int = Field(
        default=4096, ge=264, le=1_000_000, description="vocabulary size, including control symbols"
    )
    byte_fallback: bool = Field(
        default=True, description="encode unknown characters as bytes, so that encoding is lossless"
    )
    split_digits: bool = Field(default=True, description="each digit is its own token")
    space_runs: bool = Field(
        default=True, description="allow tokens of several spaces (indentation of code)"
    )
    train_bytes: int = Field(
        default=16_000_000,
        ge=1,
        description="maximum training text of the tokenizer in bytes, sampled evenly",
    )
    character_coverage: float = Field(
        default=0.9995, gt=0.9, le=1.0, description="fraction of characters with their own token id"
    )


class HuggingFaceSettings(StrictSettings):
    """Byte-level BPE of the tokenizers library, trained on the training documents, or any
    tokenizer.json."""

    file: ClassVar[str] = "tokenizer.json"  # the name of a saved model
    name: Literal["huggingface"] = "huggingface"
    model: str | None = Field(
        default=None,
        description="an existing tokenizer.json, with BOS and EOS in the files beside it; null "
        "trains one",
    )
    vocab_size: int = Field(
        default=4096, ge=264, le=1_000_000, description="vocabulary size, including control symbols"
    )
    pre_tokenizer: Literal["llama3", "gpt2"] = Field(
        default="llama3",
        description="regular expression that splits text into words, across which no token extends",
    )
    split_digits: bool = Field(
        default=True,
        description="each digit is its own token; false: up to 3 (llama3) or any number (gpt2)",
    )
    train_bytes: int = Field(
        default=16_000_000,
        ge=1,
        description="maximum training text of the tokenizer in bytes, sampled evenly",
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
