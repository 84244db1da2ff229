"""Settings of the diagnostics. Every field is a key of a YAML file and an override on the command
line."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from evaluation.evaluation_settings import TargetSettings, TextSettings
from settings.fields import RemovedSetting, setting


class DiagnosticSettings(TextSettings):
    """Settings shared by the diagnostics."""

    methods: list[str] | dict[str, list[str]] = setting(
        ["trained"], "labels of configs/evaluation/methods.yaml, or label: [overrides of the model]"
    )


class AttentionDiagnosticSettings(DiagnosticSettings, TargetSettings):
    """Attention weights at and beyond the trained length, of the last queries of windows of fixed
    targets."""

    removed: ClassVar[dict[str, RemovedSetting]] = {
        name: RemovedSetting(default, "outputs are not compared with float64: set dtype instead")
        for name, default in (("precision", ["float32", "bfloat16"]), ("precision_windows", 2))
    }

    protocol: Literal["attention"] = "attention"
    windows: int = setting(16, "number of spans whose queries are recorded, evenly spread", ge=1)


class GenerationDiagnosticSettings(DiagnosticSettings):
    """Repetition and loss of the text that a model generates past its trained length."""

    protocol: Literal["generation"] = "generation"
    prompt: int | None = setting(None, "tokens of each prompt; default: L0 / 2", ge=1)
    length: int | None = setting(None, "total tokens, including the prompt; default: 4 x L0", ge=2)
    prompts: int = setting(16, "maximum number of prompts, one of each document", ge=1)
    bucket: int | None = setting(
        None,
        "tokens per bucket of positions, and distance within which repetitions are "
        "counted; default: L0 / 2",
        ge=8,
    )
    temperatures: list[NonNegativeFloat] = setting(
        [0.0, 1.0], "sampling temperatures; 0 is greedy", min_length=1
    )
