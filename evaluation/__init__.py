"""What a model does with context it was never trained to use. Knows the model and its stores, not the
training.
"""

from evaluation.analysis import Analysis, analyse
from evaluation.baselines import unigram_nll
from evaluation.comparable import comparable
from evaluation.errors import EvaluationError
from evaluation.figures import draw_figures
from evaluation.matrix import Result, Subject, evaluate
from evaluation.monitor import MonitorTargets, monitor_targets
from evaluation.protocols import Windows
from evaluation.rules import Rule, compatible_rules, read_rules, resolve_rules
from evaluation.scoring import CellFailed, ModelScorer, gather, measure
from evaluation.settings import EvaluationSettings
from evaluation.targets import Targets, draw_targets, load_targets, longest_usable, shorten_lengths
from evaluation.text import Text

__all__ = [
    "Analysis",
    "CellFailed",
    "EvaluationError",
    "EvaluationSettings",
    "ModelScorer",
    "MonitorTargets",
    "Result",
    "Rule",
    "Subject",
    "Targets",
    "Text",
    "Windows",
    "analyse",
    "comparable",
    "compatible_rules",
    "draw_figures",
    "draw_targets",
    "evaluate",
    "gather",
    "load_targets",
    "longest_usable",
    "measure",
    "monitor_targets",
    "read_rules",
    "resolve_rules",
    "shorten_lengths",
    "unigram_nll",
]
