"""Context-extension overrides of a trained run, applied to every layer kind that supports them.

Each scheme lists in `test_time` which of its settings may change; `check_override` checks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from model import ModelError, Transformer, check_override, legal_overrides
from training.config.load import apply_overrides, differences
from training.config.settings import RunSettings
from training.errors import ConfigError, TrainingError

_POSITION = "model.position."
_OF_THE_PATTERN = {"name", "layers", "kinds"}  # first keys of overrides of the pattern itself
_ADVICE = re.compile(r"; choose \S+\.name=\S+ first")  # valid before training, but not after it
_TIMES = re.compile(r"\{(\w+)\*(\d+(?:\.\d+)?)\}")


def override(trained: RunSettings, words: Sequence[str]) -> RunSettings:
    """The settings of a trained run with overrides of its positional scheme applied and checked.

    In a run with a pattern of layer kinds, overrides such as `model.position.window=256` form one method that
    applies to every kind that supports all of it. A kind does not support a setting that it lacks, that may
    not change after training, that it cannot be built with, or that would widen its window. `{theta*4}` is
    four times the trained value of the kind.

    Raises:
        TrainingError: an override outside model.position, or of an unknown setting; lists legal ones.
        ModelError: an override that the trained weights do not allow, or sizes that do not fit.
    """
    kinds = trained.model.kinds
    if not words:
        return trained
    if not trained.model.is_pattern:
        (choice,) = kinds.values()
        return _applied(trained, [_filled_in(word, choice) for word in words])
    template = [word for word in words if _is_template(word)]
    direct = [word for word in words if word not in template]
    if not template:
        return _applied(trained, direct)
    taken, refused = [], {}
    for kind, choice in kinds.items():
        try:
            own = [_for_kind(_filled_in(word, choice), kind) for word in template]
            found = _applied(trained, own)
            if _is_wider(choice.window, found.model.kinds[kind].window):
                raise ModelError(
                    f"its window of {choice.window} is narrower; {_POSITION}kinds.{kind}.window can widen it"
                )
        except (ModelError, TrainingError) as error:
            refused[kind] = why(error)
        else:
            taken += own
    if not taken:
        head = f"{' '.join(template)}: no kind of layer can take it"
        reasons = [f"{kind}: {text}" for kind, text in refused.items()]
        raise ModelError("\n       ".join([head, *reasons, legal_overrides(trained.model)]))
    return _applied(trained, [*taken, *direct])


def why(error: Exception) -> str:
    """The reason of an error on one line, without the list of legal overrides."""
    lines = [line.strip().split("; legal for ")[0] for line in str(error).split("\n")]
    return "; ".join(line for line in lines if not line.startswith("legal for "))


def longest_input(settings: RunSettings) -> int | None:
    """The longest input that these settings support; None if unlimited."""
    return _built(settings).limit


def widens(trained: RunSettings, asked: RunSettings) -> bool:
    """Whether a window is wider than in training, which is legal but no context-extension method."""
    kinds = asked.model.kinds
    return any(_is_wider(old.window, kinds[kind].window) for kind, old in trained.model.kinds.items())


def _is_wider(old: int | None, new: int | None) -> bool:
    return old is not None and (new is None or new > old)


def _applied(trained: RunSettings, words: Sequence[str]) -> RunSettings:
    try:
        settings = apply_overrides(trained, list(words))
    except ConfigError as error:
        text = _ADVICE.sub("", str(error))
        raise ConfigError(f"{text}\n       {legal_overrides(trained.model)}") from error
    for key, *_ in differences(trained, settings):
        if not key.startswith("model."):
            raise TrainingError(
                f"{key} cannot be changed on a trained model; only keys of model.position can"
            )
    check_override(trained.model, settings.model)
    _built(settings)  # sizes that do not fit each other or the trained length are refused here
    return settings


def _built(settings: RunSettings) -> Transformer:
    """The model on the meta device, with a vocabulary of one token."""
    with torch.device("meta"):
        return Transformer(settings.model, 1, settings.train_length, settings.original_length)


def _is_template(word: str) -> bool:
    key = word.partition("=")[0]
    return key.startswith(_POSITION) and key.removeprefix(_POSITION).split(".")[0] not in _OF_THE_PATTERN


def _for_kind(word: str, kind: str) -> str:
    return f"{_POSITION}kinds.{kind}.{word.removeprefix(_POSITION)}"


def _filled_in(word: str, choice) -> str:
    def value(found: re.Match) -> str:
        trained = getattr(choice, found[1], None)
        if not isinstance(trained, (int, float)) or isinstance(trained, bool):
            lacks = "is no number in training" if hasattr(choice, found[1]) else "does not exist"
            raise ModelError(f"{word.partition('=')[0]}: {found[1]} {lacks} for '{choice.name}'")
        return f"{trained * float(found[2]):.12g}"

    return _TIMES.sub(value, word)
