"""Checkpoints that are whole or absent, and the newest good one of a run.

A checkpoint is a folder `checkpoints/step-N`: model.safetensors, optimizer.safetensors (moments by weight
name, and the state of the random generators), state.json, and manifest.json with size and SHA-256 of the
others, written last. It is built under a hidden name, forced to the disk and renamed, so its name appears
only when all of it is there. No pickle is written or read.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.average import Average
from training.errors import TrainingError
from training.files import is_disk_full, read_json, sha256_of, sync, write_json
from training.optimizer import clean_name, named_weights

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
AVERAGE = "average.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_MACHINE_FLAGS = ("foreach", "fused", "capturable", "differentiable")  # chosen anew on every machine


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been compared with their hashes."""

    folder: Path
    step: int
    hash: str  # 64 hex digits over step, names and hashes of all files

    @property
    def state(self) -> dict:
        """What the loop saved beside the tensors: step, attempt, tokens and the like."""
        return read_json(self.folder / STATE)["state"]

    @property
    def has_optimizer(self) -> bool:
        return (self.folder / OPTIMIZER).exists()

    @property
    def has_average(self) -> bool:
        return (self.folder / AVERAGE).exists()


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
    keep: int | None = None,
    average: Average | None = None,
) -> Checkpoint:
    """Save a run after `step` updates; called by one process.

    Without an optimizer only weights are saved.  `state` is any JSON object.  Of the older checkpoints the
    newest `keep` − 1 stay (all, if None); those of later steps, which a resumed run has left behind, go.

    Raises TrainingError where the disk is full; the earlier checkpoints are then as they were.
    """
    folder = folder_of(run, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean_leftovers(run)
    building = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        building.mkdir()
        if average is not None:
            save_file(average.tensors(), building / AVERAGE)
        digest = _write(building, step, model, optimizer, state or {})
        _put_in_place(building, folder)
    except (OSError, SafetensorError, TrainingError) as error:
        shutil.rmtree(building, ignore_errors=True)
        if is_disk_full(error):
            raise TrainingError(_no_room(run, step)) from error
        raise
    later_or_old = [old for old in steps_of(run) if old > step]
    if keep is not None:
        later_or_old += [old for old in steps_of(run) if old <= step][:-keep]
    for old in later_or_old:
        _remove(folder_of(run, old))
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
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if is_disk_full(error):
            raise TrainingError(_no_room(run, checkpoint.step)) from error
        raise


def _write(building: Path, step: int, model: nn.Module, optimizer, state: dict) -> str:
    """All files of one checkpoint into a fresh folder, manifest last; returns the hash of the whole."""
    save_file(weights_of(model), building / WEIGHTS)
    options: dict = {}
    if optimizer is not None:
        tensors, options = optimizer_state(model, optimizer)
        save_file(tensors | _generators(), building / OPTIMIZER)
    write_json(building / STATE, {"step": step, "state": state, "optimizer": options})
    files = {}
    for file in sorted(building.iterdir()):
        sync(file)
        files[file.name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
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


def _remove(folder: Path) -> None:
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
        if WEIGHTS not in files or STATE not in files or _digest(manifest) != manifest["hash"]:
            return f"{MANIFEST} is altered"
        if folder != folder_of(folder.parent.parent, manifest["step"]):
            return f"{MANIFEST} is that of step {manifest['step']}"
        for name, wanted in files.items():
            file = folder / name
            if only is not None and name not in only:
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


# Tensors


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights and kept buffers by clean name, on the CPU; tied ones once, under their first name."""
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        found[clean_name(name)] = tensor.detach().cpu().contiguous()
    return found


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises TrainingError naming weights that are missing, unknown or of another shape.
    """
    file = checkpoint.folder / WEIGHTS
    stored = load_file(file)
    own = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    kept = weights_of(model).keys()
    wrong = [f"{name} is missing" for name in kept if name not in stored]
    wrong += [f"{name} is unknown to the model" for name in stored if name not in own]
    wrong += [
        f"{name} has shape {tuple(stored[name].shape)}, the model's {tuple(own[name].shape)}"
        for name in stored
        if name in own and stored[name].shape != own[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise TrainingError(f"{file} does not fit the settings: {'; '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def load_average(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's mean of the weights over a model's weights."""
    stored = load_file(checkpoint.folder / AVERAGE)
    with torch.no_grad():
        for name, weight in named_weights(model):
            weight.copy_(stored[name])


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict]:
    """The optimizer's tensors as `key/weight name`, and as JSON its numbers and options by group."""
    names = {id(weight): name for name, weight in named_weights(model)}
    tensors, numbers = {}, {}
    for weight, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{names[id(weight)]}"] = value.detach().cpu().contiguous()
            else:
                numbers.setdefault(names[id(weight)], {})[key] = value
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and k not in _MACHINE_FLAGS}
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in options.items()}
        groups.append({"weights": [names[id(weight)] for weight in group["params"]], "options": options})
    return tensors, {"groups": groups, "numbers": numbers}


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    average: Average | None = None,
) -> dict:
    """Weights, optimizer, their mean and random generators exactly as saved; returns the loop's state. A mean
    that the checkpoint has not begins with its weights.

    Options of groups are those of the settings, which a fork may change; the learning rate is the saved one.
    Raises TrainingError where the checkpoint holds weights only, or other groups than the optimizer.
    """
    if not checkpoint.has_optimizer:
        raise TrainingError(f"{checkpoint.folder} holds weights only: it can be evaluated, not resumed")
    load_weights(model, checkpoint)
    stored = load_file(checkpoint.folder / OPTIMIZER)
    saved = read_json(checkpoint.folder / STATE)["optimizer"]
    names = {id(weight): name for name, weight in named_weights(model)}
    own = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    if own != [group["weights"] for group in saved["groups"]]:
        raise TrainingError(f"{checkpoint.folder}: its optimizer groups are not those of the settings")
    state: dict[str, dict] = {name: dict(numbers) for name, numbers in saved["numbers"].items()}
    for place, tensor in stored.items():
        key, name = place.split("/", 1)
        if key != "generator":
            state.setdefault(name, {})[key] = tensor
    flat = [name for group in own for name in group]
    groups, start = [], 0
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        current = {key: value for key, value in group.items() if key != "params"}
        options = {
            key: tuple(value) if isinstance(current.get(key), tuple) else value
            for key, value in old["options"].items()
        }
        current |= {key: value for key, value in options.items() if key not in current or key == "lr"}
        groups.append(current | {"params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    optimizer.load_state_dict(
        {"state": {i: state[name] for i, name in enumerate(flat) if name in state}, "param_groups": groups}
    )
    _restore_generators(stored)
    if average is not None:
        means = load_file(checkpoint.folder / AVERAGE) if checkpoint.has_average else None
        average.load(means, checkpoint.step)
    return checkpoint.state


def _generators() -> dict[str, Tensor]:
    """States of torch's generators; the order of the data needs none, but dropout and sampling would."""
    found = {"generator/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"generator/cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def _restore_generators(stored: dict[str, Tensor]) -> None:
    torch.set_rng_state(stored["generator/cpu"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"generator/cuda{i}" in stored:
            torch.cuda.set_rng_state(stored[f"generator/cuda{i}"], i)
