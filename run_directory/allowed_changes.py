"""Checks which settings may change on resume, in a fork and in an extension run; nothing is
allocated."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data import RunData
from data.sampling.segments import Segment, chunk_sizes
from errors import TrainingError
from model import ModelError, ModelSettings
from run_directory.position_overrides import meta_model, override, why
from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from settings.fields import show
from settings.load import differences

# Settings that determine a fork's checkpoint tensors, its step count and the order of its data; and
# why.
_FIXED = {
    "train_length": "the size of a step cannot change",
    "original_length": "positions depend on it",
    "training.batch_size": "the size of a step cannot change",
    "training.optimizer.name": "the optimizer state belongs to it",
    "data.tokenizer": "the token ids depend on it",
    "model": "the weights depend on it; use overrides in training.stages for positions",
}


def check_resume(folder: Path, old: RunSettings, new: RunSettings) -> list[str]:
    """The settings that differ from those of a run to resume, one line each.

    Raises TrainingError, which lists those that are not marked `may_change`.
    """
    if fixed := changed(old, new, free=False):
        raise TrainingError(
            f"{folder} was started with other settings; change them back, go on under the new "
            f"ones in another run (--fork {folder} instead of --run-dir), or start again "
            "(--restart):\n       " + "\n       ".join(fixed)
        )
    return changed(old, new)


def changed(old: RunSettings, new: RunSettings, free: bool = True) -> list[str]:
    """Every setting that differs, as `key: old → new`; with `free`, also those that may change on
    resume."""
    return [
        f"{key}: {_short(a)} → {_short(b)}"
        for key, a, b, may_change in differences(old, new)
        if free or not may_change
    ]


def _short(value: object) -> str:
    if not isinstance(value, dict):
        return str(value) if isinstance(value, str) else show(value, sys.maxsize)
    inside = ", ".join(
        f"{k}: {_short(v)}" for k, v in value.items() if k != "name" and v is not None
    )
    return f"{value.get('name', '')}({inside})" if inside else str(value.get("name", "{}"))


@contextmanager
def fork_refused(folder: Path) -> Iterator[None]:
    """Raise an error of the block as the reason why the run cannot be forked."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(
            f"{folder} cannot be forked this way (an extension run takes its weights only: "
            f"parent.run={folder} without --fork):\n       {error}"
        ) from None


def check_text(
    settings: RunSettings,
    prepared: RunData,
    tokenizer_hash: str,
) -> None:
    """Check that the text has the parent's tokenizer and, in an extension run, a document of
    train_length."""
    own_hash = prepared.tokenizer.hash
    longest = prepared.longest
    if own_hash != tokenizer_hash:
        raise TrainingError(
            f"the text has another tokenizer ({own_hash[:12]}) than the parent's "
            f"({tokenizer_hash[:12]}): set data.tokenizer as in the parent"
        )
    if longest < settings.train_length and not settings.is_fork:
        raise TrainingError(
            f"train_length {settings.train_length} is longer than every document of the training "
            f"text (the longest has {longest:,} tokens); lower it"
        )


def with_table_length(
    model: ModelSettings, parent: ModelSettings, length: Callable[[Any, Any], int | None]
) -> ModelSettings:
    """The model with `max_length` = length(its scheme, the parent's scheme) in every position table
    that can be extended, where the parent has one too."""
    schemes = {name: kind.position for name, kind in model.resolved_kinds.items()}
    extended = {}
    for name, kind in parent.resolved_kinds.items():
        new = schemes.get(name)
        if hasattr(new, "extend") and hasattr(kind.position, "max_length"):
            extended[name] = new.model_copy(update={"max_length": length(new, kind.position)})
    return model.with_positions(schemes | extended) if extended else model


def method_of(parent: RunSettings, settings: RunSettings) -> ModelSettings:
    """The model under which the parent computes what the extension run computes at step 0."""
    return with_table_length(
        settings.model,
        parent.model,
        lambda _, old: old.max_length,
    )


def not_at_test_time(parent: RunSettings, settings: RunSettings) -> str:
    """Why the method of the extension run cannot be applied to the parent at test time; '': it
    can."""
    try:
        override(parent, method_of(parent, settings))
    except (ModelError, TrainingError) as error:
        return why(error)
    return ""


