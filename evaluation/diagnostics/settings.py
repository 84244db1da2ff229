"""What the diagnostics measure. Every field is a key of a YAML file and a dotted word on the command line."""

from typing import Literal

from pydantic import Field, model_validator

from evaluation.settings import EvaluationSettings, MeasurementSettings


class DiagnosticSettings(MeasurementSettings):
    """What the diagnostics share besides: the text."""

    rules: list[str] | dict[str, list[str]] = Field(
        ["trained"],
        description="labels of configs/evaluation/rules.yaml, or label: [dotted words for the model]",
    )
    store: str | None = Field(
        None, description="folder of another prepared corpus (same tokenizer); default: the run's own"
    )
    split: Literal["valid", "train"] = Field("valid", description="which part of that corpus is read")
    least_documents: int = Field(1, ge=1, description="fewer long enough documents than this are an error")
    bos: Literal["as-trained", "none", "every-window"] = Field(
        "as-trained", description="where a BOS token stands: as stored, nowhere, or first in every window"
    )


class AttentionSettings(DiagnosticSettings):
    """Where attention goes at and beyond the trained length, on windows of the fixed targets."""

    protocol: Literal["attention"] = "attention"
    lengths: list[int] | None = Field(
        None, description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4, 8, 16"
    )
    targets: int = Field(64, ge=1, description="last queries of a window that are looked at; every length >=")
    documents: int = Field(200, ge=1, description="targets are drawn as for the loss: in so many documents")
    spans_per_document: int = Field(16, ge=1, description="... and so many disjoint spans in each")
    windows: int = Field(16, ge=1, description="how many of those spans are looked at, evenly spread")
    shorten: bool = Field(False, description="drop lengths that too few documents reach, and say so")
    precision: list[Literal["float32", "bfloat16"]] = Field(
        ["float32", "bfloat16"], description="arithmetic compared with float64; []: none"
    )
    precision_windows: int = Field(2, ge=1, description="windows on which it is compared")

    @model_validator(mode="after")
    def _as_the_loss_would(self) -> "AttentionSettings":
        self.of_loss()
        return self

    def of_loss(self) -> EvaluationSettings:
        """The evaluation of the loss that has the same targets."""
        shared = ("lengths", "targets", "documents", "spans_per_document", "least_documents", "shorten")
        keys = {key: getattr(self, key) for key in (*shared, "bos", "rules", "seed")}
        return EvaluationSettings(protocol="fixed-targets", **keys)


class GenerationSettings(DiagnosticSettings):
    """Repetition and the loss of a model's own text while it writes past the trained length."""

    protocol: Literal["generation"] = "generation"
    prompt: int | None = Field(None, ge=1, description="tokens of real text first; default: L0 / 2")
    length: int | None = Field(None, ge=2, description="tokens in the end, prompt included; default: 4 x L0")
    prompts: int = Field(16, ge=1, description="how many documents are continued")
    bucket: int | None = Field(
        None,
        ge=8,
        description="tokens of a bucket of positions, and how far back repetitions are looked for; "
        "default: L0 / 2",
    )
    temperatures: list[float] = Field([0.0, 1.0], description="of sampling; 0 is greedy")

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationSettings":
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError("temperatures must be at least one, each 0 (greedy) or above")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures holds one of them twice")
        return self
