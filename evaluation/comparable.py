"""Check that several evaluations scored the same targets, so that their numbers can be compared."""

from collections.abc import Mapping

from errors import EvaluationError

# What must be equal, causes first, and how to fix a difference.
_MUST_AGREE = {
    "protocol": "measure both under one protocol",
    "tokenizer_hash": "prepare both corpora with one tokenizer",
    "corpus_hash": "evaluate both on one prepared corpus",
    "bos": "evaluate both with the same bos setting",
    "targets_hash": "set the same longest length, targets, documents, spans_per_document and seed, "
    "and compare runs on one training text (passages it shares with the corpus are excluded)",
}


def comparable(results: Mapping[str, Mapping]) -> None:
    """Raise EvaluationError, naming what differs and between whom, unless all `results` (label ->
    what results.json holds) score the same tokens."""
    labels = list(results)
    for key, fix in _MUST_AGREE.items():
        for label in labels[1:]:
            mine = results[labels[0]].get(key)
            theirs = results[label].get(key)
            if mine != theirs or mine is None:
                raise EvaluationError(
                    f"{labels[0]} and {label} cannot be compared: {key} differs ({_short(mine)} "
                    f"and {_short(theirs)}); {fix}"
                )


def _short(value: object) -> str:
    return "missing" if value is None else str(value)[:16]
