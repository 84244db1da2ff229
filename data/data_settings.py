"""Settings of the text, the tokenizer and the batches."""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from data.sampling.random_positions import PlainPositions, PositionsSettings
from data.tasks import TaskSettings
from data.tasks.retrieval import PasskeyTask
from data.text_settings import StdlibSource, TextSettings, TextSource
from data.tokenizers.tokenizer_settings import SentencePieceSettings, TokenizerSettings
from settings.fields import StrictSettings


class TaskSource(StrictSettings):
    """Items of a task, one per document; alone or mixed into the documents of a text. Evaluation
    uses other items and other haystack documents, whatever the seed."""

    name: Literal["task"] = "task"
    task: TaskSettings = Field(default=PasskeyTask(), description="task")
    items: PositiveInt | None = Field(
        None,
        description="number of items; null: 20,000, or with `text` the number that `share` "
        "requires",
    )
    length: PositiveInt | tuple[PositiveInt, PositiveInt] = Field(
        254,
        description="bytes per item, thus at most as many tokens without BOS and EOS; or "
        "[minimum, maximum], drawn uniformly",
    )
    pad: bool = Field(
        False,
        description="pad items with newlines to the maximum length: with bytes, length = "
        "train_length - 2 and packing=intra_document, every window is one whole item",
    )
    seed: int = Field(0, ge=0, description="seed of the items")
    text: TextSettings | None = Field(
        None, description="text that the items are mixed into; null: items alone"
    )
    share: float = Field(
        0.1, gt=0, lt=1, description="with `text`: fraction of all bytes that are items"
    )

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum length."""
        return (self.length, self.length) if isinstance(self.length, int) else self.length

    @model_validator(mode="after")
    def _consistent(self):
        if self.bounds[0] > self.bounds[1]:
            raise ValueError(
                f"length=[minimum, maximum] must be ascending, not {list(self.bounds)}"
            )
        if self.text is not None and self.items is not None:
            raise ValueError(
                "items and text exclude each other; with text, set share instead of items"
            )
        return self


SourceSettings = Annotated[TextSource | TaskSource, Field(discriminator="name")]


class MixtureEntry(StrictSettings):
    """An additional text of a mixture: `source`, prepared with the tokenizer of data.source and
    without copies of its validation text, or an existing prepared folder."""

    share: float = Field(
        gt=0, lt=1, description="fraction of the training tokens, at most four decimals"
    )
    source: SourceSettings | None = Field(None, description="source of the text")
    prepared: str | None = Field(
        None, description="or a folder prepared by scripts/prepare.py with the same tokenizer"
    )
    max_bytes: int | None = Field(
        None, ge=1, description="stop reading the source after this much text, in bytes"
    )

    @model_validator(mode="after")
    def _one_text(self):
        if (self.source is None) == (self.prepared is None):
            raise ValueError("a text of data.mixture requires either source or prepared")
        if self.prepared is not None and self.max_bytes is not None:
            raise ValueError("max_bytes requires source; a prepared folder is used whole")
        if Fraction(str(self.share)) % Fraction(1, 10_000):
            raise ValueError(f"share={self.share} has more than four decimals")
        return self


class DataSettings(StrictSettings):
    """Text, tokenizer and batches."""

    source: SourceSettings = Field(StdlibSource(), description="source of the text")
    valid_source: SourceSettings | None = Field(
        None, description="separate validation text; null: hold out `valid_fraction` of the source"
    )
    tokenizer: TokenizerSettings = Field(SentencePieceSettings(), description="tokenizer")
    valid_fraction: float = Field(
        0.05,
        ge=0,
        le=1,
        description="fraction of documents held out for validation (1: all, 0: none); at least 6 "
        "if the source has 18",
    )
    valid_seed: int = Field(0, ge=0, description="seed of the validation split")
    duplicate_threshold: float = Field(
        0.5,
        gt=0,
        description="shared shingle fraction above which a document is a copy of validation text; "
        "> 1: off",
    )
    max_bytes: int | None = Field(
        None, ge=1, description="stop reading the source after this much text, in bytes"
    )
    bos: bool = Field(True, description="store a begin-of-document token before each document")
    eos: bool = Field(True, description="store an end-of-document token after each document")
    shard_bytes: int = Field(
        4 << 20,
        ge=256,
        description="text per shard, in bytes; doubles every 8 shards up to 16 times this",
    )
    mixture: list[MixtureEntry] = Field(
        [],
        description="additional training texts; data.source has the remaining share and provides "
        "tokenizer and validation text",
        json_schema_extra={"counts_if_changed": True},
    )
    packing: Literal["concat", "intra_document"] = Field(
        "concat",
        description="concat: attention across documents; intra_document: attention within "
        "documents only",
    )
    positions: PositionsSettings = Field(
        PlainPositions(),
        description="positions in training; evaluation and generation count from 0",
    )
    label: str | None = Field(
        None,
        description="first part of the prepared folder's name",
        json_schema_extra={"may_change": True},
    )
    root: str = Field(
        "prepared", description="folder of prepared data", json_schema_extra={"may_change": True}
    )

    @model_validator(mode="after")
    def _consistent(self):
        if (taken := sum(self.mixed_shares)) >= 1:
            raise ValueError(
                f"the shares of data.mixture sum to {float(taken):g}; the sum must be below 1"
            )
        return self

    @property
    def mixed_shares(self) -> list[Fraction]:
        """Exact fractions of the texts in `mixture`."""
        return [Fraction(str(mixed.share)) for mixed in self.mixture]
