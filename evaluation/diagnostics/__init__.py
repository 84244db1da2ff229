"""What happens inside a model, and to what it writes, beyond the trained length."""

from evaluation.diagnostics.attention import Attention, measure_attention
from evaluation.diagnostics.generation import Generated, measure_generation
from evaluation.diagnostics.settings import AttentionSettings, DiagnosticSettings, GenerationSettings

__all__ = [
    "Attention",
    "AttentionSettings",
    "DiagnosticSettings",
    "Generated",
    "GenerationSettings",
    "measure_attention",
    "measure_generation",
]
