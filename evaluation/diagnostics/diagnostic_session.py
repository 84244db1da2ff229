"""What both diagnostics share: the text, the units of its documents, no stored cells."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.diagnostics.diagnostic_settings import DiagnosticSettings
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.cells import MeasuredCells
from evaluation.scoring.methods import Method
from evaluation.scoring.targets import EvaluationText


@dataclass(kw_only=True)
class DiagnosticResult(MeasuredCells):
    """The common fields of the diagnostics. `unit`: the independent unit of each window or
    prompt."""

    settings: DiagnosticSettings
    unit: np.ndarray
    unit_kind: str
    documents: int


def common_fields(
    settings: DiagnosticSettings,
    subject: EvaluatedModel,
    methods: list[Method],
    text: EvaluationText,
    tokenizer_hash: str,
    documents: np.ndarray,
) -> dict[str, Any]:
    """The fields of a `DiagnosticResult`, from the document of each window or prompt."""
    # A context cut to the trained length shows nothing beyond it.
    methods = [method for method in methods if not method.truncates]
    unit_of, _, kind = text.units()
    return {
        "settings": settings,
        "subject": subject,
        "methods": methods,
        "facts": {"corpus_hash": text.store.hash, "tokenizer_hash": tokenizer_hash},
        "documents": len(np.unique(documents)),
        "unit": unit_of[documents],
        "unit_kind": kind,
    }
