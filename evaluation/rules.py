"""Test-time rules: a label and the dotted words that make it from the model as trained."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from evaluation.errors import EvaluationError

TRAINED = "trained"  # no override: the reference
TRUNCATE = "truncate"  # as trained, context cut to the last L0 tokens; not an override of the model
_LENGTH = re.compile(r"\{train_length(?:([-*])(\d+))?\}")


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

    `{train_length}` in a word stands for the run's trained length, `{train_length-4}` for four tokens less,
    `{train_length*4}` for four times as many.
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


def compatible_rules(
    builtin: dict[str, list[str]], trained_length: int, resolve: Callable[[Sequence[str]], dict]
) -> tuple[list[Rule], dict[str, str]]:
    """Every built-in rule that says something about this checkpoint, and why each of the others does not.

    `resolve(words)` gives position settings as evaluated and raises ValueError where they are illegal. A rule
    that leaves the checkpoint as it was trained, or that comes to the same as one before it, is left out too.
    """
    rules, left_out, seen = [], {}, {}
    for rule in resolve_rules(list(builtin), builtin, trained_length):
        try:
            scheme = json.dumps(resolve(rule.words), sort_keys=True)
        except ValueError as error:
            left_out[rule.label] = str(error)
            continue
        if rule.words and scheme in seen:
            same = seen[scheme]
            left_out[rule.label] = "it was trained so" if same == TRAINED else f"the same as {same} here"
            continue
        seen.setdefault(scheme, rule.label)
        rules.append(rule)
    return rules, left_out


def new_sinks(scheme: dict, trained: dict) -> bool:
    """Whether tokens stay visible as sinks under the position settings `scheme` that did not in training."""

    def sinks(settings: dict) -> dict[str, int]:
        kinds = settings.get("kinds") or {"": settings}
        return {name: one.get("sinks", 0) for name, one in kinds.items()}

    before = sinks(trained)
    return any(count > before.get(name, 0) for name, count in sinks(scheme).items())


def _filled_in(word: str, trained_length: int) -> str:
    def value(found: re.Match) -> str:
        number = int(found[2] or 0)
        return str(trained_length * number if found[1] == "*" else trained_length - number)

    return _LENGTH.sub(value, word)
