"""Checkpoints that are whole or absent, and the newest good one of a run.

A checkpoint is a folder `checkpoints/step-N`: model.safetensors, optimizer.safetensors (moments by weight
name, and the state of the random generators), state.json, and manifest.json with size and SHA-256 of the
others, written last. It is built under a hidden name, forced to the disk and renamed, so its name appears
only when all of it is there. No pickle is written or read. Where the model is sharded every process writes a
file of its own (model-00001-of-00002.safetensors), and rank 0 puts manifest and name to them all.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from training.average import Average
from training.errors import TrainingError
from training.files import is_disk_full, read_json, sha256_of, sync, write_json
from training.group import ALONE, Group, as_one, on_all
from training.image import Image, capture
from training.sharded import Part, is_sharded, whole_name, wholes, write_part

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
AVERAGE = "average.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been compared with their hashes."""

    folder: Path
    step: int
    hash: str  # 64 hex digits over step, names and hashes of all files

    @property
    def state(self) -> dict:
        """What the loop saved beside the tensors: step, tokens and the like."""
        return read_json(self.folder / STATE)["state"]

    @property
    def has_optimizer(self) -> bool:
        return any(whole_name(name) == OPTIMIZER for name in self.names)

    @property
    def names(self) -> list[str]:
        """Of its files."""
        return sorted(file.name for file in self.folder.iterdir())

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.names)

    @property
    def has_average(self) -> bool:
        return any(whole_name(name) == AVERAGE for name in self.names)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def steps_of(run: Path) -> list[int]:
    """Steps of all checkpoints of a run, good or not, in order."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict | None = None,
    average: Average | None = None,
    group: Group = ALONE,
) -> Checkpoint:
    """Save a run after `step` updates; called by one process, or by every one of the `group` that shares a
    sharded model.

    Without an optimizer only weights are saved.  `state` is any JSON object.  Other checkpoints stay as they
    are.

    Raises TrainingError where the disk is full; whatever fails on one process of the group fails on all.
    """
    with as_one(group, "save"):
        image = capture(model, optimizer, average)
    return save_image(run, step, image, state or {}, group)


def save_image(run: Path, step: int, image: Image, state: dict, group: Group = ALONE) -> Checkpoint:
    """`save_checkpoint` of what was captured before."""
    folder, main = folder_of(run, step), group.rank == 0
    building = folder.with_name(f".writing-{folder.name}-{group.gather(os.getpid())[0]}")

    def begin() -> None:
        if main:
            folder.parent.mkdir(parents=True, exist_ok=True)
            clean_leftovers(run)
            building.mkdir()

    def finish() -> str:
        if not main:
            return ""
        digest = _seal(building, step, {name: about for part in parts for name, about in part.items()})
        _put_in_place(building, folder)
        return digest

    try:
        on_all(group, "save", begin)
        parts = on_all(group, "save", lambda: _write(building, step, image, state, group))
        digest = on_all(group, "save", finish)[0]
    except Exception as error:
        if main:
            shutil.rmtree(building, ignore_errors=True)
        if is_disk_full(error):
            raise TrainingError(_no_room(run, step)) from error
        raise
    return Checkpoint(folder, step, digest)


def save_weights_only(run: Path, model: nn.Module, step: int = 0, state: dict | None = None) -> Checkpoint:
    """A checkpoint to generate and evaluate from, not to resume: how imported weights become a run."""
    return save_checkpoint(run, step, model, None, state)


def copy_checkpoint(checkpoint: Checkpoint, run: Path) -> None:
    """Give another run a checkpoint as it is, byte for byte; called by one process."""
    folder = folder_of(run, checkpoint.step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean_leftovers(run)
    building = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        shutil.copytree(checkpoint.folder, building)
        for file in building.iterdir():
            sync(file)
        _put_in_place(building, folder)
    except OSError:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write(building: Path, step: int, image: Image, state: dict, group: Group) -> dict[str, dict]:
    """This process's files of one checkpoint into its folder; hash and size of each."""

    def put(kind: str, held: dict[str, Tensor | Part]) -> Path:
        if group.world > 1:
            return write_part(building, kind, held, group.rank, group.world)
        save_file(wholes(held), building / f"{kind}.safetensors")
        return building / f"{kind}.safetensors"

    written = [put("model", image.weights)]
    if image.optimizer is not None:
        written.append(put("optimizer", image.optimizer))
    if image.average is not None:
        written.append(put("average", image.average))
    if group.rank == 0:
        write_json(building / STATE, {"step": step, "state": state, "optimizer": image.options})
        written.append(building / STATE)
    files = {}
    for file in written:
        sync(file)
        files[file.name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
    return files


def _seal(building: Path, step: int, files: dict[str, dict]) -> str:
    """The manifest of files that are written; returns the hash of the whole."""
    files = dict(sorted(files.items()))
    manifest = {"format": 1, "step": step, "files": files}
    manifest["hash"] = _digest(manifest)
    write_json(building / MANIFEST, manifest)
    return manifest["hash"]


def _digest(manifest: dict) -> str:
    """SHA-256 over everything a manifest says but the hash itself."""
    said = {key: value for key, value in manifest.items() if key != "hash"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _put_in_place(building: Path, folder: Path) -> None:
    old = folder.with_name(f".replaced-{folder.name}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(building, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so a kill midway leaves nothing that looks damaged."""
    away = folder.with_name(f".deleting-{folder.name}")
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def clean_leftovers(run: Path) -> None:
    """Remove what killed writes left; a checkpoint caught while being replaced gets its name back.

    Only for the process that trains the run: what it removes may be another's checkpoint being written.
    """
    folder = run / "checkpoints"
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".replaced-") and not (home := path.with_name(path.name[10:])).exists():
            os.rename(path, home)
        elif path.name.startswith((".writing-", ".deleting-", ".replaced-")):
            shutil.rmtree(path, ignore_errors=True)


def _no_room(run: Path, step: int) -> str:
    free = shutil.disk_usage(run).free / 1e6
    good = next((old for old in reversed(steps_of(run)) if damage(folder_of(run, old)) is None), None)
    kept = "there is no earlier one" if good is None else f"step {good} is intact"
    return (
        f"{run}: disk full ({free:.0f} MB free) while saving step {step}; {kept}. "
        f"Make room, then run the same command again to go on from there"
    )


# Finding


def damage(folder: Path, only: tuple[str, ...] | None = None) -> str | None:
    """What is wrong with a checkpoint, in words, or None; `only` these of its files are read."""
    try:
        manifest = read_json(folder / MANIFEST)
        files = dict(manifest["files"])
        if (
            not {WEIGHTS, STATE} <= {whole_name(name) for name in files}
            or _digest(manifest) != manifest["hash"]
        ):
            return f"{MANIFEST} is altered"
        if folder != folder_of(folder.parent.parent, manifest["step"]):
            return f"{MANIFEST} is that of step {manifest['step']}"
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
    except (TrainingError, OSError) as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST} is altered"
    return None


def find_checkpoint(
    run: Path, console=None, step: int | None = None, only: tuple[str, ...] | None = None
) -> Checkpoint | None:
    """The newest good checkpoint of a run, or that of `step`; None where there is none yet.

    Damaged ones are passed over with a warning that says what is wrong.  Raises TrainingError where `step` is
    missing or damaged, and where every checkpoint is damaged.  Changes nothing: the run may be in training.
    """
    steps = steps_of(run)
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise TrainingError(f"{run} has no checkpoint of step {step}; it has {known}")
    wrong = []
    for candidate in [step] if step is not None else reversed(steps):
        folder = folder_of(run, candidate)
        problem = damage(folder, only)
        if problem is None:
            if wrong and console is not None:
                console.warn(f"{'; '.join(wrong)}; going back to step {candidate}")
            return Checkpoint(folder, candidate, read_json(folder / MANIFEST)["hash"])
        wrong.append(f"{folder}: {problem}")
    if wrong:
        mend = "restore one, or train anew with --fresh"
        raise TrainingError(f"no good checkpoint is left: {'; '.join(wrong)}; {mend}")
    return None
