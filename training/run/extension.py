"""Extension runs: fine-tuning from another run's checkpoint under a new context-extension method or length.

The run folder of an extension run holds the parent's weights as step 0, the tokenizer and the inherited
settings, so it does not need the parent afterwards. Settings that are not given are those of the parent, with
four exceptions: `original_length` is the parent's train_length, the seed is the parent's plus 1 (another
order of the text), the parent's changes and stages are dropped, and the optimizer starts from scratch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from data.preparation.prepare import USE
from data.settings import SentencePieceSettings
from model import ModelError, Transformer
from training.checkpoint.storage import WEIGHTS, Checkpoint, find_checkpoint
from training.config.load import asked_for, identity, load_settings
from training.config.settings import RunSettings
from training.config.test_time import override, why
from training.errors import TrainingError
from training.run.directory import changed, is_run, not_a_run, read_manifest, read_settings, stem_of
from training.run.fork import check_fork, check_groups, tree_of
from training.stages import last_trained


@dataclass(frozen=True)
class ParentRun:
    """A run and the checkpoint of it that an extension run or a fork starts from."""

    folder: Path
    settings: RunSettings  # at that checkpoint; for a fork, of the whole run
    checkpoint: Checkpoint
    about: dict  # the run's manifest
    inherited: dict  # the settings that those of the extension run override, as JSON

    def lineage(self, branch: RunSettings) -> list[dict]:
        """The ancestors of an extension run, nearest first: JSON for its manifest."""
        own = {
            "run": str(self.folder),
            "identity": self.about.get("identity"),
            "step": self.checkpoint.step,
            "checkpoint_hash": self.checkpoint.hash,
            "tokens": self.checkpoint.state.get("tokens"),
            "train_length": self.settings.train_length,
            "data": self.about.get("data"),
            "mixture": self.about.get("mixture", []),
            "groups": self.about.get("groups"),
            "changed": self.changed(branch),
        }
        if branch.parent is not None and branch.parent.fork:
            own["fork"] = True
        return [own, *self.about.get("lineage", [])]

    def changed(self, branch: RunSettings) -> list[str]:
        """Every setting that differs in the extension run, one line each."""
        return [text for text in changed(self.settings, branch) if not text.startswith("parent")]


def read_run_settings(
    words: Sequence[str], folder: Path | None = None, root: Path = Path("runs")
) -> tuple[RunSettings, ParentRun | None]:
    """The settings of a run from files and overrides; those of an extension run override its parent's.

    The parent is None for a run from scratch, and for an extension run whose folder exists (`folder`, or the
    default one under `root`) and whose parent is gone.

    Raises:
        ConfigError: invalid settings.
        TrainingError: the parent is not a run, has no such checkpoint, or does not fit the settings.
    """
    words = list(words)
    asked = asked_for(words, "parent")
    if asked is None:
        return load_settings(RunSettings, words), None
    if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
        raise TrainingError("parent.run is missing: set parent.run=FOLDER, the run to start from")
    if folder is not None and folder.resolve() == Path(asked["run"]).resolve():
        raise TrainingError(f"{folder} cannot extend itself (parent.run): give another --run-dir")
    try:
        parent = open_parent(Path(asked["run"]), asked.get("checkpoint"), bool(asked.get("fork")))
    except TrainingError:
        if (settings := _remembered(words, asked["run"], folder, root)) is not None:
            return settings, None
        raise
    settings = _completed(load_settings(RunSettings, words, parent.inherited), parent)
    if settings.parent is not None and settings.parent.fork:
        old, tokenizer = parent.settings, _trained_tokenizer(parent)
        if settings.data.tokenizer == tokenizer:  # the same tokenizer under another setting
            old = old.model_copy(update={"data": old.data.model_copy(update={"tokenizer": tokenizer})})
        check_fork(parent.folder, parent.checkpoint.step, old, settings)
        check_groups(parent.folder, parent.checkpoint, settings)
    else:
        check_extension(parent, settings)
    return settings, parent


def open_parent(folder: Path, step: int | None = None, fork: bool = False) -> ParentRun:
    """A run's checkpoint (None: the newest good one) as the start of an extension run or a fork."""
    if not is_run(folder):
        raise TrainingError(f"parent.run: {not_a_run(folder)}")
    found = find_checkpoint(folder, None, step, only=None if fork else (WEIGHTS,))
    if found is None:
        raise TrainingError(f"parent.run: {folder} has no checkpoint yet; train it first")
    whole = read_settings(folder)
    about = read_manifest(folder, "vocab_size", "tokenizer_hash")
    if fork:
        return ParentRun(folder, whole, found, about, tree_of(whole))
    settings, _ = last_trained(whole, found.step)
    tree = settings.model_dump(mode="json")
    tree |= {"original_length": settings.original_length or settings.train_length}
    tree |= {"seed": settings.seed + 1, "parent": None}
    tree["training"]["stages"] = []
    return ParentRun(folder, settings, found, about, tree)


