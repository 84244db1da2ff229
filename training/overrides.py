"""A trained run under another positional rule: words laid over every kind of layer that can take them.

What may change is no business of this file: each scheme says it in `test_time`, and `check_override` holds
everybody to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from model import ModelError, Transformer, check_override, legal_overrides
from training.config import apply_words, differences
from training.errors import ConfigError, TrainingError
from training.settings import RunSettings

_POSITION = "model.position."
_OF_THE_PATTERN = {"name", "layers", "kinds"}  # the first key of a word that speaks of the pattern itself
_ADVICE = re.compile(r"; choose \S+\.name=\S+ first")  # right before training, and too late after it
_TIMES = re.compile(r"\{(\w+)\*(\d+(?:\.\d+)?)\}")


def override(trained: RunSettings, words: Sequence[str]) -> RunSettings:
    """The settings of a trained run with words of its positional scheme laid over them, proven usable.

    Where the run has a pattern of layer kinds, words such as `model.position.window=256` are one rule that is
    laid over every kind; a kind takes all of the rule or none of it. None is taken by a kind that has no such
    setting, may not change it, cannot be built with it, or has a narrower window already. `{theta*4}` in a
    word is four times what the kind was trained with.

    Raises:
        TrainingError: a word outside the model, or one that does not exist, naming what is legal.
        ModelError: what the trained weights do not allow, naming what is legal; sizes that do not fit.
    """
    kinds = trained.model.kinds
    if not words:
        return trained
    if not trained.model.is_pattern:
        (choice,) = kinds.values()
        return _laid(trained, [_filled_in(word, choice) for word in words])
    template = [word for word in words if _is_template(word)]
    direct = [word for word in words if word not in template]
    if not template:
        return _laid(trained, direct)
    taken, refused = [], {}
    for kind, choice in kinds.items():
        try:
            own = [_for_kind(_filled_in(word, choice), kind) for word in template]
            found = _laid(trained, own)
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
    return _laid(trained, [*taken, *direct])


def why(error: Exception) -> str:
    """Why something is refused, without the list of what is not, on one line."""
    lines = [line.strip().split("; legal for ")[0] for line in str(error).split("\n")]
    return "; ".join(line for line in lines if not line.startswith("legal for "))


def longest_input(settings: RunSettings) -> int | None:
    """The longest input these settings can place; None where there is no end."""
    return _built(settings).limit


def widens(trained: RunSettings, asked: RunSettings) -> bool:
    """Whether a window is wider than it was in training: legal, and no rule for longer texts."""
    kinds = asked.model.kinds
    return any(_is_wider(old.window, kinds[kind].window) for kind, old in trained.model.kinds.items())


def _is_wider(old: int | None, new: int | None) -> bool:
    return old is not None and (new is None or new > old)


def _laid(trained: RunSettings, words: Sequence[str]) -> RunSettings:
    try:
        settings = apply_words(trained, list(words))
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
    """The model without memory for its weights; the vocabulary is no business of positions."""
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
