"""Numbers of several evaluations may stand side by side only where they are about the very same targets."""

from collections.abc import Mapping

from evaluation.errors import EvaluationError

# What must be equal, in the order of cause before effect, and what to do where it is not.
_MUST_AGREE = {
    "protocol": "measure both under one protocol",
    "tokenizer_hash": "the same text is other tokens to each; train or prepare both with one tokenizer",
    "corpus_hash": "evaluate both on one prepared corpus",
    "bos": "evaluate both under one BOS rule",
    "targets_hash": "give both the same longest length, targets, documents, spans_per_document and seed",
    "scored_hash": "their training texts share other passages with this corpus, so that other targets were "
    "dropped; compare runs on one training text",
}


def comparable(results: Mapping[str, Mapping]) -> None:
    """Raise EvaluationError, naming what differs and between whom, unless all `results` (label -> what
    results.json holds) score the same tokens."""
    labels = list(results)
    for key, mend in _MUST_AGREE.items():
        for label in labels[1:]:
            mine, theirs = results[labels[0]].get(key), results[label].get(key)
            if mine != theirs or mine is None:
                raise EvaluationError(
                    f"{labels[0]} and {label} cannot be compared: {key} differs ({_short(mine)} and "
                    f"{_short(theirs)}); {mend}"
                )


def _short(value: object) -> str:
    return "not stated" if value is None else str(value)[:16]
