"""Context-extension branches: runs that go on from another run's checkpoint, under a new rule or length.

A branch is a run like any other once its folder is made: it holds the parent's weights as its own step 0, the
tokenizer, and what it inherited, so that the parent may vanish. What it does not say is as in the parent, but
for four things: stretches are measured from the parent's length, the seed is the next one (another order of
the text), changes on the way have happened already, and the optimizer starts afresh.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from data.preparation import USE
from data.settings import SentencePieceSettings
from model import ModelError, Transformer
from training.checkpoint import WEIGHTS, Checkpoint, find_checkpoint
from training.config import asked_for, identity, load_settings
from training.errors import TrainingError
from training.files import read_json
from training.fork import check_fork, check_groups, tree_of
from training.overrides import override, why
from training.run import MANIFEST, changed, is_run, not_a_run, read_settings, stem_of
from training.settings import RunSettings
from training.stages import last_trained


@dataclass(frozen=True)
class Parent:
    """A run and the checkpoint of it that a branch goes on from."""

    folder: Path
    settings: RunSettings  # as that checkpoint was last trained; for a fork, of its whole run
    checkpoint: Checkpoint
    about: dict  # the run's manifest
    inherited: dict  # the tree a branch's settings are laid over

    def lineage(self, branch: RunSettings) -> list[dict]:
        """The line of checkpoints behind a branch, nearest first: JSON for its manifest."""
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
        """Every setting that differs in the branch, in words."""
        return [text for text in changed(self.settings, branch) if not text.startswith("parent")]


def read_run_settings(
    words: Sequence[str], folder: Path | None = None, root: Path = Path("runs")
) -> tuple[RunSettings, Parent | None]:
    """The settings of a run from files and words; those of a branch laid over its parent's.

    The parent is None for a run from nothing, and for a branch whose folder exists (`folder`, or the one
    under `root` these words lead to) and whose parent is gone.

    Raises:
        ConfigError: settings that do not hold.
        TrainingError: the parent is no run, has no such checkpoint, or cannot become what is asked for.
    """
    words = list(words)
    asked = asked_for(words, "parent")
    if asked is None:
        return load_settings(RunSettings, words), None
    if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
        raise TrainingError("parent.run must be given: write parent.run=FOLDER, the run to go on from")
    if folder is not None and folder.resolve() == Path(asked["run"]).resolve():
        raise TrainingError(f"{folder} cannot be a branch of itself: give another --folder")
    try:
        parent = open_parent(Path(asked["run"]), asked.get("checkpoint"), bool(asked.get("fork")))
    except TrainingError:
        if (settings := _remembered(words, asked["run"], folder, root)) is not None:
            return settings, None
        raise
    settings = _completed(load_settings(RunSettings, words, parent.inherited), parent)
    if settings.parent is not None and settings.parent.fork:
        old, tokenizer = parent.settings, _trained_tokenizer(parent)
        if settings.data.tokenizer == tokenizer:  # the same, as other text names it
            old = old.model_copy(update={"data": old.data.model_copy(update={"tokenizer": tokenizer})})
        check_fork(parent.folder, parent.checkpoint.step, old, settings)
        check_groups(parent.folder, parent.checkpoint, settings)
    else:
        check_branch(parent, settings)
    return settings, parent


def open_parent(folder: Path, step: int | None = None, fork: bool = False) -> Parent:
    """A run's checkpoint (None: the newest good one) as the start of a branch or a fork."""
    if not is_run(folder):
        raise TrainingError(f"parent.run: {not_a_run(folder)}")
    found = find_checkpoint(folder, None, step, only=None if fork else (WEIGHTS,))
    if found is None:
        raise TrainingError(f"parent.run: {folder} has no checkpoint yet; train it first")
    whole = read_settings(folder)
    if fork:
        return Parent(folder, whole, found, read_json(folder / MANIFEST), tree_of(whole))
    settings, _ = last_trained(whole, found.step)
    tree = settings.model_dump(mode="json")
    tree |= {"original_length": settings.original_length or settings.train_length}
    tree |= {"seed": settings.seed + 1, "parent": None}
    tree["training"] |= {"changes": [], "stages": []}
    return Parent(folder, settings, found, read_json(folder / MANIFEST), tree)


def _completed(settings: RunSettings, parent: Parent) -> RunSettings:
    """With what only the parent knows: its checkpoint's hash, the rows of its tables, its tokenizer."""
    assert settings.parent is not None
    stated, found = settings.parent.hash, parent.checkpoint
    if stated is not None and stated != found.hash:
        raise TrainingError(
            f"parent.hash is {stated[:12]}, and checkpoint {found.step} of {parent.folder} has "
            f"{found.hash[:12]}: it is not the one this branch goes on from"
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
    ):  # other text, the parent's tokens
        more["data"] = data.model_copy(update={"tokenizer": _trained_tokenizer(parent)})
    return settings.model_copy(update=more)


