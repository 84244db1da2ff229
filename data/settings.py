"""Every setting of the text, its tokenizer and its batches."""

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from data.tasks.settings import TaskSource
from data.text_settings import (
    FilesSource,
    FillerSource,
    HubSource,
    PreparedSource,
    Settings,
    StdlibSource,
)

SourceSettings = Annotated[
    StdlibSource | FillerSource | FilesSource | HubSource | PreparedSource | TaskSource,
    Field(discriminator="name"),
]


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


class PlainPositions(Settings):
    """Position is order, counted from 0 in every text."""

    fractional: ClassVar[bool] = False  # positions are whole numbers

    name: Literal["plain"] = "plain"

    def reach(self, length: int) -> int:
        """1 + the largest position, rounded up, that a text of `length` tokens can be given."""
        return length

    def check(self, length: int) -> None:
        """Raise ValueError where texts of `length` tokens cannot be placed."""


class OffsetPositions(PlainPositions):
    """SHAPE (Kiyono et al. 2021, arXiv:2109.05644): one random offset for all positions of a text.

    k ~ U{0 ... max_offset} for each text, and texts at 0 when evaluated. (The authors' code draws
    0 ... K−1 and evaluates at K.) Of no effect on schemes that know distances alone.
    """

    name: Literal["random_offset"] = "random_offset"
    max_offset: int = Field(500, ge=1, le=1_000_000, description="largest offset K")

    def reach(self, length: int) -> int:
        return length + self.max_offset


class SubsetPositions(PlainPositions):
    """Randomized positions (Ruoss et al. 2023, arXiv:2305.16843): a random ordered subset of a longer range.

    As many different numbers of 0 ... max_length−1 as a text has tokens, drawn without replacement, sorted.
    """

    name: Literal["random_subset"] = "random_subset"
    max_length: int = Field(
        2048, ge=2, le=1_000_000, description="end of the range; should exceed every length evaluated at"
    )
    per: Literal["row", "batch"] = Field(
        "row", description="a draw for every text, or one for all of a step, as in the authors' code"
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
    """CAPE (Likhomanenko et al. 2021, arXiv:2106.03143): positions shifted, jittered and scaled, as reals.

    (n + U(−global_shift, global_shift) + U_n(−local_shift, local_shift)) · exp(U(−ln scale, ln scale)); one
    shift and one scale for each text, one jitter for each token. Needs a scheme that takes real positions.
    """

    fractional: ClassVar[bool] = True

    name: Literal["cape"] = "cape"
    global_shift: float = Field(5.0, ge=0, le=1e6, description="largest shift of a whole text, in tokens")
    local_shift: float = Field(
        0.25, ge=0, lt=0.5, description="largest jitter of a token; below 1/2, so that order is kept"
    )
    scale: float = Field(1.03, ge=1, le=100, description="largest factor on positions; the least is 1/scale")
    centre: bool = Field(
        False,
        description="take the mean off first; for schemes of distances, as evaluated text begins at 0",
    )

    def reach(self, length: int) -> int:
        return 1 + math.ceil((length - 1 + self.global_shift + self.local_shift) * self.scale)


class PosePositions(PlainPositions):
    """PoSE (Zhu et al. 2023, arXiv:2309.10400): one leap in position, so that long distances are seen.

    A text of n tokens is cut after r ~ U{1 ... (n+1)//2} tokens; the second part is moved on by
    U{0 ... target−n}. The authors' code also leaves out text between the parts; here it stays contiguous.
    """

    name: Literal["pose"] = "pose"
    target: int = Field(2048, ge=2, le=1_000_000, description="length T whose positions are trained")

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


class MixedSettings(Settings):
    """A further text of a mixture: `source`, prepared with the tokenizer of data.source and without copies of
    its held-out text, or a folder prepared before."""

    share: float = Field(gt=0, lt=1, description="share of the training tokens, with four decimals at most")
    source: SourceSettings | None = Field(None, description="where the text comes from")
    prepared: str | None = Field(
        None, description="or a folder of scripts/prepare.py, made with the same tokenizer"
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
    group_bytes: int | None = Field(
        None,
        ge=1,
        description="prepare in groups of this much text, in bytes, and train from the first on while the "
        "others are prepared; null: all before training",
        json_schema_extra={"counts_if_given": True},
    )
    skip: int | None = Field(
        None,
        ge=0,
        description="documents of the source to pass over at its beginning",
        json_schema_extra={"counts_if_given": True},
    )
    bos: bool = Field(True, description="store a begin-of-document token before each document")
    eos: bool = Field(True, description="store an end-of-document token after each document")
    shard_bytes: int = Field(
        4 << 20, ge=256, description="text per shard, in bytes; doubles every 8 shards up to 16 times this"
    )
    mixture: list[MixedSettings] = Field(
        [],
        description="further texts to train on; data.source has the share they leave, and gives tokenizer "
        "and held-out text",
        json_schema_extra={"counts_if_given": True},
    )
    packing: Literal["running", "documents"] = Field(
        "running",
        description="running: a window is one text; documents: its documents do not see each other",
    )
    positions: PositionsSettings = Field(
        PlainPositions(),
        description="positions schemes see in training; evaluated and generated text counts from 0",
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
        """Exact shares of the texts of `mixture`."""
        return [Fraction(str(mixed.share)) for mixed in self.mixture]
