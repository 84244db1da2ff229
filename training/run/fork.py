"""Forks: runs that continue another run's checkpoint with its optimizer, under changed settings.

An extension run (extension.py) takes the weights alone. A fork also takes the optimizer state, the step count
and the order of the data. Settings that are not given are those of the parent. Where only the budget and the
end of the schedule differ, a fork is bit for bit the run trained under its settings from the start.
"""

from pathlib import Path

import torch

from data.sampling.segments import Segment, sizes_of_slots
from model import Transformer
from training.checkpoint.storage import Checkpoint
from training.config.load import differences
from training.config.settings import RunSettings
from training.errors import TrainingError
from training.optim.optimizer import make_optimizer
from training.stages import learning_rates, stage_of, stages_of

# Settings that determine the checkpoint's tensors, its step count and the order of its data; and why.
_FIXED = {
    "train_length": "the size of a step cannot change",
    "original_length": "positions depend on it",
    "training.batch_size": "the size of a step cannot change",
    "training.optimizer.name": "the optimizer state belongs to it",
    "data.tokenizer": "the token ids depend on it",
    "model": "the weights depend on it; use overrides in training.stages for positions",
}


def tree_of(settings: RunSettings) -> dict:
    """The settings that those of a fork of this run override."""
    return settings.model_dump(mode="json") | {"parent": None}


def check_fork(folder: Path, step: int, old: RunSettings, new: RunSettings) -> None:
    """Check that a run of settings `old` can continue from its checkpoint of `step` under settings `new`.

    Raises TrainingError, which lists every setting that must not change.
    """
    wrong = [
        f"{key}: {reason}"
        for key, _, _, _ in differences(old, new)
        if (reason := _reason(key, old, new)) is not None
    ]
    if wrong:
        raise TrainingError(
            f"{folder} cannot be forked with these settings; leave them out, or start an extension run from "
            f"its weights (parent.run={folder} without --fork):\n       " + "\n       ".join(wrong)
        )
    if new.steps <= step:
        raise TrainingError(
            f"training.tokens = {new.training.tokens} gives {new.steps} steps, and the checkpoint of "
            f"{folder} is at step {step}: raise training.tokens above {new.tokens_after(step)}, or fork "
            "an earlier one with parent.checkpoint"
        )
    if _order_behind(old, step) != _order_behind(new, step):
        raise TrainingError(
            f"training.stages: the stage that {folder} is in after step {step} cannot start or end elsewhere "
            "in a fork, because its data order depends on its end; fork where a later stage starts"
        )
    lengths = [sorted({portion.length for portion in settings.plan}) for settings in (old, new)]
    (slot, _), (other, _) = slots = [sizes_of_slots(own) for own in lengths]
    if slots[0] != slots[1]:
        theirs, ours = (", ".join(map(str, own)) for own in lengths)
        raise TrainingError(
            f"training.stages: windows of {ours} tokens are cut from slots of {other}, those of {theirs} in "
            f"{folder} from slots of {slot}, so the data order cannot continue; set lengths that "
            f"fill {slot}, or start an extension run from its weights (parent.run={folder} without --fork)"
        )
    behind = [[s for s in stages_of(settings) if s.start < step] for settings in (old, new)]
    if behind[0] != behind[1]:
        raise TrainingError(
            f"training.stages before step {step} cannot change in a fork of {folder} "
            "(a fraction depends on training.tokens; give steps)"
        )


def check_groups(folder: Path, checkpoint: Checkpoint, settings: RunSettings) -> None:
    """Check that the optimizer of the settings has the parameter groups of a checkpoint of `folder`."""
    if not checkpoint.has_optimizer:
        raise TrainingError(
            f"{checkpoint.folder} holds weights only and cannot be forked: start an extension "
            f"run (parent.run={folder} without --fork)"
        )
    with torch.device("meta"):  # parameter names do not depend on the vocabulary
        model = Transformer(settings.model, 1, settings.train_length, settings.original_length)
    own = make_optimizer(model, settings.training.optimizer).param_groups
    saved = checkpoint.optimizer["groups"]
    if [group["names"] for group in own] != [group["weights"] for group in saved]:
        theirs = ", ".join(group["options"]["name"] for group in saved)
        raise TrainingError(
            f"training.optimizer: the groups of weights in {folder} are {theirs}, and here they would be "
            f"{', '.join(group['name'] for group in own)}: a fork needs the same groups; leave "
            "training.optimizer.groups as in the parent, or start an extension run from the weights "
            f"(parent.run={folder} without --fork)"
        )


def _order_behind(settings: RunSettings, step: int) -> list[Segment]:
    """The segments that determine the data order of the first `step` updates; the last stage of a run counts
    without its end."""
    begin, found = 0, []
    for portion in settings.plan:
        if begin >= step:
            break
        found.append(portion)
        begin += portion.steps
    return [*found[:-1], found[-1]._replace(steps=0)] if len(found) == len(settings.plan) else found


def _reason(key: str, old: RunSettings, new: RunSettings) -> str | None:
    """Why a setting cannot differ in a fork; None where it can."""
    if key == "training.optimizer" and old.training.optimizer.name != new.training.optimizer.name:
        key = "training.optimizer.name"
    return next((why for fixed, why in _FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)


def first_other_rate(old: RunSettings, new: RunSettings, step: int) -> int | None:
    """The first of the updates 1 ... `step` before a fork whose learning rate differs from that of the fork's
    settings; None where all are equal, e.g. with a decay that starts at the fork or later."""
    stages = stages_of(old), stages_of(new)
    for i in range(step):
        rates = [
            learning_rates(settings.training, stage_of(own, i), i, settings.steps)
            for settings, own in zip((old, new), stages, strict=True)
        ]
        if rates[0] != rates[1]:
            return i + 1
    return None


def rates_in_words(folder: Path, old: RunSettings, new: RunSettings, step: int) -> list[str]:
    """The learning rates of the first update after a fork that differ by more than 1% from those of the run
    `folder` at that step, or at its end."""
    last = min(step, old.steps - 1)
    before, here = (
        learning_rates(settings.training, stage_of(stages_of(settings), i), i, settings.steps)
        for settings, i in ((old, last), (new, step))
    )
    there = str(folder) if last == step else f"{folder} at its end"
    return [
        f"{'learning rate' if name == 'lr' else name} at step {step + 1}: {before[name]:.3g} in {there}, "
        f"{rate:.3g} here"
        for name, rate in here.items()
        if name in before and abs(rate - before[name]) > 0.01 * before[name]
    ]
