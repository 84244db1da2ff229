"""Settings of the diagnostics. Every field is a key of a YAML file and an override on the command line."""

from typing import Literal

from pydantic import Field, model_validator

from evaluation.settings import EvaluationSettings, MeasurementSettings


class DiagnosticSettings(MeasurementSettings):
    """Settings shared by the diagnostics: the text."""

    methods: list[str] | dict[str, list[str]] = Field(
        ["trained"],
        description="labels of configs/evaluation/methods.yaml, or label: [overrides of the model]",
    )
    store: str | None = Field(
        None, description="folder of another prepared corpus (same tokenizer); default: the run's own"
    )
    split: Literal["valid", "train"] = Field("valid", description="split of that corpus")
    least_documents: int = Field(1, ge=1, description="fewer long enough documents than this are an error")
    bos: Literal["as-trained", "none", "every-window"] = Field(
        "as-trained", description="position of BOS: as stored, nowhere, or first in every window"
    )


class AttentionDiagnosticSettings(DiagnosticSettings):
    """Attention weights at and beyond the trained length, on windows of the fixed targets."""

    protocol: Literal["attention"] = "attention"
    lengths: list[int] | None = Field(
        None, description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4, 8, 16"
    )
    targets: int = Field(
        64, ge=1, description="last queries of a window that are recorded; at most the shortest length"
    )
    documents: int = Field(
        200, ge=1, description="targets are drawn as for the loss: from this many documents"
    )
    spans_per_document: int = Field(4, ge=1, description="... and this many disjoint spans in each")
    windows: int = Field(16, ge=1, description="number of those spans that are recorded, evenly spread")
    shorten: bool = Field(False, description="drop lengths that too few documents reach, with a warning")
    precision: list[Literal["float32", "bfloat16"]] = Field(
        ["float32", "bfloat16"], description="dtypes compared with float64; []: none"
    )
    precision_windows: int = Field(2, ge=1, description="windows for this comparison")

    @model_validator(mode="after")
    def _as_the_loss_would(self) -> "AttentionDiagnosticSettings":
        self.of_loss()
        return self

    def of_loss(self) -> EvaluationSettings:
        """The settings of an evaluation of loss with the same targets."""
        shared = ("lengths", "targets", "documents", "spans_per_document", "least_documents", "shorten")
        keys = {key: getattr(self, key) for key in (*shared, "bos", "methods", "seed")}
        return EvaluationSettings(protocol="fixed-targets", **keys)


class GenerationDiagnosticSettings(DiagnosticSettings):
    """Repetition and loss of the text that a model generates past its trained length."""

    protocol: Literal["generation"] = "generation"
    prompt: int | None = Field(None, ge=1, description="tokens of each prompt; default: L0 / 2")
    length: int | None = Field(None, ge=2, description="total tokens, including the prompt; default: 4 x L0")
    prompts: int = Field(16, ge=1, description="number of prompts")
    bucket: int | None = Field(
        None,
        ge=8,
        description="tokens per bucket of positions, and distance within which repetitions are counted; "
        "default: L0 / 2",
    )
    temperatures: list[float] = Field([0.0, 1.0], description="sampling temperatures; 0 is greedy")

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationDiagnosticSettings":
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError("temperatures requires at least one value, each 0 (greedy) or above")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures contains a value twice")
        return self
