"""Every setting of the text, its tokenizer and its batches."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Paths = str | list[str]


class Settings(BaseModel):
    """Frozen after reading; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StdlibSource(Settings):
    """The Python files of the running interpreter's standard library: on every machine, no download."""

    name: Literal["stdlib"] = "stdlib"


class FilesSource(Settings):
    """Files of this machine. Record files (.jsonl, .json, .parquet; .gz and .zst too) give one document a
    record; every other file is one document, or several when `separator` is set."""

    name: Literal["files"] = "files"
    path: Paths = Field(description="a folder, a file, or a list of them")
    patterns: list[str] = Field(
        ["**/*.txt", "**/*.md", "**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst", "**/*.parquet"],
        description="glob patterns of the files taken inside folders",
    )
    exclude: list[str] = Field(
        [], description="glob patterns of files left out, against the path in its folder"
    )
    separator: str | None = Field(None, description="text between documents inside one plain text file")
    text_key: str = Field("text", description="key or column of the text in record files")
    name_key: str | None = Field(None, description="key or column naming a document in record files")
    cluster_key: str | None = Field(
        None, description="key or column of what groups documents (author, series), for intervals"
    )
    manifest: str | None = Field(
        None, description="jsonl file giving `cluster_key` for text files, matched by `file` = file name"
    )

    @model_validator(mode="after")
    def _manifest_needs_key(self):
        if self.manifest is not None and self.cluster_key is None:
            raise ValueError("manifest needs cluster_key: the key of the manifest that groups documents")
        return self


class HubSource(Settings):
    """A data set through `datasets.load_dataset`: the Hugging Face hub, or local files by format name."""

    name: Literal["hub"] = "hub"
    path: str = Field(description="data set on the hub (owner/name), or a format: parquet, json, text")
    subset: str | None = Field(None, description="configuration of the data set")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit or tag of the data set, for exact repetition")
    data_files: Paths | None = Field(None, description="files of the data set, or local files for a format")
    streaming: bool = Field(True, description="read over the network as needed instead of downloading first")
    text_key: str = Field("text", description="column of the text")
    name_key: str | None = Field(None, description="column naming a document")
    cluster_key: str | None = Field(None, description="column of what groups documents, for intervals")


SourceSettings = Annotated[StdlibSource | FilesSource | HubSource, Field(discriminator="name")]


class SentencePieceSettings(Settings):
    """Subwords by sentencepiece, trained on the training documents or read from a model file."""

    name: Literal["sentencepiece"] = "sentencepiece"
    model: str | None = Field(default=None, description="an existing .model file; null trains one")
    kind: Literal["bpe", "unigram"] = Field(
        default="bpe", description="algorithm; unigram trains 20 times slower"
    )
    vocab_size: int = Field(
        default=4096, ge=264, le=1_000_000, description="number of ids, control symbols included"
    )
    byte_fallback: bool = Field(
        default=True, description="spell unknown characters in bytes, so any text is lossless"
    )
    split_digits: bool = Field(default=True, description="each digit is its own token")
    space_runs: bool = Field(default=True, description="allow tokens of several spaces (indentation of code)")
    train_bytes: int = Field(
        default=16_000_000,
        ge=1,
        description="most text, in bytes, the tokenizer is trained on; sampled evenly",
    )
    character_coverage: float = Field(
        default=0.9995, gt=0.9, le=1.0, description="share of characters that get an id of their own"
    )


class BytesSettings(Settings):
    """One token per UTF-8 byte: no training, no file."""

    name: Literal["bytes"] = "bytes"


TokenizerSettings = Annotated[SentencePieceSettings | BytesSettings, Field(discriminator="name")]


class DataSettings(Settings):
    """From text to batches."""

    source: SourceSettings = Field(StdlibSource(), description="where the text comes from")
    valid_source: SourceSettings | None = Field(
        None, description="separate validation text; null holds out `valid_fraction` of the source"
    )
    tokenizer: TokenizerSettings = Field(SentencePieceSettings(), description="how text becomes tokens")
    valid_fraction: float = Field(
        0.05, ge=0, le=1, description="share of documents held out for validation (1: all, 0: none)"
    )
    valid_seed: int = Field(0, ge=0, description="seed of the choice of validation documents")
    duplicate_threshold: float = Field(
        0.5,
        gt=0,
        description="shared shingles above which a document counts as a copy of validation text; > 1: off",
    )
    max_bytes: int | None = Field(
        None, ge=1, description="stop reading the source after this much text, in bytes"
    )
    bos: bool = Field(True, description="store a begin-of-document token before each document")
    eos: bool = Field(True, description="store an end-of-document token after each document")
    shard_bytes: int = Field(
        4 << 20, ge=256, description="text per shard, in bytes; doubles every 8 shards up to 16 times this"
    )
    packing: Literal["running", "documents"] = Field(
        "running",
        description="running: a window is one text; documents: its documents do not see each other",
    )
    label: str | None = Field(
        None, description="first part of the prepared folder's name", json_schema_extra={"may_change": True}
    )
    root: str = Field(
        "prepared", description="folder of prepared data", json_schema_extra={"may_change": True}
    )
