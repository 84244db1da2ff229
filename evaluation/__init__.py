"""What a model does with context it was never trained to use. Knows the model and its stores, not the
training.
"""

from evaluation.comparable import comparable
from evaluation.errors import EvaluationError
from evaluation.monitor import MonitorTargets, monitor_targets
from evaluation.reports.loss_figures import draw_figures
from evaluation.run import EvaluatedModel
from evaluation.scoring.evaluate import EvaluationResult, evaluate
from evaluation.scoring.methods import Method, compatible_methods, read_methods, resolve_methods
from evaluation.scoring.protocols import TargetWindows
from evaluation.scoring.scoring import CellFailed, ModelScorer, gather, measure, unigram_nll
from evaluation.scoring.targets import TargetSet, draw_targets, load_targets, longest_usable, shorten_lengths
from evaluation.scoring.text import EvaluationText
from evaluation.settings import EvaluationSettings
from evaluation.statistics.analysis import Analysis, analyse

__all__ = [
    "Analysis",
    "CellFailed",
    "EvaluatedModel",
    "EvaluationError",
    "EvaluationResult",
    "EvaluationSettings",
    "EvaluationText",
    "Method",
    "ModelScorer",
    "MonitorTargets",
    "TargetSet",
    "TargetWindows",
    "analyse",
    "comparable",
    "compatible_methods",
    "draw_figures",
    "draw_targets",
    "evaluate",
    "gather",
    "load_targets",
    "longest_usable",
    "measure",
    "monitor_targets",
    "read_methods",
    "resolve_methods",
    "shorten_lengths",
    "unigram_nll",
]
