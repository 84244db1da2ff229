"""Runs that start from a checkpoint of another run: extension runs and forks.

An extension run takes the parent's weights as step 0, under a new context-extension method or
length. A fork also takes the optimizer state, the step count and the order of the data: where only
the budget and the end of the learning-rate schedule differ, it is bit for bit the run trained under
its settings from the start.

Settings that are not given are those of the parent. In an extension run there are three exceptions:
`original_length` is the parent's train_length, the seed is the parent's plus 1 (another order of
the text), and the parent's stages are dropped. The run directory stores all it needs to resume
without its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from data.files import with_keys
from data.preparation.prepared import USE
from data.tokenizers.tokenizer_settings import BytesSettings, SymbolsSettings
from errors import TrainingError
from run_directory.allowed_changes import (
    changed,
    check_extension,
    check_fork,
    fork_refused,
    with_table_length,
)
from run_directory.checkpoints import WEIGHTS, Checkpoint, find_checkpoint
from run_directory.run import MANIFEST, Run, is_run, not_a_run
from run_directory.run_names import name_stem
from run_directory.run_settings import RunSettings
from run_directory.stages import last_trained
from settings.load import identity, load_settings, setting_before_validation


@dataclass(frozen=True)
class ParentRun:
    """A run and the checkpoint of it that an extension run or a fork starts from."""

    folder: Path
    settings: RunSettings  # at that checkpoint; for a fork, of the whole run
    checkpoint: Checkpoint
    about: dict  # the run's manifest
    inherited: dict  # the settings that those of the new run override, as JSON

    def lineage(self, settings: RunSettings) -> list[dict]:
        """The ancestors of a run of these settings, nearest first: JSON for its manifest."""
        own = {
            "run": str(self.folder),
            "identity": self.about.get("identity"),
            "step": self.checkpoint.step,
            "checkpoint_hash": self.checkpoint.hash,
            "tokens": self.checkpoint.state.get("tokens"),
            "train_length": self.settings.train_length,
            "data": self.about.get("data"),
            "mixture": self.about.get("mixture", []),
            "changed": self.changed(settings),
        }
        if settings.is_fork:
            own["fork"] = True
        return [own, *self.about.get("lineage", [])]

    def changed(self, settings: RunSettings) -> list[str]:
        """Every setting that differs in the new run, one line each."""
        return [text for text in changed(self.settings, settings) if not text.startswith("parent")]

    def trained_tokenizer(self) -> BaseModel:
        """The settings of the tokenizer, read from the file in the run directory."""
        tokenizer = self.settings.data.tokenizer
        if isinstance(tokenizer, BytesSettings | SymbolsSettings):
            return tokenizer
        return tokenizer.model_copy(
            update={"model": str(self.folder / "tokenizer" / tokenizer.file)}
        )

    def check(self, settings: RunSettings) -> None:
        """Raise TrainingError where a run of these settings cannot start from the checkpoint."""
        if not settings.is_fork:
            check_extension(self.folder, self.settings, settings)
            return
        old = self.settings
        tokenizer = self.trained_tokenizer()
        if settings.data.tokenizer == tokenizer:  # the same tokenizer under another setting
            data = old.data.model_copy(update={"tokenizer": tokenizer})
            old = old.model_copy(update={"data": data})
        with fork_refused(self.folder):
            check_fork(self.checkpoint.step, old, settings)

    def complete(self, settings: RunSettings) -> RunSettings:
        """The settings with what only the parent determines: the hash of its checkpoint, the length
        of its position tables, its tokenizer."""
        assert settings.parent is not None
        stated = settings.parent.hash
        step = self.checkpoint.step
        own_hash = self.checkpoint.hash
        if stated is not None and stated != own_hash:
            raise TrainingError(
                f"parent.hash is {stated[:12]}, and checkpoint {step} of {self.folder} has "
                f"{own_hash[:12]}: it is not the checkpoint that this run started from"
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


def read_run_settings(
    overrides: Sequence[str], folder: Path | None = None, root: Path = Path("runs")
) -> tuple[RunSettings, ParentRun | None]:
    """The settings of a run from files and overrides, on top of its parent's where it has one.

    The parent is None for a run from scratch, and for an extension run whose folder exists
    (`folder`, or the default one under `root`) and whose parent is gone.

    Raises:
        ConfigError: invalid settings.
        TrainingError: the parent is not a run, has no such checkpoint, or does not fit the
            settings.
    """
    overrides = list(overrides)
    asked = setting_before_validation(overrides, "parent")
    if asked is None:
        return load_settings(RunSettings, overrides), None
    if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
        raise TrainingError("parent.run is missing: set parent.run=FOLDER, the run to start from")
    if folder is not None and folder.resolve() == Path(asked["run"]).resolve():
        raise TrainingError(f"{folder} cannot extend itself (parent.run); choose another --run-dir")
    try:
        parent = open_parent(
            Path(asked["run"]),
            asked.get("checkpoint"),
            bool(asked.get("fork")),
        )
    except TrainingError:
        if (settings := _without_parent(overrides, asked["run"], folder, root)) is not None:
            return settings, None
        raise
    settings = parent.complete(load_settings(RunSettings, overrides, parent.inherited))
    parent.check(settings)
    return settings, parent


def open_parent(
    folder: Path,
    step: int | None = None,
    fork: bool = False,
) -> ParentRun:
    """A run's checkpoint (None: the newest good one) as the start of an extension run or a fork."""
    if not is_run(folder):
        raise TrainingError(f"parent.run: {not_a_run(folder)}")
    run = Run(folder)
    checkpoint = find_checkpoint(
        folder,
        None,
        step,
        only=None if fork else (WEIGHTS,),
    )
    if checkpoint is None:
        raise TrainingError(f"parent.run: {folder} has no checkpoint yet; train it first")
    settings = run.settings if fork else last_trained(run.settings, checkpoint.step)[0]
    inherited: dict[str, Any] = settings.model_dump(mode="json") | {"parent": None}
    if not fork:
        inherited["original_length"] = settings.original_length or settings.train_length
        inherited["seed"] += 1
        inherited["training"]["stages"] = []
    with_keys(
        folder / MANIFEST,
        run.manifest,
        {"vocab_size": int, "tokenizer_hash": str},
    )
    return ParentRun(folder, settings, checkpoint, run.manifest, inherited)


def _without_parent(
    overrides: list[str], run: str, folder: Path | None, root: Path
) -> RunSettings | None:
    """The settings of an existing run whose parent is gone, from the inherited settings in its
    folder."""
    for candidate in [folder] if folder else sorted(root.glob(f"{name_stem(overrides)}-*")):
        about = Run(candidate).manifest if is_run(candidate) else {}
        own = about.get("lineage", [{}])[0]
        if own.get("run") != run:
            continue
        inherited = RunSettings.from_earlier_versions(about["inherited"])
        kept = RunSettings.model_validate(inherited)
        checkpoint = Checkpoint(Path(run), own["step"], own["checkpoint_hash"])
        parent = ParentRun(Path(run), kept, checkpoint, {}, inherited)
        settings = parent.complete(load_settings(RunSettings, overrides, parent.inherited))
        if folder or candidate.name.endswith(f"-{identity(settings)}"):
            return settings
    return None
