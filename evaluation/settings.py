"""What an evaluation measures. Every field is a key of a YAML file and a dotted word on the command line."""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class ContaminationSettings(BaseModel):
    """Targets whose text stands in the training text too, or in an earlier document of the same corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: bool = Field(
        default=True, description="look for them (passages of 13 words, 30 Chinese characters) and drop them"
    )
    limit: float = Field(
        default=0.01, ge=0, le=1, description="where they are more than this share of the targets: an error"
    )


class MeasurementSettings(BaseModel):
    """What every kind of evaluation shares: rules, arithmetic, where results go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: str
    folder: str | None = Field(
        None,
        pattern=r"^\w[\w.+-]*$",
        description="name of the results folder under RUN/evaluation/; default: what is measured, and a hash",
    )
    rules: list[str] | dict[str, list[str]] = Field(
        ["trained", "truncate"],
        description="labels of configs/evaluation/rules.yaml, or label: [dotted words for the model]",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="level of the intervals, simultaneous for verdicts"
    )
    seed: int = Field(0, ge=0, description="draws what is measured: documents, spans, items, resamples")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="arithmetic of the model")
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1 ...")
    weights: Literal["ema", "last"] | None = Field(
        None, description="the run's mean of weights, or those of the last step; null: the mean if it has one"
    )
    chunk: int = Field(4096, ge=1, description="longer inputs are prefilled in chunks of this many tokens")
    memory: float | None = Field(
        None, gt=0, description="GiB the evaluation may use; default: 80% of what is free"
    )

    @field_validator("rules")
    @classmethod
    def _some_rule(cls, value):
        if not value:
            raise ValueError("rules is empty; the smallest useful list is [trained]")
        return value

    @field_validator("lengths", check_fields=False)
    @classmethod
    def _positive(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (not value or min(value) < 1):
            raise ValueError("lengths must be positive and at least one")
        return value

    def asked(self, but: set[str]) -> dict:
        """As JSON, without the keys `but` and what came later and is not given."""
        later = {"weights"} if self.weights is None else set()
        return self.model_dump(mode="json", exclude=but | later)

    def identity(self) -> str:
        """Short name of what is measured; where and how fast it is computed does not count."""
        asked = self.asked({"folder", "device", "batch", "memory"})
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]


class EvaluationSettings(MeasurementSettings):
    """Protocol, lengths, targets, rules and statistics of one evaluation."""

    protocol: Literal["fixed-targets", "sliding", "non-overlapping", "by-position"] = Field(
        "fixed-targets", description="how tokens are chosen and how much context they get"
    )
    lengths: list[int] | None = Field(
        None, description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4, 8, 16"
    )
    targets: int = Field(64, ge=1, description="target tokens per span (K); every length is at least K")
    documents: int = Field(200, ge=1, description="at most so many documents, by a seeded choice")
    spans_per_document: int = Field(16, ge=1, description="disjoint spans in each document")
    least_documents: int = Field(1, ge=1, description="fewer documents than this at a length is an error ...")
    shorten: bool = Field(False, description="... or, with shorten=true, drops the length and says so")
    unreachable: Literal["refuse", "dash"] = Field(
        "refuse", description="a length that no rule can place is an error, or stands as a dash"
    )
    stride: int | None = Field(None, ge=1, description="sliding: new targets per window; default: length / 8")
    windows_per_document: int = Field(4, ge=4, description="by-position: windows at random offsets")
    bos: Literal["as-trained", "none", "every-window"] = Field(
        "as-trained", description="where a BOS token stands: as stored, nowhere, or first in every window"
    )
    matrix: bool = Field(
        False, description="besides rules, every built-in rule that this checkpoint can take; as --matrix"
    )
    store: str | None = Field(
        None, description="folder of another prepared corpus (same tokenizer); default: the run's own"
    )
    split: Literal["valid", "train"] = Field("valid", description="which part of that corpus is read")
    contamination: ContaminationSettings = Field(
        ContaminationSettings(), description="text that was seen in training is no test"
    )
    tolerance: float = Field(
        0.02, gt=0, description="nats; a rule has held where it is surely less worse than this"
    )
    simultaneous: Literal["bonferroni", "max-t"] = Field(
        "bonferroni",
        description="how verdicts share that level; max-t: bootstrap of the largest t, narrower where "
        "rules move together, wider where documents are skewed",
    )
    resamples: int = Field(10_000, ge=10_000, description="studentised bootstrap resamples shown beside t")
    batch: int | None = Field(None, ge=1, description="windows at once; default: what the memory allows")

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationSettings":
        if self.protocol == "fixed-targets" and self.lengths and min(self.lengths) < self.targets:
            raise ValueError(
                f"length {min(self.lengths)} is shorter than a span of targets={self.targets} tokens"
            )
        return self

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, the trained length always among them."""
        lengths = self.lengths or [trained_length * 2**k for k in range(5)]
        return sorted({*lengths, trained_length})
