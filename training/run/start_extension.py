"""Start an extension run or a fork: copy the parent's checkpoint and verify that it scores as the parent."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from data import PreparedData
from data.preparation.prepare import USE
from data.sampling.exposure import write_exposure
from model import Transformer
from training.checkpoint.restore import load_weights
from training.checkpoint.snapshot import weights_of
from training.checkpoint.storage import copy_checkpoint, find_checkpoint, save_checkpoint
from training.config.settings import RunSettings
from training.errors import TrainingError
from training.exposure import INHERITED, exposure_of
from training.files import read_json, write_json
from training.logging.console import Console
from training.optim.optimizer import make_optimizer
from training.run.directory import MANIFEST, load
from training.run.extension import ParentRun, method_overrides, not_at_test_time
from training.run.fork import first_other_rate, rates_in_words

Score = Callable[[Transformer], np.ndarray]  # NLL in nats of fixed held-out targets at train_length, (n,)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # nats, of any one target


def check_text(settings: RunSettings, prepared: PreparedData, tokenizer_hash: str) -> None:
    """Check that the text has the parent's tokenizer and, in an extension run, a document of train_length."""
    found, longest = prepared.tokenizer.hash, prepared.longest
    if found != tokenizer_hash:
        raise TrainingError(
            f"{prepared.folder} was made with another tokenizer ({found[:12]}) than the parent's "
            f"({tokenizer_hash[:12]}): set data.tokenizer as in the parent"
        )
    is_fork = settings.parent is not None and settings.parent.fork
    if longest < settings.train_length and not is_fork:
        raise TrainingError(
            f"train_length {settings.train_length} is longer than every document of {prepared.train.folder} "
            f"(the longest has {longest:,} tokens): no text has the new length; lower train_length"
        )


def start_extension(
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
    if find_checkpoint(folder) is not None:  # damaged checkpoints are reported by Checkpointer.resume
        return
    if parent is None:
        raise TrainingError(f"{folder} has no checkpoint, and its parent run is gone: restore parent.run")
    shown = exposure_of(parent.folder, parent.checkpoint.step)
    if shown is not None:
        write_exposure(folder, shown, INHERITED)
    if settings.parent is not None and settings.parent.fork:
        copy_checkpoint(parent.checkpoint, folder)
        for line in fork_in_words(settings, parent):
            console.info(line)
        return
    load_weights(model, parent.checkpoint)
    found = compare(settings, parent, model, score)
    console.info(in_words(found))
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | {"step0": found})
    optimizer = make_optimizer(model, settings.training.optimizer)
    save_checkpoint(folder, 0, model, optimizer, {"step": 0, "tokens": 0})


def groups_behind(folder: Path, settings: RunSettings, state: dict) -> list[str]:
    """Hashes of the text groups read before a checkpoint. [] at the first step of a fork to other text, whose
    checkpoint records the parent's groups."""
    used: list[str] = state.get("groups", [])
    if not used or state["step"] != settings.first_step:
        return used
    data = settings.data
    theirs = type(data).model_validate(read_json(folder / MANIFEST)["inherited"]["data"])
    return used if data.model_dump(exclude=USE) == theirs.model_dump(exclude=USE) else []


def compare(settings: RunSettings, parent: ParentRun, model: Transformer, score: Score) -> dict:
    """Score an extension run before its first step, and the parent under the same method through `load`.

    Returns the entry for the manifest; raises TrainingError where the two differ unexpectedly.
    """
    weight = next(model.parameters())
    nll = score(model)
    found: dict = {
        "length": settings.train_length,
        "targets": len(nll),
        "nll": float(nll.mean()),
        "parent_under_rule": None,
        "largest_difference": None,
        "parent_as_trained": None,
        "not_compared": not_at_test_time(parent.settings, settings),
    }

    step = parent.checkpoint.step

    def of_parent(words: list[str]) -> np.ndarray | None:
        own = load(parent.folder, words, weight.device, weight.dtype, step, weights="last").model
        return score(own) if own.limit is None or own.limit >= settings.train_length else None

    plain = of_parent([])
    found["parent_as_trained"] = None if plain is None else float(plain.mean())
    if found["not_compared"]:
        return found
    under_rule = of_parent(method_overrides(parent.settings, settings))
    if under_rule is None:
        return found | {"not_compared": f"its positions end before {settings.train_length}"}
    largest = float(np.abs(under_rule - nll).max())
    found |= {"parent_under_rule": float(under_rule.mean()), "largest_difference": largest}
    if largest > TOLERANCE[weight.dtype]:
        measured = parent.settings.original_length or parent.settings.train_length
        own = settings.original_length or settings.train_length
        ours = weights_of(model)
        theirs = weights_of(load(parent.folder, [], weight.device, weight.dtype, step, weights="last").model)
        if measured != own and _equal(ours, theirs):  # the one setting that has no test-time override
            return found | {"not_compared": f"its original_length is {measured}, not {own}"}
        raise TrainingError(
            f"at step 0 the extension run scores {nll.mean():.6f} at {settings.train_length} tokens, and "
            f"{parent.folder} under the same method {under_rule.mean():.6f} (one target differs by "
            f"{largest:.2g}): the weights were not copied correctly; this is a bug, please report it"
        )
    return found


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models hold the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_words(found: dict) -> str:
    """The result of `compare` as one line."""
    begins = f"step 0: NLL {found['nll']:.4f} on {found['targets']:,} targets at {found['length']} tokens"
    trained = found["parent_as_trained"]
    beside = "the parent as trained has no such positions" if trained is None else f"as trained {trained:.4f}"
    if found["not_compared"]:
        return f"{begins} ({beside}); not compared with the parent under this method: {found['not_compared']}"
    most = found["largest_difference"]
    return f"{begins}, as the parent under this method (largest difference {most:.1g}; {beside})"


def fork_in_words(settings: RunSettings, parent: ParentRun) -> list[str]:
    """Lines about a fork: its parent, changed settings, learning rates, and whether the parent's learning
    rates before it differ from those of its own settings."""
    step = parent.checkpoint.step
    lines = [f"fork of {parent.folder}: continues after step {step} with its optimizer and data order"]
    lines += [f"changed in the fork: {text}" for text in parent.changed(settings)]
    lines += rates_in_words(parent.folder, parent.settings, settings, step)
    other = first_other_rate(parent.settings, settings, step)
    if other is not None:
        lines.append(
            f"the learning rates before it differ from those of its own settings from step {other} on"
        )
    return lines
