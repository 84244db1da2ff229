"""What a model does with context it was never trained to use. Knows the model and its stores, not the
training.
"""

from errors import EvaluationError
from evaluation.comparable import comparable
from evaluation.monitor import monitor_targets
from evaluation.run import EvaluatedModel
from evaluation.scoring.evaluate import EvaluationResult, EvaluationSession
from evaluation.scoring.methods import Method, compatible_methods, read_methods, resolve_methods
from evaluation.scoring.scoring import CellFailed, ModelScorer, gather, measure, unigram_nll
from evaluation.scoring.targets import draw_targets, shorten_lengths
from evaluation.scoring.text import EvaluationText
from evaluation.settings import EvaluationSettings
from evaluation.statistics.analysis import analyze

__all__ = [
    "CellFailed",
    "EvaluatedModel",
    "EvaluationError",
    "EvaluationResult",
    "EvaluationSession",
    "EvaluationSettings",
    "EvaluationText",
    "Method",
    "ModelScorer",
    "analyze",
    "comparable",
    "compatible_methods",
    "draw_targets",
    "gather",
    "measure",
    "monitor_targets",
    "read_methods",
    "resolve_methods",
    "shorten_lengths",
    "unigram_nll",
]
