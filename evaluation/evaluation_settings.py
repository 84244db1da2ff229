"""Settings of each kind of evaluation; `protocol` selects the class. Every field is a key of a YAML
file and an override on the command line."""

import json
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

from pydantic import NonNegativeFloat, field_validator, model_validator

from data.data_settings import Lengths, bounds_of
from data.files import sha256_of
from data.tasks import TaskSettings
from errors import EvaluationError
from settings.fields import RemovedSetting, StrictSettings, setting
from settings.load import setting_before_validation

HALF = ("bfloat16", "float16")  # dtypes whose losses are compared with float32 losses


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
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = setting(
        "float32", "dtype of the model"
    )
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    weights: Literal["ema", "last"] | None = setting(
        None, "the EMA of the weights, or the last weights; null: the EMA if the run has one"
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
        numbers = [tokens_of(one, 1) for one in value or [1] if isinstance(one, (int, str))]
        if value == [] or min(numbers, default=1) < 1:
            raise ValueError("lengths must be positive and at least one")
        return value

    def identity(self) -> str:
        """Hash of the settings that determine the numbers, without settings of the machine and of
        the report. Equal settings have equal hashes in all versions: keys added later are included
        only if they are set, and removed keys have their default."""
        left_out = {"device", "batch", "context", "memory", "minutes", "folder", "exposure"}
        removed = {key: old.default for key, old in self.removed.items() if key not in left_out}
        for key in ("weights", "targets_by", "ngram", "positions"):
            field = type(self).model_fields.get(key)
            if field is not None and getattr(self, key) == field.default:
                left_out.add(key)
        asked = self.model_dump(mode="json", exclude=left_out) | removed
        return sha256_of(json.dumps(asked, sort_keys=True))[:8]


def tokens_of(length: int | str, trained_length: int) -> int:
    """The tokens of a length such as 512 or 4x, a multiple of the trained length. Raises ValueError
    for other text."""
    if isinstance(length, int):
        return length
    multiple = length.removesuffix("x")
    if multiple == length or not multiple.isdecimal():
        raise ValueError(f"{length} is neither a number of tokens nor a multiple such as 4x")
    return int(multiple) * trained_length


class TextSettings(MeasurementSettings):
    """Settings shared by the evaluations of text."""

    store: str | None = setting(
        None, "folder of another prepared corpus (same tokenizer); default: the run's own"
    )
    split: Literal["valid", "train"] = setting("valid", "split of the corpus to evaluate on")
    bos: Literal["as-trained", "none", "every-window"] = setting(
        "as-trained", "BOS: as stored, removed, or first in every window"
    )
    least_documents: int = setting(1, "minimum number of documents that are long enough", ge=1)


class TargetSettings(TextSettings):
    """Settings of fixed targets."""

    lengths: list[int | str] | None = setting(
        None,
        "input tokens, or multiples of the trained length L0 such as 4x; L0 is always added; "
        "default: 1x, 2x, 4x, 8x, 16x",
    )
    targets: int = setting(
        64,
        "targets per span (K), or queries per window of attention; at most the shortest length",
        ge=1,
    )
    documents: int = setting(200, "maximum number of documents, chosen by seed", ge=1)
    spans_per_document: int = setting(4, "disjoint spans in each document", ge=1)
    shorten: bool = setting(False, "drop lengths that too few documents reach, with a warning")

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, including the trained length."""
        lengths = self.lengths or [f"{2**k}x" for k in range(5)]
        return sorted({*(tokens_of(each, trained_length) for each in lengths), trained_length})


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


class TaskEvaluationSettings(MeasurementSettings):
    """Items of one task at several lengths: accuracy by likelihood, and exact match."""

    protocol: Literal["tasks"] = setting("tasks", "items with one correct answer each")
    task: TaskSettings | None = setting(None, "the task; null: the task the run was trained on")
    lengths: list[Lengths] | None = setting(
        None,
        "input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4. "
        "Tasks on symbols: length of the problems, or [minimum, maximum]; default: the lengths of "
        "training up to N, N+1 to 2N, 2N+1 to 3N",
    )
    items: int = setting(
        200, "items per length; in text, the same questions in longer contexts", ge=1
    )
    positions: Literal["fixed", "redrawn"] | None = setting(
        None,
        "tasks on symbols: draw positions as data.positions of the run does, once for "
        "all items (fixed) or for each item (redrawn); null: 0, 1, 2, ..., or the positions "
        "of the task",
    )
    depths: int = setting(5, "depths of the hidden fact, evenly from 0 (far) to 1 (near)", ge=1)
    haystacks: int = setting(40, "maximum number of haystack texts, used evenly", ge=1)
    haystack_store: str | None = setting(
        None,
        "folder of a prepared corpus whose held-out text is the haystack; null: the "
        "run's own if it was trained on text, else task.haystack",
    )
    unreachable: Literal["refuse", "dash"] = setting(
        "refuse", "a length that no method supports is an error, or a dash in the table"
    )
    batch: int | None = setting(None, "items per batch; default: as the memory allows", ge=1)

    def grid(self, trained_length: int) -> list[int]:
        """The lengths of a task in text in ascending order, including the trained length."""
        lengths = self.lengths or [trained_length * n for n in (1, 2, 4)]
        whole = {length for length in lengths if isinstance(length, int)}
        if len(whole) < len(set(lengths)):
            raise EvaluationError("lengths: a task in text has numbers, not [minimum, maximum]")
        return sorted({*whole, trained_length})

    def ranges(self, trained: tuple[int, int]) -> list[tuple[int, int]]:
        """Minimum and maximum length of the problems of a task on symbols, in ascending order."""
        most = trained[1]
        default = [trained, (most + 1, 2 * most), (2 * most + 1, 3 * most)]
        ranges = [bounds_of(lengths) for lengths in self.lengths or default]
        if len({longest for _, longest in ranges}) < len(ranges):
            raise EvaluationError("lengths: two ranges have the same maximum; change one of them")
        return sorted(ranges, key=lambda bounds: bounds[1])


class DiagnosticSettings(TextSettings):
    """Settings shared by the diagnostics."""

    methods: list[str] | dict[str, list[str]] = setting(
        ["trained"], "labels of configs/evaluation/methods.yaml, or label: [overrides of the model]"
    )


class AttentionDiagnosticSettings(DiagnosticSettings, TargetSettings):
    """Attention weights of the last queries in windows of fixed targets, at and beyond the trained
    length."""

    removed: ClassVar[dict[str, RemovedSetting]] = {
        name: RemovedSetting(default, "outputs are not compared with float64: set dtype instead")
        for name, default in (("precision", ["float32", "bfloat16"]), ("precision_windows", 2))
    }

    protocol: Literal["attention"] = "attention"
    windows: int = setting(16, "number of spans whose queries are recorded, evenly spread", ge=1)


class GenerationDiagnosticSettings(DiagnosticSettings):
    """Repetition and loss of text that a model generates past its trained length."""

    protocol: Literal["generation"] = "generation"
    prompt: int | None = setting(None, "tokens of each prompt; default: L0 / 2", ge=1)
    length: int | None = setting(None, "total tokens, including the prompt; default: 4 x L0", ge=2)
    prompts: int = setting(16, "maximum number of prompts, one from each document", ge=1)
    bucket: int | None = setting(
        None,
        "tokens per bucket of positions, and distance within which repetitions are "
        "counted; default: L0 / 2",
        ge=8,
    )
    temperatures: list[NonNegativeFloat] = setting(
        [0.0, 1.0], "sampling temperatures; 0 is greedy", min_length=1
    )


SETTINGS_CLASSES: tuple[type[MeasurementSettings], ...] = (
    EvaluationSettings,
    TaskEvaluationSettings,
    AttentionDiagnosticSettings,
    GenerationDiagnosticSettings,
)


def settings_class(overrides: Sequence[str]) -> type[MeasurementSettings]:
    """The settings class that `protocol` selects in settings files and overrides; by default
    EvaluationSettings."""
    protocol = setting_before_validation(overrides, "protocol")
    if protocol is None:
        return EvaluationSettings
    known = []
    for settings in SETTINGS_CLASSES:
        protocols = get_args(settings.model_fields["protocol"].annotation)
        if protocol in protocols:
            return settings
        known += protocols
    raise EvaluationError(f"protocol={protocol} is unknown; choose one of {', '.join(known)}")
