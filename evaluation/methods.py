"""Context-extension methods: a label and the overrides that apply it to a trained model."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from errors import EvaluationError
from settings.yaml_io import read_yaml

TRAINED = "trained"  # the reference, without overrides
TRUNCATE = "truncate"  # as trained, context truncated to the last L0 tokens; not an override
BUILTIN = Path(__file__).resolve().parents[1] / "configs" / "evaluation" / "methods.yaml"
_LENGTH = re.compile(r"\{train_length(?:([-*])(\d+))?\}")


MethodAndLength = tuple[str, int]  # label of a method, length


@dataclass(frozen=True)
class Method:
    label: str
    overrides: tuple[str, ...]

    @property
    def truncates(self) -> bool:
        return self.label == TRUNCATE


def name_of(method: str) -> str:
    """A method's label in sentences and figures."""
    return "as trained" if method == TRAINED else method


@cache
def builtin_methods() -> dict[str, list[str]]:
    """The methods of configs/evaluation/methods.yaml: label -> overrides."""
    return read_yaml(BUILTIN)[0]


def resolve_methods(asked: list[str] | dict[str, list[str]], trained_length: int) -> list[Method]:
    """The methods of an evaluation in order; `trained`, the reference, is added if it is missing.

    `{train_length}` in an override is replaced by the run's trained length, `{train_length-4}` by
    the length minus 4, `{train_length*4}` by 4 times the length. Raises EvaluationError for an
    unknown label, or for overrides under a label with a fixed meaning.
    """
    if isinstance(asked, list):
        builtin = builtin_methods()
        for label in asked:
            if label not in builtin:
                raise EvaluationError(
                    f"unknown method {label!r}; choose from {', '.join(sorted(builtin))}"
                )
        asked = {label: builtin[label] for label in asked}
    if TRAINED not in asked:
        asked = {TRAINED: [], **asked}
    methods = []
    for label, overrides in asked.items():
        if overrides and label in (TRAINED, name_of(TRAINED), TRUNCATE):
            raise EvaluationError(
                f"method {label!r} accepts no overrides: it is the checkpoint as trained; use "
                f"another label"
            )
        words = [_filled_in(word, trained_length) for word in overrides]
        methods.append(Method(label, tuple(words)))
    return methods


def compatible_methods(
    trained_length: int,
    resolve: Callable[[Sequence[str]], dict],
) -> tuple[list[Method], dict[str, str]]:
    """The built-in methods that apply to this checkpoint, and for each other method the reason why
    it does not apply.

    `resolve(overrides)` returns the position settings and raises ValueError if they are illegal. A
    method that changes nothing, or gives the same settings as an earlier method, is left out too.
    """
    methods = []
    left_out = {}
    seen = {}
    for method in resolve_methods(list(builtin_methods()), trained_length):
        try:
            scheme = json.dumps(resolve(method.overrides), sort_keys=True)
        except ValueError as error:
            left_out[method.label] = str(error)
            continue
        if method.overrides and scheme in seen:
            first = seen[scheme]
            same = "it was trained this way" if first == TRAINED else f"the same as {first} here"
            left_out[method.label] = same
            continue
        seen.setdefault(scheme, method.label)
        methods.append(method)
    return methods, left_out


def new_sinks(scheme: dict, trained: dict) -> bool:
    """Whether the position settings `scheme` keep more sink tokens visible than in training."""

    before = trained.get("kinds") or {"": trained}
    kinds = scheme.get("kinds") or {"": scheme}
    return any(
        kind.get("sinks", 0) > before.get(name, {}).get("sinks", 0) for name, kind in kinds.items()
    )


def _filled_in(word: str, trained_length: int) -> str:
    def value(match: re.Match) -> str:
        number = int(match[2] or 0)
        return str(trained_length * number if match[1] == "*" else trained_length - number)

    return _LENGTH.sub(value, word)
