"""The first checkpoint of a run that starts from another: the parent's, verified to score as the
parent."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from data.sampling.exposure import write_exposure
from errors import TrainingError
from model import ModelSettings, Transformer
from run_directory.allowed_changes import fork_refused, method_of, not_at_test_time
from run_directory.checkpoints import copy_checkpoint, find_checkpoint, save_snapshot
from run_directory.console import Console
from run_directory.exposure import INHERITED, exposure_of
from run_directory.parent_run import ParentRun
from run_directory.position_overrides import meta_model
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.weights import load_weights, same_weights
from training.optim.optimizer import make_optimizer
from training.optim.step_guard import StepGuard
from training.schedule import TrainingSchedule
from training.train_state import TrainState

# NLL in nats of fixed held-out targets at train_length, (n,)
Score = Callable[[Transformer], np.ndarray]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # nats, of any one target


def write_first_checkpoint(
    run: Run,
    parent: ParentRun | None,
    model: Transformer,
    score: Score,
    console: Console,
) -> None:
    """Write the first checkpoint of an extension run or a fork that has none. Called by one
    process.

    A fork gets the parent's checkpoint as it is. An extension run gets the parent's weights as step
    0, after a check that they score as the parent does under the same method.

    Raises TrainingError where the parent is gone, or the scores differ.
    """
    if find_checkpoint(run.folder) is not None:  # `resume` reports damaged ones
        return
    if parent is None:
        raise TrainingError(
            f"{run.folder} has no checkpoint, and its parent run is gone: restore parent.run"
        )
    settings = run.settings
    if (exposure := exposure_of(Run(parent.folder), parent.checkpoint.step)) is not None:
        write_exposure(run.folder, exposure, INHERITED)
    if settings.is_fork:
        copy_checkpoint(parent.checkpoint, run.folder)
        for line in _describe_fork(settings, parent):
            console.info(line)
        return
    load_weights(model, parent.checkpoint)
    scores = compare(settings, parent, model, score)
    console.info(describe_comparison(scores))
    run.write_manifest(run.manifest | {"step0": scores})
    t = settings.training
    guard = StepGuard(
        t.on_nonfinite,
        t.on_spike,
        next(model.parameters()).device,
    )
    state = TrainState(
        model,
        make_optimizer(model, t.optimizer),
        guard,
        ema=None,
        forward=model,
    )
    snapshot = replace(state.capture(), state={"step": 0, "tokens": 0})
    save_snapshot(run.folder, snapshot)


def check_optimizer_groups(parent: ParentRun, settings: RunSettings) -> None:
    """Raise TrainingError where the optimizer of a fork has other parameter groups than its
    parent's."""
    # Parameter names do not depend on the vocabulary.
    own = make_optimizer(meta_model(settings), settings.training.optimizer).param_groups
    with fork_refused(parent.folder):
        saved = parent.checkpoint.optimizer["groups"]
        if [group["names"] for group in own] != [group["weights"] for group in saved]:
            theirs = ", ".join(group["options"]["name"] for group in saved)
            raise TrainingError(
                f"training.optimizer.groups: the groups of weights are {theirs} in the parent, "
                f"and here they would be {', '.join(group['name'] for group in own)}; leave them "
                "as in the parent"
            )


def compare(
    settings: RunSettings,
    parent: ParentRun,
    model: Transformer,
    score: Score,
) -> dict:
    """Score an extension run before its first step, and the parent under the same method through
    `Run.load`.

    Returns the entry for the manifest; raises TrainingError where the two differ unexpectedly.
    """
    nll = score(model)
    length = settings.train_length
    scores: dict = {
        "length": length,
        "targets": len(nll),
        "nll": float(nll.mean()),
        "parent_under_method": None,
        "largest_difference": None,
        "parent_as_trained": None,
        "not_compared": not_at_test_time(parent.settings, settings),
    }
    trained = _load_parent(parent, model)
    as_trained = _score_if_possible(trained, length, score)
    if as_trained is not None:
        scores["parent_as_trained"] = float(as_trained.mean())
    if scores["not_compared"]:
        return scores
    method = _load_parent(parent, model, method_of(parent.settings, settings))
    under_method = _score_if_possible(method, length, score)
    if under_method is None:
        return scores | {"not_compared": f"its positions end before {length}"}
    largest = float(np.abs(under_method - nll).max())
    scores["parent_under_method"] = float(under_method.mean())
    scores["largest_difference"] = largest
    if largest <= TOLERANCE[next(model.parameters()).dtype]:
        return scores
    stretched_from = parent.settings.original_length or parent.settings.train_length
    own = settings.original_length or length
    if stretched_from != own and same_weights(model, trained):
        # the one setting that has no test-time override
        return scores | {"not_compared": f"its original_length is {stretched_from}, not {own}"}
    raise TrainingError(
        f"at step 0 the extension run scores {nll.mean():.6f} at {length} tokens, and "
        f"{parent.folder} under the same method {under_method.mean():.6f} (one target differs by "
        f"{largest:.2g}): the weights were not copied correctly; this is a bug, please report it"
    )


def _load_parent(
    parent: ParentRun, model: Transformer, method: ModelSettings | tuple = ()
) -> Transformer:
    """The parent's checkpoint under a method, on the device and in the dtype of `model`."""
    weight = next(model.parameters())
    loaded = Run(parent.folder).load(
        method, weight.device, weight.dtype, checkpoint=parent.checkpoint.step, weights="last"
    )
    return loaded.model


def _score_if_possible(
    model: Transformer,
    length: int,
    score: Score,
) -> np.ndarray | None:
    return score(model) if model.limit is None or model.limit >= length else None


def describe_comparison(scores: dict) -> str:
    """The result of `compare` as one line."""
    targets = f"{scores['targets']:,} targets at {scores['length']} tokens"
    start = f"step 0: NLL {scores['nll']:.4f} on {targets}"
    trained = scores["parent_as_trained"]
    plain = (
        "the parent as trained has no such positions"
        if trained is None
        else f"as trained {trained:.4f}"
    )
    if scores["not_compared"]:
        reason = scores["not_compared"]
        return f"{start} ({plain}); not compared with the parent under this method: {reason}"
    most = scores["largest_difference"]
    return f"{start}, as the parent under this method (largest difference {most:.1g}; {plain})"


def _describe_fork(settings: RunSettings, parent: ParentRun) -> list[str]:
    """Lines about a fork: its parent, changed settings, learning rates, and whether the parent's
    learning rates before it differ from those of its own settings."""
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
    """The learning rates of the first update after a fork that differ by more than 1% from those of
    the parent at that step, or at its end."""
    step = parent.checkpoint.step
    last = min(step, parent.settings.steps - 1)
    before = TrainingSchedule(parent.settings).learning_rates(last)
    there = str(parent.folder) if last == step else f"{parent.folder} at its end"
    return [
        f"{'learning rate' if name == 'lr' else name} at step {step + 1}: {before[name]:.3g} in "
        f"{there}, {rate:.3g} here"
        for name, rate in TrainingSchedule(settings).learning_rates(step).items()
        if name in before and abs(rate - before[name]) > 0.01 * before[name]
    ]
