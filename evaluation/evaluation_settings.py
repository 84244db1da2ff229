"""Settings of an evaluation. Every field is a key of a YAML file and an override on the command
line."""

import json
from typing import ClassVar, Literal

from pydantic import field_validator, model_validator

from data.files import sha256_of
from settings.fields import RemovedSetting, StrictSettings, setting


class ContaminationSettings(StrictSettings):
    """Passages that also occur in the training text, or in an earlier document of the same
    corpus."""

    check: bool = setting(
        True, "exclude repeated passages of 13 words (30 Chinese characters) from the targets"
    )


class MeasurementSettings(StrictSettings):
    """Settings shared by every kind of evaluation: methods, dtype, results folder."""

    protocol: str
    folder: str | None = setting(
        None,
        "name of the results folder under RUN/evaluation/; default: protocol or task, and a hash",
        pattern=r"^\w[\w.+-]*$",
    )
    methods: list[str] | dict[str, list[str]] = setting(
        ["trained", "truncate"],
        "labels of configs/evaluation/methods.yaml, or label: [overrides of the model]",
    )
    confidence: float = setting(
        0.95, "level of the intervals, simultaneous for verdicts", gt=0.5, lt=1
    )
    seed: int = setting(0, "seed for documents, spans and items", ge=0)
    dtype: Literal["float32", "float64", "bfloat16"] = setting("float32", "dtype of the model")
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    weights: Literal["ema", "last"] | None = setting(
        None, "the EMA of the weights, or those of the last step; null: the EMA if the run has one"
    )
    chunk: int = setting(4096, "longer inputs are prefilled in chunks of this many tokens", ge=1)
    memory: float | None = setting(
        None, "memory limit of the evaluation in GiB; default: 80% of the free memory", gt=0
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
        return sha256_of(json.dumps(asked, sort_keys=True))[:8]


class TextSettings(MeasurementSettings):
    """Settings shared by the evaluations of text."""

    store: str | None = setting(
        None, "folder of another prepared corpus (same tokenizer); default: the run's own"
    )
    split: Literal["valid", "train"] = setting("valid", "split of that corpus")
    bos: Literal["as-trained", "none", "every-window"] = setting(
        "as-trained", "position of BOS: as stored, nowhere, or first in every window"
    )
    least_documents: int = setting(1, "fewer long enough documents than this are an error", ge=1)


class TargetSettings(TextSettings):
    """Settings of fixed targets."""

    lengths: list[int] | None = setting(
        None, "input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4, 8, 16"
    )
    targets: int = setting(
        64,
        "target tokens per span (K), or queries per window of attention; no length is below it",
        ge=1,
    )
    documents: int = setting(200, "maximum number of documents, chosen by seed", ge=1)
    spans_per_document: int = setting(4, "disjoint spans in each document", ge=1)
    shorten: bool = setting(False, "drop lengths that too few documents reach, with a warning")

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, including the trained length."""
        lengths = self.lengths or [trained_length * 2**k for k in range(5)]
        return sorted({*lengths, trained_length})


class EvaluationSettings(TargetSettings):
    """Protocol, lengths, targets, methods and statistics of one evaluation."""

    removed: ClassVar[dict[str, RemovedSetting]] = {
        "simultaneous": RemovedSetting("bonferroni", "simultaneous intervals are by Bonferroni"),
        "resamples": RemovedSetting(10_000, "intervals are by Student's t alone"),
        "exposure": RemovedSetting(False, "positions of training are not counted"),
        "minutes": RemovedSetting(None, "all documents are scored: set documents to score fewer"),
    }

    protocol: Literal["fixed-targets", "sliding", "non-overlapping", "by-position"] = setting(
        "fixed-targets", "which tokens are scored, and with how much context"
    )
    targets_by: Literal["repetition"] | None = setting(
        None,
        "fixed-targets: repetition also scores tokens that repeat earlier text of "
        "their document, by distance, with and without that text",
    )
    ngram: int = setting(
        8, "targets_by=repetition: tokens before a target that occurred before", ge=1
    )
    unreachable: Literal["refuse", "dash"] = setting(
        "refuse", "a length that no method supports is an error, or a dash in the table"
    )
    stride: int | None = setting(None, "sliding: new targets per window; default: length / 8", ge=1)
    windows_per_document: int = setting(4, "by-position: windows at random offsets", ge=4)
    matrix: bool = setting(
        False, "add every built-in method that applies to this checkpoint; same as --matrix"
    )
    contamination: ContaminationSettings = setting(
        ContaminationSettings(), "exclusion of text that was seen in training"
    )
    tolerance: float = setting(
        0.02, "a method holds if the upper bound of its loss increase in nats is below this", gt=0
    )
    batch: int | None = setting(None, "windows per batch; default: as the memory allows", ge=1)
    context: int = setting(
        1,
        "processes that share each window: each reads 1/N of its tokens, for lengths "
        "that do not fit into the memory of one process; requires a launcher",
        ge=1,
    )

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationSettings":
        if self.targets_by is not None and self.protocol != "fixed-targets":
            raise ValueError("targets_by requires protocol=fixed-targets")
        return self

    def step(self, length: int) -> int:
        """sliding: new targets per window."""
        return self.stride or max(1, length // 8)
