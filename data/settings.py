"""Settings of the text, the tokenizer and the batches."""

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from data.tasks.settings import TaskSource
from data.text_settings import (
    DataModel,
    FilesSource,
    FillerSource,
    HubSource,
    PreparedSource,
    StdlibSource,
)

SourceSettings = Annotated[
    StdlibSource | FillerSource | FilesSource | HubSource | PreparedSource | TaskSource,
    Field(discriminator="name"),
]


class SentencePieceSettings(DataModel):
    """Subwords by sentencepiece, trained on the training documents or read from a model file."""

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
    space_runs: bool = Field(default=True, description="allow tokens of several spaces (indentation of code)")
    train_bytes: int = Field(
        default=16_000_000,
        ge=1,
        description="maximum training text of the tokenizer in bytes, sampled evenly",
    )
    character_coverage: float = Field(
        default=0.9995, gt=0.9, le=1.0, description="fraction of characters with their own token id"
    )


class BytesSettings(DataModel):
    """One token per UTF-8 byte."""

    name: Literal["bytes"] = "bytes"


TokenizerSettings = Annotated[SentencePieceSettings | BytesSettings, Field(discriminator="name")]


class PlainPositions(DataModel):
    """Positions count from 0 in each text."""

    fractional: ClassVar[bool] = False  # whether positions are real-valued

    name: Literal["plain"] = "plain"

    def reach(self, length: int) -> int:
        """1 + the largest possible position, rounded up, in texts of `length` tokens."""
        return length

    def check(self, length: int) -> None:
        """Raise ValueError if texts of `length` tokens do not fit."""


class OffsetPositions(PlainPositions):
    """SHAPE (Kiyono et al. 2021, arXiv:2109.05644): one random offset for all positions of a text.

    k ~ U{0 ... max_offset} per text, and offset 0 in evaluation. (The authors' code draws 0 ... K−1 and
    evaluates at K.) No effect on schemes that depend on distances only.
    """

    name: Literal["random_offset"] = "random_offset"
    max_offset: int = Field(500, ge=1, le=1_000_000, description="largest offset K")

    def reach(self, length: int) -> int:
        return length + self.max_offset


class SubsetPositions(PlainPositions):
    """Randomized positions (Ruoss et al. 2023, arXiv:2305.16843): a random ordered subset of a longer range.

    The positions of a text are drawn from 0 ... max_length−1 without replacement, and sorted.
    """

    name: Literal["random_subset"] = "random_subset"
    max_length: int = Field(
        2048, ge=2, le=1_000_000, description="end of the range; should exceed all evaluated lengths"
    )
    per: Literal["row", "batch"] = Field(
        "row", description="one draw per text, or one per batch as in the authors' code"
    )

    def reach(self, length: int) -> int:
        return self.max_length

    def check(self, length: int) -> None:
        if self.max_length < length:
            raise ValueError(
                f"data.positions.max_length = {self.max_length} leaves no {length} different positions for "
                f"the train_length = {length} tokens of a window: raise it to {length} at least"
            )


class CapePositions(PlainPositions):
    """CAPE (Likhomanenko et al. 2021, arXiv:2106.03143): shifted, jittered and scaled real positions.

    (n + U(−global_shift, global_shift) + U_n(−local_shift, local_shift)) · exp(U(−ln scale, ln scale)); one
    shift and scale per text, one jitter per token. Requires a scheme that supports real-valued positions.
    """

    fractional: ClassVar[bool] = True

    name: Literal["cape"] = "cape"
    global_shift: float = Field(5.0, ge=0, le=1e6, description="maximum shift of a text in tokens")
    local_shift: float = Field(
        0.25, ge=0, lt=0.5, description="maximum jitter of a token; below 1/2, which preserves the order"
    )
    scale: float = Field(
        1.03, ge=1, le=100, description="maximum factor on positions; the minimum is 1/scale"
    )
    centre: bool = Field(
        False,
        description="subtract the mean first; for schemes that depend on distances only",
    )

    def reach(self, length: int) -> int:
        return 1 + math.ceil((length - 1 + self.global_shift + self.local_shift) * self.scale)


