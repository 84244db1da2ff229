"""Atomic checkpoints, and search for the newest one of a run.

A checkpoint is a folder `checkpoints/step-N`: model.safetensors, optimizer.safetensors (moments by
parameter name, and the state of the random generators), state.json, and manifest.json with size and
SHA-256 of the other files, written last. It is written under a hidden name, flushed to the disk and
renamed, so its name appears only when it is complete. No pickle is written or read. Every process
of a sharded model writes its own file (model-00001-of-00002.safetensors); rank 0 writes the
manifest and renames the folder.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor, nn

from data.files import read_object, sha256_of, sync, write_json
from errors import TrainingError, is_disk_full
from run_directory.process_group import ALONE, ProcessGroup, error_barrier
from run_directory.training_settings import CheckpointSettings
from run_directory.weights import (
    flaw,
    own_part,
    weights_of,
    whole_name,
    write_tensors,
)

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_STATE = {"step": int, "state": dict}
_MAX_READS = 100  # attempts to read a checkpoint that is replaced during the read
T = TypeVar("T")
Tensors = Mapping[str, Mapping[str, Tensor]]  # by kind and name


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their hashes."""

    folder: Path
    step: int
    hash: str  # 64 hex digits over the step, and the names and hashes of all files

    @property
    def state(self) -> dict:
        """The state of the training loop: step, tokens and the like."""
        return read_object(self.folder / STATE, _STATE)["state"]

    def check_resumable(self) -> None:
        """Raise TrainingError if the checkpoint contains only weights."""
        if not self.has(OPTIMIZER):
            raise TrainingError(
                f"{self.folder} contains only weights: it can be evaluated, but not resumed"
            )

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this file, or one such file of every process."""
        return any(whole_name(file.name) == name for file in self.folder.iterdir())

    def hash_of(self, weights: str | None) -> str:
        """`hash`, or another one for the last weights if the checkpoint has EMA weights, which are
        its default."""
        is_other = weights == "last" and self.has(AVERAGE)
        return sha256_of(f"last {self.hash}") if is_other else self.hash


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def steps_of(run: Path) -> list[int]:
    """The steps of all checkpoints of a run, good or damaged, ascending."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def save_checkpoint(
    run: Path,
    step: int,
    tensors: Tensors,
    state: dict | None = None,
    group: ProcessGroup = ALONE,
) -> Checkpoint:
    """Save a checkpoint. Every process of the `group` must call it. Other checkpoints do not
    change.

    Args:
        step: number of updates of the weights so far.
        tensors: tensors by kind ("model"; "optimizer" and "average" if they are saved) and by name.
            Names of kind "optimizer" are `key/parameter name`, or those of random generators'
            states.
        state: state of the training loop, as JSON.

    Raises TrainingError if the disk is full, or if a number is not finite, so that an unusable
    checkpoint never replaces a good one. An error on one process of the group is raised on all.
    """
    folder = folder_of(run, step)
    digest = ""
    with _draft(run, step, group) as draft:
        with error_barrier(group, "save"):
            written = _write_tensors(run, step, draft, tensors, group)
        parts = group.gather(written)
        with error_barrier(group, "save"):
            if group.rank == 0:
                write_json(draft / STATE, {"step": step, "state": state or {}}, allow_nan=False)
                files = _recorded(draft / STATE)
                for part in parts:
                    files |= part
                manifest = {"format": 1, "step": step, "files": dict(sorted(files.items()))}
                digest = _hash_of(manifest)
                write_json(draft / MANIFEST, manifest | {"hash": digest}, allow_nan=False)
                _put_in_place(draft, folder)
    return Checkpoint(folder, step, group.gather(digest)[0])


def save_weights(run: Path, step: int, model: nn.Module, state: dict | None = None) -> Checkpoint:
    """Save a checkpoint of a run with weights only, for generation and evaluation.

    Args:
        state: what the checkpoint records, any JSON object.
    """
    return save_checkpoint(run, step, {"model": weights_of(model)}, state)


def copy_checkpoint(checkpoint: Checkpoint, run: Path) -> None:
    """Copy a checkpoint, byte for byte, to another run; called by one process."""
    with _draft(run, checkpoint.step, ALONE) as draft:
        shutil.copytree(checkpoint.folder, draft, dirs_exist_ok=True)
        for file in draft.iterdir():
            sync(file)
        _put_in_place(draft, folder_of(run, checkpoint.step))


@contextmanager
def _draft(run: Path, step: int, group: ProcessGroup) -> Iterator[Path]:
    """The new folder in which a checkpoint is built; removed after an error."""
    draft = folder_of(run, step).with_name(f".writing-step-{step:08d}")
    try:
        with error_barrier(group, "save"):
            if group.rank == 0:
                clean_leftovers(run)
                draft.mkdir(parents=True)
        yield draft
    except Exception as error:
        if group.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        if is_disk_full(error):
            free = shutil.disk_usage(run).free / 1e6
            raise TrainingError(
                f"{run}: disk full ({free:.0f} MB free) while saving step {step}; {_kept(run)}. "
                "Make room, then run the same command again to resume"
            ) from error
        raise


def _write_tensors(
    run: Path, step: int, draft: Path, tensors: Tensors, group: ProcessGroup
) -> dict[str, dict]:
    """Write this process's files of tensors; returns size and hash of each."""
    written = {}
    for kind, named in tensors.items():
        for name, tensor in named.items():
            if (wrong := flaw(own_part(tensor), kind)) is not None:
                raise TrainingError(
                    f"{run}: step {step} is not saved, because {name} {wrong}; {_kept(run)}. The "
                    "training has diverged: lower training.optimizer.lr or training.grad_clip in a "
                    "new run"
                )
        if (file := write_tensors(draft, kind, named, group)) is not None:
            written |= _recorded(file)
    return written