def _trained_tokenizer(parent: Parent) -> BaseModel:
    """The settings of the parent's tokenizer, as the file that its run has kept."""
    tokenizer = parent.settings.data.tokenizer
    if not isinstance(tokenizer, SentencePieceSettings):
        return tokenizer
    return tokenizer.model_copy(update={"model": str(parent.folder / "tokenizer" / "tokenizer.model")})


def _with_rows(settings: RunSettings, parent: RunSettings):
    """The model with tables as long as the parent's, which its train_length decided if nothing else did."""
    said = settings.model.model_dump(mode="json")
    old = parent.model.model_dump(mode="json")
    for mine, theirs in _each_kind(said["position"], old["position"]):
        if mine["name"] == theirs["name"] and "extend" in mine and mine["max_length"] is None:
            mine["max_length"] = parent.train_length
    return type(settings.model).model_validate(said)


def _each_kind(mine: dict, theirs: dict) -> list[tuple[dict, dict]]:
    """Schemes of the same kinds of layers of two positions, as JSON."""
    if mine["name"] == theirs["name"] == "pattern":
        shared = [kind for kind in mine["kinds"] if kind in theirs["kinds"]]
        return [(mine["kinds"][kind], theirs["kinds"][kind]) for kind in shared]
    return [] if "pattern" in (mine["name"], theirs["name"]) else [(mine, theirs)]


def rule_words(parent: RunSettings, branch: RunSettings) -> list[str]:
    """The words under which the parent is evaluated as the branch begins."""
    said = branch.model.model_dump(mode="json")["position"]
    for mine, theirs in _each_kind(said, parent.model.model_dump(mode="json")["position"]):
        if "extend" in mine and "max_length" in theirs:
            mine["max_length"] = theirs["max_length"]
    return [f"model.position={json.dumps(said)}"]


def check_branch(parent: Parent, branch: RunSettings) -> None:
    """Refuse what the parent's weights cannot go on as. Nothing is allocated.

    A change of the scheme's own settings must be legal on trained weights; another scheme needs weights of
    the same names and shapes.
    """
    old, new = parent.settings, branch
    for key in type(old.model).model_fields:
        if key != "position" and getattr(old.model, key) != getattr(new.model, key):
            raise TrainingError(
                f"model.{key} cannot differ in a branch: its weights are those of {parent.folder}, trained "
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
            f"model.position: the weights of {parent.folder} do not fit: {'; '.join(wrong[:3])}. A branch "
            "may change settings of its scheme, or take a scheme that learns the same tables"
        )
    if _same_schemes(old, new) and (refusal := not_at_test_time(old, new)):
        raise TrainingError(f"{parent.folder} cannot go on so: {refusal}")


def _same_schemes(old: RunSettings, new: RunSettings) -> bool:
    a, b = old.model, new.model
    names = [{kind: choice.name for kind, choice in model.kinds.items()} for model in (a, b)]
    return a.layer_kinds == b.layer_kinds and names[0] == names[1]


def not_at_test_time(parent: RunSettings, branch: RunSettings) -> str:
    """Why the branch's rule cannot be laid over the parent without training; '' where it can."""
    try:
        override(parent, rule_words(parent, branch))
    except (ModelError, TrainingError) as error:
        return why(error)
    return ""


def _shapes(settings: RunSettings) -> dict[str, tuple]:
    with torch.device("meta"):
        model = Transformer(settings.model, 1, settings.train_length, settings.original_length)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _remembered(words: list[str], run: str, folder: Path | None, root: Path) -> RunSettings | None:
    """The settings of a branch that exists already, over what its own folder has kept of its parent."""
    stem = stem_of(words)
    for candidate in [folder] if folder else sorted(root.glob(f"{stem}-*")):
        about = read_json(candidate / MANIFEST) if is_run(candidate) else {}
        own = about.get("lineage", [{}])[0]
        if own.get("run") != run:
            continue
        kept = RunSettings.model_validate(about["inherited"])
        checkpoint = Checkpoint(Path(run), own["step"], own["checkpoint_hash"])
        parent = Parent(Path(run), kept, checkpoint, {}, about["inherited"])
        settings = _completed(load_settings(RunSettings, words, parent.inherited), parent)
        if folder or candidate.name == f"{stem}-{identity(settings)}":
            return settings
    return None