class PosePositions(PlainPositions):
    """PoSE (Zhu et al. 2023, arXiv:2309.10400): one skip in positions, so that long distances occur in
    training.

    A text of n tokens is cut after r ~ U{1 ... (n+1)//2} tokens; positions of the second part are
    shifted by U{0 ... target−n}. The authors' code also skips text between the parts; here it is contiguous.
    """

    name: Literal["pose"] = "pose"
    target: int = Field(2048, ge=2, le=1_000_000, description="target length T")

    def reach(self, length: int) -> int:
        return self.target

    def check(self, length: int) -> None:
        if self.target < length:
            raise ValueError(
                f"data.positions.target = {self.target} is shorter than train_length = {length}: raise it, "
                "to the length the model is to reach"
            )


PositionsSettings = Annotated[
    PlainPositions | OffsetPositions | SubsetPositions | CapePositions | PosePositions,
    Field(discriminator="name"),
]


class MixtureEntry(DataModel):
    """An additional text of a mixture: `source`, prepared with the tokenizer of data.source and without
    copies of its validation text, or an existing prepared folder."""

    share: float = Field(gt=0, lt=1, description="fraction of the training tokens, at most four decimals")
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
            raise ValueError("a text of data.mixture has either a source or a prepared folder")
        if self.prepared is not None and self.max_bytes is not None:
            raise ValueError("max_bytes is of a source; a prepared folder is taken as it is")
        if Fraction(str(self.share)) % Fraction(1, 10_000):
            raise ValueError(f"share {self.share} has more than four decimals: shares are kept to exactly")
        return self


class DataSettings(DataModel):
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
        description="fraction of documents held out for validation (1: all, 0: none); at least 6 if "
        "the source has 18",
    )
    valid_seed: int = Field(0, ge=0, description="seed of the validation split")
    duplicate_threshold: float = Field(
        0.5,
        gt=0,
        description="shared shingle fraction above which a document is a copy of validation text; > 1: off",
    )
    max_bytes: int | None = Field(
        None, ge=1, description="stop reading the source after this much text, in bytes"
    )
    group_bytes: int | None = Field(
        None,
        ge=1,
        description="prepare in groups of this many bytes and start training when the first is ready; "
        "null: prepare all text before training",
        json_schema_extra={"counts_if_given": True},
    )
    skip: int | None = Field(
        None,
        ge=0,
        description="number of documents to skip at the start of the source",
        json_schema_extra={"counts_if_given": True},
    )
    bos: bool = Field(True, description="store a begin-of-document token before each document")
    eos: bool = Field(True, description="store an end-of-document token after each document")
    shard_bytes: int = Field(
        4 << 20, ge=256, description="text per shard, in bytes; doubles every 8 shards up to 16 times this"
    )
    mixture: list[MixtureEntry] = Field(
        [],
        description="additional training texts; data.source has the remaining share and provides tokenizer "
        "and validation text",
        json_schema_extra={"counts_if_given": True},
    )
    packing: Literal["concat", "intra_document"] = Field(
        "concat",
        description="concat: attention across documents; intra_document: attention within documents only",
    )
    positions: PositionsSettings = Field(
        PlainPositions(),
        description="positions in training; evaluation and generation count from 0",
    )
    label: str | None = Field(
        None, description="first part of the prepared folder's name", json_schema_extra={"may_change": True}
    )
    root: str = Field(
        "prepared", description="folder of prepared data", json_schema_extra={"may_change": True}
    )

    @model_validator(mode="after")
    def _shares_leave_some(self):
        if self.mixture and self.group_bytes is not None:
            raise ValueError(
                "data.group_bytes and data.mixture are not served together: leave out one of them"
            )
        if (taken := sum(self.mixed_shares)) >= 1:
            raise ValueError(
                f"the shares of data.mixture make {float(taken):g}: they must leave data.source some"
            )
        return self

    @property
    def mixed_shares(self) -> list[Fraction]:
        """Exact fractions of the texts in `mixture`."""
        return [Fraction(str(mixed.share)) for mixed in self.mixture]