def _recorded(file: Path) -> dict[str, dict]:
    """Flush a file to the disk; returns its entry in the manifest."""
    sync(file)
    return {file.name: {"sha256": sha256_of(file), "bytes": file.stat().st_size}}


def _hash_of(manifest: dict) -> str:
    """SHA-256 of a manifest without its own hash."""
    hashed = {key: value for key, value in manifest.items() if key != "hash"}
    return sha256_of(json.dumps(hashed, sort_keys=True))


def _put_in_place(draft: Path, folder: Path) -> None:
    if folder.exists():  # it is damaged: the run resumed from an earlier checkpoint
        remove_checkpoint(folder)
    os.rename(draft, folder)
    sync(folder.parent)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so an interruption leaves no damaged checkpoint."""
    away = folder.with_name(f".deleting-{folder.name}")
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def clean_leftovers(run: Path) -> None:
    """Remove the files of interrupted writes.

    Only the process that trains the run may call it: any other could remove a checkpoint that is
    being written.
    """
    for path in list((run / "checkpoints").glob(".*")):
        shutil.rmtree(path, ignore_errors=True)


def _kept(run: Path) -> str:
    step = newest_intact(run)
    return "there is no earlier checkpoint" if step is None else f"step {step} is intact"


def prune(run: Path, step: int, settings: CheckpointSettings | None) -> None:
    """Remove the checkpoints after `step`, left from before the run was resumed, and those that the
    settings do not keep (None: all are kept). One process calls it after `step` is saved."""
    steps = steps_of(run)
    kept = [saved for saved in steps if saved <= step]
    if settings is not None:
        interval = settings.keep_interval
        regular = [saved for saved in kept if interval is not None and saved % interval == 0]
        kept = regular + kept[-settings.keep :]
    for saved in steps:
        if saved not in kept:
            remove_checkpoint(folder_of(run, saved))


# Finding checkpoints


def find_damage(folder: Path, only: tuple[str, ...] | None = None) -> str | None:
    """A description of the damage of a checkpoint; None if it is intact. `only`: the files to
    verify; None: all."""
    try:
        manifest = read_object(folder / MANIFEST)
        files = dict(manifest["files"])
        is_complete = {WEIGHTS, STATE} <= {whole_name(name) for name in files}
        if not is_complete or _hash_of(manifest) != manifest["hash"]:
            return f"{MANIFEST} is altered"
        if folder != folder_of(folder.parent.parent, manifest["step"]):
            return f"{MANIFEST} belongs to step {manifest['step']}"
        for name, wanted in files.items():
            file = folder / name
            if only is not None and whole_name(name) not in only:
                continue
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != wanted["bytes"]:
                return f"{name} has {size} bytes instead of {wanted['bytes']}"
            if sha256_of(file) != wanted["sha256"]:
                return f"{name} is altered: its content does not match its hash"
        read_object(folder / STATE, _STATE)
    except (TrainingError, OSError) as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST} is altered"
    return None


def find_checkpoint(
    run: Path,
    step: int | None = None,
    only: tuple[str, ...] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint of a run, or the one of `step`; None if there is none yet.

    Args:
        only: the files to verify; None: all.
        warn: called with a warning if the newest checkpoint is damaged; the newest intact one is
            then returned. None: a damaged checkpoint is an error.

    Raises TrainingError if `step` is missing, or if the checkpoint is damaged. Writes nothing, as
    another process may be training the run.
    """

    def find() -> Checkpoint | None:
        steps = steps_of(run)
        if not steps and step is None:
            return None
        if step not in (None, *steps):
            known = ", ".join(map(str, steps)) or "none"
            raise TrainingError(f"{run} has no checkpoint of step {step}; it has {known}")
        found = steps[-1] if step is None else step
        folder = folder_of(run, found)
        if (problem := find_damage(folder, only)) is not None:
            if not folder.exists():
                raise FileNotFoundError(f"{folder} was removed while it was read")
            found = newest_intact(run, only)
            if found is None:
                raise TrainingError(
                    f"{folder}: {problem}; no checkpoint of the run is intact: restore one, or "
                    "train again from step 0 (--restart)"
                )
            if warn is None or step is not None:
                raise TrainingError(
                    f"{folder}: {problem}; restore it, or move that folder away to use step "
                    f"{found}, which is intact"
                )
            warn(f"{folder}: {problem}; going back to step {found}")
            folder = folder_of(run, found)
        return Checkpoint(folder, found, read_object(folder / MANIFEST)["hash"])

    return while_training(run, find)


def while_training(run: Path, read: Callable[[], T]) -> T:
    """The result of `read`, which reads checkpoints of a run. Repeats it if it failed because the
    training process replaced one of them."""

    def listed() -> dict[str, int]:
        try:
            return {entry.name: entry.inode() for entry in os.scandir(run / "checkpoints")}
        except FileNotFoundError:
            return {}

    for _ in range(_MAX_READS):
        before = listed()
        try:
            return read()
        except (TrainingError, OSError, SafetensorError):
            if listed() == before:
                raise
    raise TrainingError(
        f"{run}: checkpoints are replaced too fast to be read; raise training.checkpoint.keep"
    )


def newest_intact(run: Path, only: tuple[str, ...] | None = None) -> int | None:
    """The step of the newest intact checkpoint of a run; None if there is none."""
    steps = reversed(steps_of(run))
    return next((step for step in steps if find_damage(folder_of(run, step), only) is None), None)
