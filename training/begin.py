"""How a branch begins: the parent's weights under the branch's rule, proven to be that, as its own step 0."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from data import Prepared
from data.exposure import write_exposure
from data.preparation import USE
from model import Transformer
from training.branch import Parent, not_at_test_time, rule_words
from training.checkpoint import (
    copy_checkpoint,
    find_checkpoint,
    save_checkpoint,
)
from training.console import Console
from training.errors import TrainingError
from training.exposure import INHERITED, exposure_of
from training.files import read_json, write_json
from training.fork import first_other_rate, first_step, rates_in_words
from training.image import weights_of
from training.optimizer import make_optimizer
from training.restore import load_weights
from training.run import MANIFEST, load
from training.settings import RunSettings

Score = Callable[[Transformer], np.ndarray]  # NLL in nats of fixed held-out targets at train_length, (n,)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # nats, of any one target


def check_text(settings: RunSettings, prepared: Prepared, tokenizer_hash: str) -> None:
    """Refuse text of other tokens than the parent's, or without a single document as long as a window."""
    found, longest = prepared.tokenizer.hash, prepared.longest
    if found != tokenizer_hash:
        raise TrainingError(
            f"{prepared.folder} was made with another tokenizer ({found[:12]}) than the parent's "
            f"({tokenizer_hash[:12]}): its tokens mean other text; leave data.tokenizer as the parent has it"
        )
    is_fork = settings.parent is not None and settings.parent.fork
    if longest < settings.train_length and not is_fork:
        raise TrainingError(
            f"train_length {settings.train_length} is longer than every document of {prepared.train.folder} "
            f"(the longest has {longest:,} tokens): no text would show the new length; shorten it"
        )


def begin_branch(
    folder: Path,
    settings: RunSettings,
    parent: Parent | None,
    model: Transformer,
    score: Score,
    console: Console,
) -> None:
    """Give a branch without a checkpoint its parent's weights, once they score as the parent does under the
    branch's rule, and a fork the whole checkpoint; one that has begun is left alone. Called by one process.

    Raises TrainingError where the parent is gone, or the scores differ.
    """
    if find_checkpoint(folder) is not None:  # what is damaged is told where training begins
        return
    if parent is None:
        raise TrainingError(f"{folder} has no checkpoint, and the run it goes on from is gone: restore that")
    shown = exposure_of(parent.folder, parent.checkpoint.step)
    if shown is not None:
        write_exposure(folder, shown, INHERITED)
    if settings.parent is not None and settings.parent.fork:
        copy_checkpoint(parent.checkpoint, folder)
        for line in fork_in_words(settings, parent):
            console.say(line)
        return
    load_weights(model, parent.checkpoint)
    found = compare(settings, parent, model, score)
    console.say(in_words(found))
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | {"step0": found})
    optimizer = make_optimizer(model, settings.training.optimizer)
    save_checkpoint(folder, 0, model, optimizer, {"step": 0, "tokens": 0})


def groups_behind(folder: Path, settings: RunSettings, state: dict) -> list[str]:
    """Hashes of the groups that the steps behind a checkpoint were drawn from, where they are this run's: a
    fork to other text begins with a checkpoint that tells of its parent's."""
    used: list[str] = state.get("groups", [])
    if not used or state["step"] != first_step(settings):
        return used
    data = settings.data
    theirs = type(data).model_validate(read_json(folder / MANIFEST)["inherited"]["data"])
    return used if data.model_dump(exclude=USE) == theirs.model_dump(exclude=USE) else []


def compare(settings: RunSettings, parent: Parent, model: Transformer, score: Score) -> dict:
    """Score the branch before its first step, and the parent under the same rule through `load`.

    Returns what goes into the manifest; raises TrainingError where the two differ and nothing explains it.
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
    under_rule = of_parent(rule_words(parent.settings, settings))
    if under_rule is None:
        return found | {"not_compared": f"its positions end before {settings.train_length}"}
    largest = float(np.abs(under_rule - nll).max())
    found |= {"parent_under_rule": float(under_rule.mean()), "largest_difference": largest}
    if largest > TOLERANCE[weight.dtype]:
        measured = parent.settings.original_length or parent.settings.train_length
        own = settings.original_length or settings.train_length
        ours = weights_of(model)
        theirs = weights_of(load(parent.folder, [], weight.device, weight.dtype, step, weights="last").model)
        if measured != own and _equal(ours, theirs):  # the one setting that words at test time cannot reach
            return found | {"not_compared": f"it measures stretches from {measured}, not from {own}"}
        raise TrainingError(
            f"at step 0 the branch scores {nll.mean():.6f} at {settings.train_length} tokens, and "
            f"{parent.folder} under the same rule {under_rule.mean():.6f} (one target differs by "
            f"{largest:.2g}): its weights are not what was trained; this is a defect, please report it"
        )
    return found


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models hold the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_words(found: dict) -> str:
    """The comparison in one sentence."""
    begins = f"step 0: NLL {found['nll']:.4f} on {found['targets']:,} targets at {found['length']} tokens"
    trained = found["parent_as_trained"]
    beside = (
        "the parent as trained cannot be placed there" if trained is None else f"as trained {trained:.4f}"
    )
    if found["not_compared"]:
        return f"{begins} ({beside}); not compared with the parent's under this rule: {found['not_compared']}"
    most = found["largest_difference"]
    return f"{begins}, the parent's under this rule (largest difference {most:.1g}; {beside})"


def fork_in_words(settings: RunSettings, parent: Parent) -> list[str]:
    """What a fork carries, every setting it changes, how its learning rates go on, and whether the steps
    behind it were as it would have made them."""
    step = parent.checkpoint.step
    lines = [f"fork of {parent.folder}: goes on after its step {step}, with optimizer and order of the data"]
    lines += [f"changed in the fork: {text}" for text in parent.changed(settings)]
    lines += rates_in_words(parent.folder, parent.settings, settings, step)
    other = first_other_rate(parent.settings, settings, step)
    if other is not None:
        lines.append(
            f"the learning rates behind it, from step {other} on, are not those its own settings give"
        )
    return lines
