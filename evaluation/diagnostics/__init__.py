"""Attention and generated text of a model beyond its trained length."""

from evaluation.diagnostics.attention import AttentionResult, AttentionSession
from evaluation.diagnostics.generation import GenerationResult, GenerationSession
from evaluation.diagnostics.settings import (
    AttentionDiagnosticSettings,
    DiagnosticSettings,
    GenerationDiagnosticSettings,
)

__all__ = [
    "AttentionDiagnosticSettings",
    "AttentionResult",
    "AttentionSession",
    "DiagnosticSettings",
    "GenerationDiagnosticSettings",
    "GenerationResult",
    "GenerationSession",
]
