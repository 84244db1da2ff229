"""Runs that start from a checkpoint of another run: extension runs and forks.

An extension run takes the parent's weights as step 0, under a new context-extension method or
length. A fork also takes the optimizer state, the step count and the order of the data: if only the
budget and the end of the learning-rate schedule differ, it equals, bit for bit, a run trained under
its settings from the start.

Settings that are not given default to those of the parent. In an extension run there are three
exceptions: `original_length` is the parent's train_length, the seed is the parent's plus 1 (another
order of the text), and the parent's stages are dropped. The run directory stores everything that is
needed to resume without the parent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from data import RunData
from data.prepared import USE
from data.sampling.window_order import chunk_sizes
from data.tokenizers.tokenizer_settings import BytesSettings, SymbolsSettings
from errors import TrainingError
from model import ModelError, ModelSettings
from run_directory.checkpoints import WEIGHTS, Checkpoint, find_checkpoint, steps_of
from run_directory.position_overrides import meta_model, override, why
from run_directory.run import Run, is_run, not_a_run
from run_directory.run_settings import RunSettings, describe_changes
from run_directory.training_schedule import last_trained, stages_of
from settings.load import differences, load_settings, setting_before_validation

# Settings that a fork cannot change, because its tensors, step count or data order depend on them;
# and the reason.
_FIXED_IN_FORKS = {
    "train_length": "the size of a step cannot change",
    "original_length": "positions depend on it",
    "training.batch_size": "the size of a step cannot change",
    "training.optimizer.name": "the optimizer state belongs to it",
    "data.tokenizer": "the token ids depend on it",
    "model": "the weights depend on it; use overrides in training.stages for positions",
}


@dataclass(frozen=True)
class ParentRun:
    """A run, and the checkpoint of that run from which an extension run or a fork starts.

    Attributes:
        settings: the run's settings at that checkpoint; for a fork, of the whole run.
        manifest: the run's manifest.
        inherited: the settings that the new run inherits unless it overrides them, as JSON.
        is_gone: the run or its checkpoint was removed; all values are from the manifest of the run
            that started from it.
    """

    folder: Path
    settings: RunSettings
    checkpoint: Checkpoint
    manifest: dict
    inherited: dict
    is_gone: bool = False

    def lineage(self, settings: RunSettings) -> list[dict]:
        """The ancestors of a run with these settings, nearest first, as JSON for its manifest."""
        if self.is_gone:
            return self.manifest["lineage"]
        own = {
            "run": str(self.folder),
            "identity": self.manifest.get("identity"),
            "step": self.checkpoint.step,
            "checkpoint_hash": self.checkpoint.hash,
            "tokens": self.checkpoint.state.get("tokens"),
            "train_length": self.settings.train_length,
            "data": self.manifest.get("data"),
            "mixture": self.manifest.get("mixture", []),
            "changed": self.changes(settings),
        }
        if settings.is_fork:
            own["fork"] = True
        return [own, *self.manifest.get("lineage", [])]

    def changes(self, settings: RunSettings) -> list[str]:
        """Every setting that differs in the new run, one line each."""
        changes = describe_changes(self.settings, settings)
        return [text for text in changes if not text.startswith("parent")]

    def trained_tokenizer(self) -> BaseModel:
        """The settings of the tokenizer, read from the file in the run directory."""
        tokenizer = self.settings.data.tokenizer
        if isinstance(tokenizer, BytesSettings | SymbolsSettings):
            return tokenizer
        file = self.folder / "tokenizer" / tokenizer.file
        return tokenizer.model_copy(update={"model": str(file)})

    def complete(self, settings: RunSettings) -> RunSettings:
        """The settings with what only the parent determines: the hash of its checkpoint, the length
        of its position tables, its tokenizer."""
        assert settings.parent is not None
        stated = settings.parent.hash
        step = self.checkpoint.step
        own_hash = self.checkpoint.hash
        if stated is not None and stated != own_hash:
            raise TrainingError(
                f"parent.hash is {stated[:12]}, but the hash of checkpoint {step} of {self.folder} "
                f"is {own_hash[:12]}: this is not the checkpoint from which the run started"
            )
        length = self.settings.train_length
        more: dict[str, Any] = {
            "parent": settings.parent.model_copy(update={"checkpoint": step, "hash": own_hash}),
            "model": with_table_length(
                settings.model,
                self.settings.model,
                lambda new, old: new.max_length or (length if new.name == old.name else None),
            ),
        }
        data = settings.data
        theirs = self.settings.data
        is_other_text = data.model_dump(exclude=USE) != theirs.model_dump(exclude=USE)
        if data.tokenizer == theirs.tokenizer and is_other_text:
            more["data"] = data.model_copy(update={"tokenizer": self.trained_tokenizer()})
        return settings.model_copy(update=more)

    def check(self, settings: RunSettings) -> None:
        """Raise TrainingError if a run with these settings cannot start from the checkpoint."""
        if not settings.is_fork:
            check_extension(self.folder, self.settings, settings)
            return
        old = self.settings
        tokenizer = self.trained_tokenizer()
        if settings.data.tokenizer == tokenizer:  # the same tokenizer under another setting
            data = old.data.model_copy(update={"tokenizer": tokenizer})
            old = old.model_copy(update={"data": data})
        check_fork(self.checkpoint.step, old, settings)

    def check_text(self, settings: RunSettings, data: RunData) -> None:
        """Raise TrainingError if the text has another tokenizer or, in an extension run, no
        document of train_length tokens."""
        own_hash = data.tokenizer.hash
        parents = self.manifest["tokenizer_hash"]
        if own_hash != parents:
            raise TrainingError(
                f"the text has another tokenizer ({own_hash[:12]}) than the parent's "
                f"({parents[:12]}): set data.tokenizer as in the parent"
            )
        if data.longest < settings.train_length and not settings.is_fork:
            raise TrainingError(
                f"train_length {settings.train_length} is longer than every document of the "
                f"training text (the longest has {data.longest:,} tokens); lower it"
            )


def read_run_settings(
    overrides: Sequence[str], folder: Path | None = None, resumes: bool = False
) -> tuple[RunSettings, ParentRun | None]:
    """The settings of a run from files and overrides, on top of those of its parent, if it has one.
    The parent of an existing run in `folder` may be gone. If that run `resumes`, the parent may
    also have other checkpoints than at its start.

    Raises:
        ConfigError: invalid settings.
        TrainingError: the parent is not a run, has no such checkpoint, or does not fit the
            settings.
    """
    given = setting_before_validation(overrides, "parent")
    if given is None:
        return load_settings(RunSettings, overrides), None
    if not isinstance(given, dict) or not isinstance(given.get("run"), str):
        raise TrainingError("parent.run is missing: set parent.run=FOLDER, the run to start from")
    run = Path(given["run"])
    if folder is not None and folder.resolve() == run.resolve():
        raise TrainingError(f"{folder} cannot extend itself (parent.run); choose another --run-dir")
    step = given.get("checkpoint")
    parent = None
    if folder is not None and is_run(folder):
        own = Run(folder)
        started = own.manifest.get("lineage", [{}])[0]
        is_gone = not is_run(run)
        if resumes and started.get("run") == str(run) and step in (None, started["step"]):
            step = started["step"]
            is_gone = is_gone or step not in steps_of(run)
        parent = _recorded_parent(own, run) if is_gone else None
    parent = parent or open_parent(run, step, bool(given.get("fork")))
    settings = parent.complete(load_settings(RunSettings, overrides, parent.inherited))
    if not parent.is_gone:
        parent.check(settings)
    return settings, parent


def open_parent(folder: Path, step: int | None = None, fork: bool = False) -> ParentRun:
    """A run's checkpoint (None: the newest) as the start of an extension run or a fork."""
    if not is_run(folder):
        raise TrainingError(f"parent.run: {not_a_run(folder)}")
    run = Run(folder)
    checkpoint = find_checkpoint(folder, step, only=None if fork else (WEIGHTS,))
    if checkpoint is None:
        raise TrainingError(f"parent.run: {folder} has no checkpoint yet; train it first")
    if fork:
        checkpoint.check_resumable()
    settings = run.settings if fork else last_trained(run.settings, checkpoint.step)[0]
    inherited: dict[str, Any] = settings.model_dump(mode="json") | {"parent": None}
    if not fork:
        inherited["original_length"] = settings.original_length or settings.train_length
        inherited["seed"] += 1
        inherited["training"]["stages"] = []
    return ParentRun(folder, settings, checkpoint, run.manifest, inherited)


