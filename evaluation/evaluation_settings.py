"""Settings of an evaluation. Every field is a key of a YAML file and an override on the command
line."""

import hashlib
import json
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from settings.fields import RemovedSetting, StrictSettings


class ContaminationSettings(StrictSettings):
    """Passages that also occur in the training text, or in an earlier document of the same
    corpus."""

    check: bool = Field(
        default=True,
        description="exclude repeated passages of 13 words (30 Chinese characters) from the "
        "targets",
    )


class MeasurementSettings(StrictSettings):
    """Settings shared by every kind of evaluation: methods, dtype, results folder."""

    protocol: str
    folder: str | None = Field(
        None,
        pattern=r"^\w[\w.+-]*$",
        description="name of the results folder under RUN/evaluation/; default: protocol or task, "
        "and a hash",
    )
    methods: list[str] | dict[str, list[str]] = Field(
        ["trained", "truncate"],
        description="labels of configs/evaluation/methods.yaml, or label: [overrides of the model]",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="level of the intervals, simultaneous for verdicts"
    )
    seed: int = Field(
        0,
        ge=0,
        description="seed for documents, spans and items",
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32", description="dtype of the model"
    )
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    weights: Literal["ema", "last"] | None = Field(
        None,
        description="the EMA of the weights, or those of the last step; null: the EMA if the run "
        "has one",
    )
    chunk: int = Field(
        4096, ge=1, description="longer inputs are prefilled in chunks of this many tokens"
    )
    memory: float | None = Field(
        None,
        gt=0,
        description="memory limit of the evaluation in GiB; default: 80% of the free memory",
    )

    @field_validator("methods")
    @classmethod
    def _some_method(cls, value):
        if not value:
            raise ValueError("methods is empty; the smallest useful list is [trained]")
        return value

    @field_validator("lengths", check_fields=False)
    @classmethod
    def _positive(cls, value: list | None) -> list | None:
        whole = [one for one in value or [1] if isinstance(one, int)]  # pairs are checked by type
        if value == [] or min(whole, default=1) < 1:
            raise ValueError("lengths must be positive and at least one")
        return value

    def asked(self, but: set[str]) -> dict:
        """As JSON, without the keys `but`. Equal settings are equal in all versions: keys added
        later are included only if they are set, and removed ones have their default."""
        later = {
            key
            for key in ("weights", "targets_by", "ngram", "positions")
            if key in type(self).model_fields
            and getattr(self, key) == type(self).model_fields[key].default
        }
        removed = {key: old.default for key, old in self.removed.items() if key not in but}
        return self.model_dump(mode="json", exclude=but | later) | removed

    def identity(self) -> str:
        """Hash of the settings that determine the numbers; those of the machine and of the report
        do not count."""
        machine = {"device", "batch", "context", "memory", "minutes"}
        asked = self.asked({*machine, "folder", "exposure"})
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]


class TextSettings(MeasurementSettings):
    """Settings shared by the evaluations of text."""

    store: str | None = Field(
        None,
        description="folder of another prepared corpus (same tokenizer); default: the run's own",
    )
    split: Literal["valid", "train"] = Field("valid", description="split of that corpus")
    bos: Literal["as-trained", "none", "every-window"] = Field(
        "as-trained", description="position of BOS: as stored, nowhere, or first in every window"
    )
    least_documents: int = Field(
        1, ge=1, description="fewer long enough documents than this are an error"
    )


class TargetSettings(TextSettings):
    """Settings of fixed targets."""

    lengths: list[int] | None = Field(
        None,
        description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4, "
        "8, 16",
    )
    targets: int = Field(
        64,
        ge=1,
        description="target tokens per span (K), or queries per window of attention; no length is "
        "below it",
    )
    documents: int = Field(
        200,
        ge=1,
        description="maximum number of documents, chosen by seed",
    )
    spans_per_document: int = Field(
        4,
        ge=1,
        description="disjoint spans in each document",
    )
    shorten: bool = Field(
        False, description="drop lengths that too few documents reach, with a warning"
    )

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, including the trained length."""
        lengths = self.lengths or [trained_length * 2**k for k in range(5)]
        return sorted({*lengths, trained_length})


class EvaluationSettings(TargetSettings):
    """Protocol, lengths, targets, methods and statistics of one evaluation."""

    removed: ClassVar[dict[str, RemovedSetting]] = {
        "simultaneous": RemovedSetting("bonferroni", "simultaneous intervals are by Bonferroni"),
        "resamples": RemovedSetting(10_000, "intervals are by Student's t alone"),
        "minutes": RemovedSetting(None, "all documents are scored: set documents to score fewer"),
    }

    protocol: Literal["fixed-targets", "sliding", "non-overlapping", "by-position"] = Field(
        "fixed-targets", description="which tokens are scored, and with how much context"
    )
    targets_by: Literal["repetition"] | None = Field(
        None,
        description="fixed-targets: repetition also scores tokens that repeat earlier text of "
        "their document, by distance, with and without that text",
    )
    ngram: int = Field(
        8, ge=1, description="targets_by=repetition: tokens before a target that occurred before"
    )
    unreachable: Literal["refuse", "dash"] = Field(
        "refuse",
        description="a length that no method supports is an error, or a dash in the table",
    )
    stride: int | None = Field(
        None, ge=1, description="sliding: new targets per window; default: length / 8"
    )
    windows_per_document: int = Field(
        4,
        ge=4,
        description="by-position: windows at random offsets",
    )
    matrix: bool = Field(
        False,
        description="add every built-in method that applies to this checkpoint; same as --matrix",
    )
    contamination: ContaminationSettings = Field(
        ContaminationSettings(), description="exclusion of text that was seen in training"
    )
    tolerance: float = Field(
        0.02,
        gt=0,
        description="a method holds if the upper bound of its loss increase in nats is below this",
    )
    exposure: bool = Field(
        False, description="add a panel to the figure: how often training used each position"
    )
    batch: int | None = Field(
        None, ge=1, description="windows per batch; default: as the memory allows"
    )
    context: int = Field(
        1,
        ge=1,
        description="processes that share each window: each reads 1/N of its tokens, for lengths "
        "that do not fit into the memory of one process; requires a launcher",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationSettings":
        if self.targets_by is not None and self.protocol != "fixed-targets":
            raise ValueError("targets_by requires protocol=fixed-targets")
        return self

    def step(self, length: int) -> int:
        """sliding: new targets per window."""
        return self.stride or max(1, length // 8)
