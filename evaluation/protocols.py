"""The settings class of each protocol, read before anything of an evaluation is imported."""

from collections.abc import Sequence
from typing import get_args

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_settings import (
    AttentionDiagnosticSettings,
    GenerationDiagnosticSettings,
)
from evaluation.evaluation_settings import EvaluationSettings, MeasurementSettings
from evaluation.tasks.task_settings import TaskEvaluationSettings
from settings.load import setting_before_validation

SETTINGS_CLASSES: tuple[type[MeasurementSettings], ...] = (
    EvaluationSettings,
    TaskEvaluationSettings,
    AttentionDiagnosticSettings,
    GenerationDiagnosticSettings,
)


def settings_class(overrides: Sequence[str]) -> type[MeasurementSettings]:
    """The settings class that `protocol` selects in settings files and overrides; without it the
    one of the loss of text."""
    protocol = setting_before_validation(overrides, "protocol")
    if protocol is None:
        return EvaluationSettings
    classes = {
        name: each
        for each in SETTINGS_CLASSES
        for name in get_args(each.model_fields["protocol"].annotation)
    }
    if not isinstance(protocol, str) or protocol not in classes:
        raise EvaluationError(f"protocol={protocol} is unknown; choose one of {', '.join(classes)}")
    return classes[protocol]
