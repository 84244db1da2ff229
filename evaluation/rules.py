"""Test-time rules: a label and the dotted words that make it from the model as trained."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from evaluation.errors import EvaluationError

TRAINED = "trained"  # no override: the reference
TRUNCATE = "truncate"  # as trained, context cut to the last L0 tokens; not an override of the model
_LENGTH = re.compile(r"\{train_length(?:-(\d+))?\}")


@dataclass(frozen=True)
class Rule:
    label: str
    words: tuple[str, ...]

    @property
    def truncates(self) -> bool:
        return self.label == TRUNCATE


def read_rules(path: Path) -> dict[str, list[str]]:
    """Built-in rules from a YAML mapping label -> list of words. Raises EvaluationError where it is
    anything else.
    """
    table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(table, dict) or not all(
        isinstance(k, str) and isinstance(v, list) and all(isinstance(word, str) for word in v)
        for k, v in table.items()
    ):
        raise EvaluationError(f"{path}: must map each label to a list of dotted words")
    return table


def resolve_rules(
    asked: list[str] | dict[str, list[str]], builtin: dict[str, list[str]], trained_length: int
) -> list[Rule]:
    """The rules of an evaluation in order; `trained` is added where it is missing, for it is the reference.

    `{train_length}` in a word stands for the run's trained length, `{train_length-4}` for four tokens less.
    Raises EvaluationError for an unknown label, or for words under a label whose meaning is fixed.
    """
    table = {label: builtin.get(label) for label in asked} if isinstance(asked, list) else dict(asked)
    unknown = [label for label, words in table.items() if words is None]
    if unknown:
        raise EvaluationError(f"unknown rule {unknown[0]!r}; there are {', '.join(sorted(builtin))}")
    for label in (TRAINED, TRUNCATE):
        if table.get(label):
            raise EvaluationError(
                f"rule {label!r} takes no words: it is the checkpoint as trained; use another label"
            )
    labels = list(table) if TRAINED in table else [TRAINED, *table]
    return [
        Rule(label, tuple(_filled_in(word, trained_length) for word in table.get(label) or []))
        for label in labels
    ]


def _filled_in(word: str, trained_length: int) -> str:
    return _LENGTH.sub(lambda found: str(trained_length - int(found[1] or 0)), word)