def _completed(settings: RunSettings, parent: ParentRun) -> RunSettings:
    """Add what only the parent determines: its checkpoint's hash, the rows of its tables, its tokenizer."""
    assert settings.parent is not None
    stated, found = settings.parent.hash, parent.checkpoint
    if stated is not None and stated != found.hash:
        raise TrainingError(
            f"parent.hash is {stated[:12]}, and checkpoint {found.step} of {parent.folder} has "
            f"{found.hash[:12]}: it is not the checkpoint that this run started from"
        )
    more: dict[str, Any] = {
        "parent": settings.parent.model_copy(update={"checkpoint": found.step, "hash": found.hash}),
        "model": _with_rows(settings, parent.settings),
    }
    data, theirs = settings.data, parent.settings.data
    if (
        isinstance(data.tokenizer, SentencePieceSettings)
        and data.tokenizer == theirs.tokenizer
        and data.model_dump(exclude=USE) != theirs.model_dump(exclude=USE)
    ):  # other text with the parent's tokenizer
        more["data"] = data.model_copy(update={"tokenizer": _trained_tokenizer(parent)})
    return settings.model_copy(update=more)


def _trained_tokenizer(parent: ParentRun) -> BaseModel:
    """The settings of the parent's tokenizer, read from the file in its run folder."""
    tokenizer = parent.settings.data.tokenizer
    if not isinstance(tokenizer, SentencePieceSettings):
        return tokenizer
    return tokenizer.model_copy(update={"model": str(parent.folder / "tokenizer" / "tokenizer.model")})


def _with_rows(settings: RunSettings, parent: RunSettings):
    """The model settings with position tables as long as the parent's, by default its train_length."""
    said = settings.model.model_dump(mode="json")
    old = parent.model.model_dump(mode="json")
    for mine, theirs in _each_kind(said["position"], old["position"]):
        if mine["name"] == theirs["name"] and "extend" in mine and mine["max_length"] is None:
            mine["max_length"] = parent.train_length
    return type(settings.model).model_validate(said)


def _each_kind(mine: dict, theirs: dict) -> list[tuple[dict, dict]]:
    """Pairs of positional schemes of the same layer kind, as JSON."""
    if mine["name"] == theirs["name"] == "pattern":
        shared = [kind for kind in mine["kinds"] if kind in theirs["kinds"]]
        return [(mine["kinds"][kind], theirs["kinds"][kind]) for kind in shared]
    return [] if "pattern" in (mine["name"], theirs["name"]) else [(mine, theirs)]


def method_overrides(parent: RunSettings, branch: RunSettings) -> list[str]:
    """The overrides under which the parent computes what the extension run computes at step 0."""
    said = branch.model.model_dump(mode="json")["position"]
    for mine, theirs in _each_kind(said, parent.model.model_dump(mode="json")["position"]):
        if "extend" in mine and "max_length" in theirs:
            mine["max_length"] = theirs["max_length"]
    return [f"model.position={json.dumps(said)}"]


def check_extension(parent: ParentRun, branch: RunSettings) -> None:
    """Check that an extension run can use the parent's weights. Nothing is allocated.

    A change of the scheme's settings must be legal on trained weights; another scheme needs parameters of the
    same names and shapes.
    """
    old, new = parent.settings, branch
    for key in type(old.model).model_fields:
        if key != "position" and getattr(old.model, key) != getattr(new.model, key):
            raise TrainingError(
                f"model.{key} cannot change in an extension run: the weights of {parent.folder} were trained "
                f"with {getattr(old.model, key)}; leave it out"
            )
    ours, theirs = _shapes(new), _shapes(old)
    wrong = [f"{name} is new" for name in ours if name not in theirs]
    wrong += [f"{name} is left over" for name in theirs if name not in ours]
    wrong += [
        f"{name} would have shape {ours[name]}, the parent's has {theirs[name]}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    if wrong:
        raise TrainingError(
            f"model.position: the weights of {parent.folder} do not fit: {'; '.join(wrong[:3])}. An "
            "extension run may change settings of its scheme, or use a scheme with the same parameters"
        )
    if _same_schemes(old, new) and (refusal := not_at_test_time(old, new)):
        raise TrainingError(f"{parent.folder} cannot be extended this way: {refusal}")


def _same_schemes(old: RunSettings, new: RunSettings) -> bool:
    a, b = old.model, new.model
    names = [{kind: choice.name for kind, choice in model.kinds.items()} for model in (a, b)]
    return a.layer_kinds == b.layer_kinds and names[0] == names[1]


def not_at_test_time(parent: RunSettings, branch: RunSettings) -> str:
    """Why the method of the extension run cannot be applied to the parent at test time; '': it can."""
    try:
        override(parent, method_overrides(parent, branch))
    except (ModelError, TrainingError) as error:
        return why(error)
    return ""


def _shapes(settings: RunSettings) -> dict[str, tuple]:
    with torch.device("meta"):
        model = Transformer(settings.model, 1, settings.train_length, settings.original_length)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _remembered(words: list[str], run: str, folder: Path | None, root: Path) -> RunSettings | None:
    """The settings of an existing extension run, from the inherited settings in its own folder."""
    stem = stem_of(words)
    for candidate in [folder] if folder else sorted(root.glob(f"{stem}-*")):
        about = read_manifest(candidate) if is_run(candidate) else {}
        own = about.get("lineage", [{}])[0]
        if own.get("run") != run:
            continue
        kept = RunSettings.model_validate(about["inherited"])
        checkpoint = Checkpoint(Path(run), own["step"], own["checkpoint_hash"])
        parent = ParentRun(Path(run), kept, checkpoint, {}, about["inherited"])
        settings = _completed(load_settings(RunSettings, words, parent.inherited), parent)
        if folder or candidate.name.endswith(f"-{identity(settings)}"):
            return settings
    return None
