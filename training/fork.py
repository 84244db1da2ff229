"""Forks: runs that go on from another run's checkpoint with everything it carries, under changed settings.

A branch (branch.py) takes the weights alone. A fork takes the optimizer's state, the count of steps and the
order of the data too: what it does not say is as in that run, and where nothing but the budget and the end of
the schedule differ, it is bit for bit the run that was trained under its settings from the start.
"""

from pathlib import Path

import torch

from data.windows import Portion, sizes_of_slots
from model import Transformer
from training.checkpoint import STATE, Checkpoint
from training.config import differences
from training.errors import TrainingError
from training.files import read_json
from training.optimizer import make_optimizer
from training.settings import RunSettings
from training.stages import learning_rates, stage_of, stages_of

# What the checkpoint's tensors, its count of steps and the order of its data are made of.
_FIXED = {
    "train_length": "steps of another size are no continuation",
    "original_length": "its positions are measured from it",
    "training.batch_size": "steps of another size are no continuation",
    "training.optimizer.name": "its state is that of the other",
    "data.tokenizer": "its tokens would mean other text",
    "model": "its weights are those of the run; positions change on the way by training.changes",
}


def first_step(settings: RunSettings) -> int:
    """Updates behind the first one of a run's own: those of its parent in a fork, else none."""
    parent = settings.parent
    return parent.checkpoint or 0 if parent is not None and parent.fork else 0


def tree_of(settings: RunSettings) -> dict:
    """What the settings of a fork of this run are laid over."""
    return settings.model_dump(mode="json") | {"parent": None}


def check_fork(folder: Path, step: int, old: RunSettings, new: RunSettings) -> None:
    """Refuse settings under which a run of settings `old` cannot go on from its checkpoint of `step`.

    Raises TrainingError listing every key, with what it was and what it may not become.
    """
    wrong = [
        f"{key}: {reason}"
        for key, _, _, _ in differences(old, new)
        if (reason := _reason(key, old, new)) is not None
    ]
    if wrong:
        raise TrainingError(
            f"{folder} cannot be forked so; leave out what cannot change, or start a branch from its weights "
            f"alone (parent.run={folder} without --fork):\n       " + "\n       ".join(wrong)
        )
    if new.steps <= step:
        raise TrainingError(
            f"training.tokens = {new.training.tokens} pays for {new.steps} steps, and the checkpoint of "
            f"{folder} is at step {step}: raise training.tokens above {new.tokens_after(step)}, or fork "
            "an earlier one with parent.checkpoint"
        )
    if _order_behind(old, step) != _order_behind(new, step):
        raise TrainingError(
            f"training.stages: the stage that {folder} is in after step {step} cannot begin or end elsewhere "
            "in a fork, for its order of the data is drawn from where it ends; fork where a later one begins"
        )
    lengths = [sorted({portion.length for portion in settings.plan}) for settings in (old, new)]
    (slot, _), (other, _) = slots = [sizes_of_slots(own) for own in lengths]
    if slots[0] != slots[1]:
        theirs, ours = (", ".join(map(str, own)) for own in lengths)
        raise TrainingError(
            f"training.stages: windows of {ours} tokens are cut from slots of {other}, those of {theirs} in "
            f"{folder} from slots of {slot}, so that the order of its data cannot go on; give lengths that "
            f"fill {slot}, or start a branch from its weights alone (parent.run={folder} without --fork)"
        )
    behind = [[s for s in stages_of(settings) if s.start < step] for settings in (old, new)]
    if behind[0] != behind[1]:
        raise TrainingError(
            f"training.changes before step {step} cannot differ in a fork of {folder}: they have happened "
            "(a share moves with the budget; give steps)"
        )


def check_groups(folder: Path, checkpoint: Checkpoint, settings: RunSettings) -> None:
    """Refuse settings whose optimizer has other groups of weights than the one a checkpoint of the run
    `folder` was saved with, before anything is made."""
    if not checkpoint.has_optimizer:
        raise TrainingError(
            f"{checkpoint.folder} holds weights only and cannot be forked: start a branch from them "
            f"(parent.run={folder} without --fork)"
        )
    with torch.device("meta"):  # names of weights do not depend on the vocabulary
        model = Transformer(settings.model, 1, settings.train_length, settings.original_length)
    own = make_optimizer(model, settings.training.optimizer).param_groups
    saved = read_json(checkpoint.folder / STATE)["optimizer"]["groups"]
    if [group["names"] for group in own] != [group["weights"] for group in saved]:
        theirs = ", ".join(group["options"]["name"] for group in saved)
        raise TrainingError(
            f"training.optimizer: the groups of weights in {folder} are {theirs}, and here they would be "
            f"{', '.join(group['name'] for group in own)}: a fork goes on with the groups it finds; leave "
            "training.optimizer.groups as it was, or start a branch from the weights alone "
            f"(parent.run={folder} without --fork)"
        )


def _order_behind(settings: RunSettings, step: int) -> list[Portion]:
    """All of the plan that the order of the first `step` updates is drawn from; the last stage of a run has
    no end in it."""
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
    """The first of the updates 1 ... `step` behind a fork whose learning rate was another than its own
    settings give; None where there is none, as in a decay that begins at the fork or later."""
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
    """The learning rates of the first update after a fork of the run `folder`, where they are not within a
    hundredth of what that run has there, or had at its end."""
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
