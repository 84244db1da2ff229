"""Context-extension overrides of a trained run, applied to every layer kind that supports them.

Each scheme lists in `test_time` which of its settings may change; `check_override` checks it.
"""

import re
from collections.abc import Sequence

import torch

from errors import ConfigError, TrainingError
from model import ModelError, ModelSettings, Transformer, check_override, legal_overrides
from model.position import PositionSettings
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, differences

_POSITION = "model.position."
_ADVICE = re.compile(r"; choose \S+\.name=\S+ first")  # valid before training, but not after it
_TIMES = re.compile(r"\{(\w+)\*(\d+(?:\.\d+)?)\}")


def override(trained: RunSettings, overrides: Sequence[str] | ModelSettings) -> RunSettings:
    """The settings of a trained run with overrides of its positional scheme, or another model,
    checked.

    In a run with several kinds of layers, overrides such as `model.position.window=256` form one
    method that applies to every kind that supports all of it;
    `model.kinds.KIND.position.window=256` applies to one kind. A kind does not support a setting
    that it lacks, that may not change after training, that it cannot be built with, or that would
    widen its window. `{theta*4}` is four times the value that the kind was trained with.

    Raises:
        TrainingError: an override outside model.position, or of an unknown setting; lists legal
            ones.
        ModelError: an override that the trained weights do not allow, or sizes that do not fit.
    """
    if isinstance(overrides, ModelSettings):
        return _checked(trained, trained.model_copy(update={"model": overrides}))
    kinds = trained.model.resolved_kinds
    if not overrides:
        return trained
    if not trained.model.pattern:
        scheme = kinds["all"].position
        return _applied(trained, [_filled_in(word, scheme) for word in overrides])
    earlier = f"{_POSITION}kinds."  # an earlier spelling, which the settings reject
    template = [w for w in overrides if w.startswith(_POSITION) and not w.startswith(earlier)]
    direct = [word for word in overrides if word not in template]
    if not template:
        return _applied(trained, direct)
    taken = []
    refused = {}
    for kind in kinds:
        scheme = kinds[kind].position
        key = trained.model.position_key(kind)
        try:
            own = [f"{key}.{_filled_in(word, scheme).removeprefix(_POSITION)}" for word in template]
            changed = _applied(trained, own).model.resolved_kinds[kind].position
            if _is_wider(scheme.window, changed.window):
                raise ModelError(f"its window of {scheme.window} is narrower; set {key}.window")
        except (ModelError, TrainingError) as error:
            refused[kind] = why(error)
        else:
            taken += own
    if not taken:
        head = f"{' '.join(template)}: no layer kind supports it"
        reasons = [f"{kind}: {text}" for kind, text in refused.items()]
        raise ModelError("\n       ".join([head, *reasons, legal_overrides(trained.model)]))
    return _applied(trained, [*taken, *direct])


def why(error: Exception) -> str:
    """The reason of an error on one line, without the list of legal overrides."""
    lines = [line.strip().split("; legal for ")[0] for line in str(error).split("\n")]
    return "; ".join(line for line in lines if not line.startswith("legal for "))


def make_model(settings: RunSettings, vocab_size: int) -> Transformer:
    """The model of these settings, without initial weights."""
    return Transformer(settings.model, vocab_size, settings.train_length, settings.original_length)


def meta_model(settings: RunSettings, vocab_size: int = 1) -> Transformer:
    """The model of these settings on the meta device."""
    with torch.device("meta"):
        return make_model(settings, vocab_size)


def widens(trained: RunSettings, settings: RunSettings) -> bool:
    """Whether a window is wider than in training, which is legal but no context-extension
    method."""
    kinds = settings.model.resolved_kinds
    return any(
        _is_wider(kind.position.window, kinds[name].position.window)
        for name, kind in trained.model.resolved_kinds.items()
    )


def _is_wider(old: int | None, new: int | None) -> bool:
    return old is not None and (new is None or new > old)


def _applied(trained: RunSettings, overrides: Sequence[str]) -> RunSettings:
    try:
        settings = apply_overrides(trained, list(overrides))
    except ConfigError as error:
        text = _ADVICE.sub("", str(error))
        raise ConfigError(f"{text}\n       {legal_overrides(trained.model)}") from error
    for key, *_ in differences(trained, settings):
        if not key.startswith("model."):
            raise TrainingError(f"{key} cannot be changed after training; only model.position can")
    return _checked(trained, settings)


def _checked(trained: RunSettings, settings: RunSettings) -> RunSettings:
    check_override(trained.model, settings.model)
    meta_model(settings)  # raises for sizes that do not fit each other or the trained length
    return settings


def _filled_in(word: str, scheme: PositionSettings) -> str:
    def value(match: re.Match) -> str:
        key, factor = match[1], match[2]
        trained = getattr(scheme, key, None)
        if not isinstance(trained, (int, float)) or isinstance(trained, bool):
            lacks = "is not a number in training" if hasattr(scheme, key) else "does not exist"
            raise ModelError(f"{word.partition('=')[0]}: {key} {lacks} for '{scheme.name}'")
        return f"{trained * float(factor):.12g}"

    return _TIMES.sub(value, word)
