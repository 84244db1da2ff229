"""The first checkpoint of a run that starts from another: the parent's, verified to score as the parent."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from data.files import read_object, write_json
from data.preparation.prepared import USE
from data.sampling.exposure import write_exposure
from errors import TrainingError
from model import ModelSettings, Transformer
from run_directory.run_settings import RunSettings
from training.checkpoint.restore import load_weights
from training.checkpoint.snapshot import weights_of
from training.checkpoint.storage import copy_checkpoint, find_checkpoint, save_checkpoint
from training.exposure import INHERITED, exposure_of
from training.logging.console import Console
from training.optim.optimizer import make_optimizer
from training.run.compatibility import method_of, not_at_test_time
from training.run.directory import MANIFEST, LoadedRun, load
from training.run.parent import ParentRun
from training.stages import TrainingSchedule

# NLL in nats of fixed held-out targets at train_length, (n,)
Score = Callable[[Transformer], np.ndarray]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # nats, of any one target


def write_first_checkpoint(
    folder: Path,
    settings: RunSettings,
    parent: ParentRun | None,
    model: Transformer,
    score: Score,
    console: Console,
) -> None:
    """Write the first checkpoint of an extension run or a fork that has none. Called by one process.

    A fork gets the parent's checkpoint as it is. An extension run gets the parent's weights as step 0, after
    a check that they score as the parent does under the same method.

    Raises TrainingError where the parent is gone, or the scores differ.
    """
    # damaged checkpoints are reported by Checkpointer.resume
    if find_checkpoint(folder) is not None:
        return
    if parent is None:
        raise TrainingError(
            f"{folder} has no checkpoint, and its parent run is gone: restore parent.run"
        )
    if (exposure := exposure_of(parent.folder, parent.checkpoint.step)) is not None:
        write_exposure(folder, exposure, INHERITED)
    if settings.is_fork:
        copy_checkpoint(parent.checkpoint, folder)
        for line in _describe_fork(settings, parent):
            console.info(line)
        return
    load_weights(model, parent.checkpoint)
    found = compare(settings, parent, model, score)
    console.info(describe_comparison(found))
    write_json(
        folder / MANIFEST, read_object(folder / MANIFEST) | {"step0": found}, allow_nan=False
    )
    optimizer = make_optimizer(model, settings.training.optimizer)
    save_checkpoint(folder, 0, model, optimizer, {"step": 0, "tokens": 0})


def groups_before(folder: Path, settings: RunSettings, state: dict) -> list[str]:
    """Hashes of the text groups read before a checkpoint. [] at the first step of a fork to other text, whose
    checkpoint records the parent's groups."""
    used: list[str] = state.get("groups", [])
    if not used or state["step"] != settings.first_step:
        return used
    data = settings.data
    theirs = type(data).model_validate(read_object(folder / MANIFEST)["inherited"]["data"])
    return used if data.model_dump(exclude=USE) == theirs.model_dump(exclude=USE) else []


def compare(settings: RunSettings, parent: ParentRun, model: Transformer, score: Score) -> dict:
    """Score an extension run before its first step, and the parent under the same method through `load`.

    Returns the entry for the manifest; raises TrainingError where the two differ unexpectedly.
    """
    weight = next(model.parameters())
    nll = score(model)
    length = settings.train_length
    found: dict = {
        "length": length,
        "targets": len(nll),
        "nll": float(nll.mean()),
        "parent_under_method": None,
        "largest_difference": None,
        "parent_as_trained": None,
        "not_compared": not_at_test_time(parent.settings, settings),
    }

    def loaded(method: ModelSettings | tuple = ()) -> LoadedRun:
        step = parent.checkpoint.step
        return load(parent.folder, method, weight.device, weight.dtype, step, weights="last")

    def scored(own: Transformer) -> np.ndarray | None:
        return score(own) if own.limit is None or own.limit >= length else None

    plain = scored(loaded().model)
    found["parent_as_trained"] = None if plain is None else float(plain.mean())
    if found["not_compared"]:
        return found
    under_method = scored(loaded(method_of(parent.settings, settings)).model)
    if under_method is None:
        return found | {"not_compared": f"its positions end before {length}"}
    largest = float(np.abs(under_method - nll).max())
    found |= {"parent_under_method": float(under_method.mean()), "largest_difference": largest}
    if largest > TOLERANCE[weight.dtype]:
        measured, own = (s.original_length or s.train_length for s in (parent.settings, settings))
        ours = weights_of(model)
        theirs = weights_of(loaded().model)
        is_copy = ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )
        if measured != own and is_copy:  # the one setting that has no test-time override
            return found | {"not_compared": f"its original_length is {measured}, not {own}"}
        raise TrainingError(
            f"at step 0 the extension run scores {nll.mean():.6f} at {length} tokens, and {parent.folder} "
            f"under the same method {under_method.mean():.6f} (one target differs by {largest:.2g}): the "
            "weights were not copied correctly; this is a bug, please report it"
        )
    return found


def describe_comparison(found: dict) -> str:
    """The result of `compare` as one line."""
    start = f"step 0: NLL {found['nll']:.4f} on {found['targets']:,} targets at {found['length']} tokens"
    trained = found["parent_as_trained"]
    plain = (
        "the parent as trained has no such positions"
        if trained is None
        else f"as trained {trained:.4f}"
    )
    if found["not_compared"]:
        return f"{start} ({plain}); not compared with the parent under this method: {found['not_compared']}"
    most = found["largest_difference"]
    return f"{start}, as the parent under this method (largest difference {most:.1g}; {plain})"


def _describe_fork(settings: RunSettings, parent: ParentRun) -> list[str]:
    """Lines about a fork: its parent, changed settings, learning rates, and whether the parent's learning
    rates before it differ from those of its own settings."""
    step = parent.checkpoint.step
    lines = [
        f"fork of {parent.folder}: continues after step {step} with its optimizer and data order"
    ]
    lines += [f"changed in the fork: {text}" for text in parent.changed(settings)]
    lines += changed_rates(settings, parent)
    old = TrainingSchedule(parent.settings)
    new = TrainingSchedule(settings)
    first = next((i for i in range(step) if old.learning_rates(i) != new.learning_rates(i)), None)
    if first is not None:
        lines.append(
            f"learning rates before it differ from those of its settings from step {first + 1} on"
        )
    return lines


def changed_rates(settings: RunSettings, parent: ParentRun) -> list[str]:
    """The learning rates of the first update after a fork that differ by more than 1% from those of the
    parent at that step, or at its end."""
    step = parent.checkpoint.step
    last = min(step, parent.settings.steps - 1)
    before = TrainingSchedule(parent.settings).learning_rates(last)
    there = str(parent.folder) if last == step else f"{parent.folder} at its end"
    return [
        f"{'learning rate' if name == 'lr' else name} at step {step + 1}: {before[name]:.3g} in {there}, "
        f"{rate:.3g} here"
        for name, rate in TrainingSchedule(settings).learning_rates(step).items()
        if name in before and abs(rate - before[name]) > 0.01 * before[name]
    ]
