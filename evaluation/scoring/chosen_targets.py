"""Choose the targets of an evaluation: the text, what is excluded from it, and the plan."""

from dataclasses import dataclass

from data import Tokenizer
from evaluation.contamination.screening import Screening, screen, shared_text
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.plan import EvaluationPlan, make_plan
from evaluation.scoring.text import EvaluationText
from evaluation.stores import EvaluationStores


@dataclass(frozen=True)
class ChosenTargets:
    """The targets of one run. `stores`: the text to read, and the text the model was trained on,
    which gives the unigram baseline; passages that both share are excluded."""

    stores: EvaluationStores
    tokenizer: Tokenizer
    text: EvaluationText
    plan: EvaluationPlan
    screening: Screening


def choose_targets(
    settings: EvaluationSettings,
    stores: EvaluationStores,
    tokenizer: Tokenizer,
    trained_length: int,
    console=None,
) -> ChosenTargets:
    """Raises EvaluationError if too little text remains."""
    shared = shared_text(settings.contamination, stores, tokenizer, console)
    text = EvaluationText(stores.read, settings.bos, tokenizer.bos_id, shared.rows)
    plan = make_plan(settings, text, tokenizer.hash, trained_length)
    screening = screen(shared, text, plan.truncated, plan.candidates)
    return ChosenTargets(stores, tokenizer, text, plan, screening)
