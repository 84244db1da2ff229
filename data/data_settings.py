"""Settings of the text, the tokenizer and the batches."""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from data.sampling.position_samplers import PlainPositions, PositionsSettings
from data.tasks import CoupledTask, SymbolTaskSettings, TextTaskSettings
from data.tasks.retrieval import PasskeyTask
from data.tasks.strings import CopyTask
from data.text_settings import StdlibSource, TextSource
from data.tokenizers.tokenizer_settings import (
    SentencePieceSettings,
    SymbolsSettings,
    TokenizerSettings,
)
from settings.fields import StrictSettings, counts_if_changed, may_change, setting


def ascending(lengths: int | tuple[int, int]) -> int | tuple[int, int]:
    if not isinstance(lengths, int) and lengths[0] > lengths[1]:
        raise ValueError(f"[minimum, maximum] must be ascending, not {list(lengths)}")
    return lengths


Lengths = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], AfterValidator(ascending)]


def bounds_of(lengths: int | tuple[int, int]) -> tuple[int, int]:
    """The shortest and the longest length; equal if `lengths` is one number."""
    return (lengths, lengths) if isinstance(lengths, int) else lengths


class TaskSource(StrictSettings):
    """Items of a task in text, one per document; data.mixture mixes them with other text.
    Evaluation uses other items and other haystack documents, whatever the seed."""

    name: Literal["task"] = "task"
    task: TextTaskSettings = setting(PasskeyTask(), "task")
    items: PositiveInt = setting(20_000, "number of items")
    length: Lengths = setting(
        254,
        "bytes per item, thus at most as many tokens without BOS and EOS; or "
        "[minimum, maximum], drawn uniformly",
    )
    seed: int = setting(0, "seed of the items", ge=0)

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum length."""
        return bounds_of(self.length)


class SymbolSource(StrictSettings):
    """Items of a task on symbols, generated during training: each window is one item, padded at its
    end. Evaluation uses other items."""

    name: Literal["symbols"] = "symbols"
    task: SymbolTaskSettings = setting(CopyTask(), "task")
    lengths: Lengths = setting(
        (1, 20),
        "length of the problems, as the task counts it; or [minimum, maximum], drawn uniformly",
    )
    loss: Literal["answers", "all"] = setting(
        "answers",
        "training targets: the symbols of the answers, or all symbols of an item",
    )

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum length."""
        return bounds_of(self.lengths)

    def inputs(self, bos: bool) -> int:
        """Number of inputs of the longest item."""
        return self.task.size(self.bounds[1]) + bos - 1


SourceSettings = Annotated[TextSource | TaskSource, Field(discriminator="name")]
AnySource = Annotated[TextSource | TaskSource | SymbolSource, Field(discriminator="name")]


class MixtureEntry(StrictSettings):
    """An additional text of a mixture, prepared with the tokenizer of data.source and without
    copies of its validation text."""

    share: float = Field(
        gt=0,
        lt=1,
        description="fraction of the training tokens, at most four decimals",
    )
    source: SourceSettings = Field(description="source of the text")
    max_bytes: int | None = setting(
        None,
        "stop reading the source after this much text, in bytes",
        ge=1,
    )

    @field_validator("share")
    @classmethod
    def _exact(cls, share: float) -> float:
        if Fraction(str(share)) % Fraction(1, 10_000):
            raise ValueError(f"share={share} has more than four decimals")
        return share


class DataSettings(StrictSettings):
    """Text, tokenizer and batches."""

    source: AnySource = setting(StdlibSource(), "source of the text")
    valid_source: SourceSettings | None = setting(
        None,
        "separate validation text; null: hold out `valid_fraction` of the source",
    )
    tokenizer: TokenizerSettings = setting(SentencePieceSettings(), "tokenizer")
    valid_fraction: float = setting(
        0.05,
        "fraction of documents held out for validation (1: all, 0: none); at least 6 "
        "if the source has 18",
        ge=0,
        le=1,
    )
    valid_seed: int = setting(0, "seed of the validation split", ge=0)
    duplicate_threshold: float = setting(
        0.5,
        "shared shingle fraction above which a document is a copy of validation text; > 1: off",
        gt=0,
    )
    max_bytes: int | None = setting(
        None,
        "stop reading the source after this much text, in bytes",
        ge=1,
    )
    bos: bool = setting(True, "store a begin-of-document token before each document")
    eos: bool = setting(True, "store an end-of-document token after each document")
    shard_bytes: int = setting(
        4 << 20,
        "text per shard, in bytes; doubles every 8 shards up to 16 times this",
        ge=256,
    )
    mixture: list[MixtureEntry] = counts_if_changed(
        "additional training texts; data.source has the remaining share and provides "
        "tokenizer and validation text",
        [],
    )
    packing: Literal["concat", "intra_document"] = setting(
        "concat",
        "concat: attention across documents; intra_document: attention within documents only",
    )
    positions: PositionsSettings = setting(
        PlainPositions(),
        "positions in training; evaluation and generation count from 0",
    )
    label: str | None = may_change(None, "first part of the prepared folder's name")
    root: str = may_change("prepared", "folder of prepared data")

    @property
    def is_generated(self) -> bool:
        """Whether the data are task items on symbols instead of text."""
        return isinstance(self.source, SymbolSource)

    @property
    def text_source(self) -> TextSource | TaskSource:
        """`source`, which must be text instead of a task on symbols."""
        assert not isinstance(self.source, SymbolSource)
        return self.source

    @property
    def symbol_source(self) -> SymbolSource:
        """`source`, which must be a task on symbols."""
        assert isinstance(self.source, SymbolSource)
        return self.source

    @property
    def coupled_task(self) -> CoupledTask | None:
        """The task, if it sets the positions of its items; None if positions are plain."""
        task = self.symbol_source.task if self.is_generated else None
        return task if isinstance(task, CoupledTask) and task.has_positions else None

    @property
    def gives_positions(self) -> bool:
        """Whether a task sets the positions of its items."""
        return self.coupled_task is not None

    def position_end(self, length: int) -> int:
        """1 + the largest possible position, rounded up, in texts of `length` tokens."""
        if (task := self.coupled_task) is not None:
            return task.position_end(self.symbol_source.bounds[1], training=True)
        return self.positions.position_end(length)

    def check(self, length: int) -> None:
        """Raise ValueError if windows of `length` tokens do not fit the positions or the items."""
        self.positions.check(length)
        if isinstance(self.source, SymbolSource):
            self.source.task.check(self.source.bounds)
            needed = self.source.inputs(self.bos)
            if needed != length:
                raise ValueError(
                    f"train_length = {length}, but the longest item of data.source has {needed} "
                    f"inputs: set train_length to {needed}"
                )

    @model_validator(mode="after")
    def _symbols_alone(self):
        if self.is_generated != isinstance(self.tokenizer, SymbolsSettings):
            raise ValueError(
                "data.source.name=symbols and data.tokenizer.name=symbols require each other"
            )
        if self.is_generated and (self.mixture or self.valid_source is not None):
            raise ValueError("data.source.name=symbols excludes data.mixture and data.valid_source")
        task = self.coupled_task
        if task is not None and self.positions.name != "plain":
            raise ValueError(
                f"data.positions.name={self.positions.name} would replace the positions of "
                f"data.source.task.positions={task.positions}; set one of them to plain"
            )
        return self

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