def _recorded_parent(run: Run, parent: Path) -> ParentRun | None:
    """The parent of an existing run, according to its manifest; None if it has another parent."""
    own = run.manifest.get("lineage", [{}])[0]
    if own.get("run") != str(parent):
        return None
    inherited = run.manifest["inherited"]
    settings = RunSettings.model_validate(inherited)
    checkpoint = Checkpoint(parent, own["step"], own["checkpoint_hash"])
    return ParentRun(parent, settings, checkpoint, run.manifest, inherited, is_gone=True)


def with_table_length(
    model: ModelSettings, parent: ModelSettings, length: Callable[[Any, Any], int | None]
) -> ModelSettings:
    """The model with `max_length` = length(its scheme, the parent's scheme) in every position table
    that can be extended, if the parent has one too."""
    schemes = {name: kind.position for name, kind in model.resolved_kinds.items()}
    extended = {}
    for name, kind in parent.resolved_kinds.items():
        new = schemes.get(name)
        if new is not None and hasattr(new, "extend") and hasattr(kind.position, "max_length"):
            extended[name] = new.model_copy(update={"max_length": length(new, kind.position)})
    return model.with_positions(schemes | extended) if extended else model


def check_extension(folder: Path, old: RunSettings, new: RunSettings) -> None:
    """Raise TrainingError if a run with settings `new` cannot start from the weights of the run in
    `folder` with settings `old`.

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
    here, there = (
        {name: tuple(weight.shape) for name, weight in meta_model(run).state_dict().items()}
        for run in (new, old)
    )
    wrong = [
        f"{name} has shape {here.get(name, 'none')} in this run and {there.get(name, 'none')} in "
        "its parent"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    if wrong:
        raise TrainingError(
            f"model.position: the weights of {folder} do not fit: {'; '.join(wrong[:3])}. An "
            "extension run may change settings of its scheme, or use a scheme with the same "
            "parameters"
        )
    schemes, trained_schemes = (
        [(name, run.model.resolved_kinds[name].position.name) for name in run.model.layer_kinds]
        for run in (new, old)
    )
    if schemes == trained_schemes:
        model = with_table_length(new.model, old.model, lambda _, old: old.max_length)
        try:
            override(old, model)
        except (ModelError, TrainingError) as error:
            raise TrainingError(f"{folder} cannot be extended this way: {why(error)}") from None


def check_fork(step: int, old: RunSettings, new: RunSettings) -> None:
    """Raise TrainingError if a run with settings `old` cannot continue from its checkpoint of
    `step` under settings `new`. The message lists every setting that must not change."""
    changed = [key for key, *_ in differences(old, new)]
    if old.training.optimizer.name != new.training.optimizer.name:
        changed.append("training.optimizer.name")
    wrong = [
        f"{key}: {reason}"
        for key in changed
        for fixed, reason in _FIXED_IN_FORKS.items()
        if f"{key}.".startswith(f"{fixed}.")
    ]
    if wrong:
        raise TrainingError("\n       ".join(["these settings cannot change in a fork:", *wrong]))
    if new.steps <= step:
        raise TrainingError(
            f"training.tokens = {new.training.tokens} is {new.steps} steps, but the checkpoint is "
            f"at step {step}: increase it above {new.tokens_after(step)}, or set "
            "parent.checkpoint to an earlier one"
        )
    if _history(old, step) != _history(new, step):
        raise TrainingError(
            f"training.stages before step {step} cannot change in a fork, because the data order "
            "and the weights depend on them: give durations in steps, fork where a stage starts, "
            "and choose new lengths that fill chunks of the same size"
        )


def _history(settings: RunSettings, step: int) -> tuple:
    """The settings that determine the data and the model of the first `step` updates. The last step
    range of a run has no end."""
    plan = settings.plan
    starts = accumulate((step_range.steps for step_range in plan), initial=0)
    passed = [step_range for step_range, start in zip(plan, starts, strict=False) if start < step]
    if len(passed) == len(plan):
        passed[-1] = passed[-1]._replace(steps=0)
    chunks = chunk_sizes(sorted({step_range.length for step_range in plan}))
    stages = [stage for stage in stages_of(settings) if stage.start < step]
    return passed, chunks, stages