def check_extension(folder: Path, old: RunSettings, new: RunSettings) -> None:
    """Raise TrainingError where a run of settings `new` cannot start from the weights of the run in
    `folder`, of settings `old`.

    A change of the scheme's settings must be legal on trained weights; another scheme needs
    parameters of the same names and shapes.
    """
    for key in ModelSettings.model_fields:
        may_change = key in ("position", "kinds")  # the weights must fit
        if not may_change and getattr(old.model, key) != getattr(new.model, key):
            raise TrainingError(
                f"model.{key} cannot change in an extension run: {folder} has "
                f"{getattr(old.model, key)}"
            )
    ours = _shapes(new)
    theirs = _shapes(old)
    wrong = [f"{name} is new" for name in ours if name not in theirs]
    wrong += [f"{name} is left over" for name in theirs if name not in ours]
    wrong += [
        f"{name} would have shape {ours[name]}, the parent's has {theirs[name]}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    if wrong:
        raise TrainingError(
            f"model.position: the weights of {folder} do not fit: {'; '.join(wrong[:3])}. An "
            "extension run may change settings of its scheme, or use a scheme with the same "
            "parameters"
        )
    is_same_scheme = _scheme_names(old.model) == _scheme_names(new.model)
    if is_same_scheme and (refusal := not_at_test_time(old, new)):
        raise TrainingError(f"{folder} cannot be extended this way: {refusal}")


def _scheme_names(model: ModelSettings) -> list[tuple[str, str]]:
    """The kind and the scheme of each layer."""
    kinds = model.resolved_kinds
    return [(name, kinds[name].position.name) for name in model.layer_kinds]


def _shapes(settings: RunSettings) -> dict[str, tuple[int, ...]]:
    weights = meta_model(settings).state_dict()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def check_fork(step: int, old: RunSettings, new: RunSettings) -> None:
    """Raise TrainingError, which lists every setting that must not change, where a run of settings
    `old` cannot continue from its checkpoint of `step` under settings `new`."""
    changed = [key for key, *_ in differences(old, new)]
    if old.training.optimizer.name != new.training.optimizer.name:
        changed.append("training.optimizer.name")
    wrong = [
        f"{key}: {reason}"
        for key in changed
        for fixed, reason in _FIXED.items()
        if key == fixed or key.startswith(f"{fixed}.")
    ]
    if wrong:
        raise TrainingError("\n       ".join(wrong))
    if new.steps <= step:
        raise TrainingError(
            f"training.tokens = {new.training.tokens} is {new.steps} steps, but the checkpoint is "
            f"at step {step}: increase it above {new.tokens_after(step)}, or set "
            "parent.checkpoint to an earlier one"
        )
    if _segments_before(old, step) != _segments_before(new, step):
        raise TrainingError(
            f"training.stages: the stage of the checkpoint after step {step} cannot start or end "
            "elsewhere in a fork, because the data order depends on its end; fork where a later "
            "stage starts"
        )
    old_lengths = sorted({segment.length for segment in old.plan})
    new_lengths = sorted({segment.length for segment in new.plan})
    old_chunks = chunk_sizes(old_lengths)
    new_chunks = chunk_sizes(new_lengths)
    if old_chunks != new_chunks:
        raise TrainingError(
            f"training.stages: windows of {', '.join(map(str, new_lengths))} tokens are cut from "
            f"chunks of {new_chunks[0]}, those of {', '.join(map(str, old_lengths))} from chunks "
            f"of {old_chunks[0]}, so the data order cannot continue; set lengths that fill "
            f"{old_chunks[0]}"
        )
    old_stages = [stage for stage in stages_of(old) if stage.start < step]
    new_stages = [stage for stage in stages_of(new) if stage.start < step]
    if old_stages != new_stages:
        raise TrainingError(
            f"training.stages before step {step} cannot change in a fork (give durations in steps)"
        )


def _segments_before(settings: RunSettings, step: int) -> list[Segment]:
    """The segments that determine the data order of the first `step` updates; the last one of a run
    has no end."""
    begun = []
    begin = 0
    for segment in settings.plan:
        if begin < step:
            begun.append(segment)
        begin += segment.steps
    if len(begun) == len(settings.plan):
        begun[-1] = begun[-1]._replace(steps=0)
    return begun
