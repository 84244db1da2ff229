"""Which checkpoints of a run stay: the newest, every so many steps, and the best by held-out loss."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.checkpoint import STATE, folder_of, remove_checkpoint, steps_of
from training.checkpoint_settings import CheckpointSettings
from training.errors import TrainingError
from training.files import read_json

HELD_OUT = "held_out"  # in a checkpoint's state: {input tokens: NLL in nats}, of held-out text at its step


def held_out_state(nll: Mapping[int, float]) -> dict[str, float]:
    """What a checkpoint's state says of its held-out loss; a length that broke has no entry."""
    return {str(length): value for length, value in nll.items() if math.isfinite(value)}


def held_out(run: Path, length: int) -> dict[int, float]:
    """{step: NLL in nats} of a run's checkpoints that were measured at `length` input tokens."""
    found = {}
    for step in steps_of(run):
        try:
            state = read_json(folder_of(run, step) / STATE)["state"]
        except (TrainingError, KeyError):
            continue  # damaged: no candidate for the best, and not for this to judge
        if (value := state.get(HELD_OUT, {}).get(str(length))) is not None:
            found[step] = value
    return found


def best_of(run: Path, length: int) -> tuple[int, float] | None:
    """(step, NLL) of the checkpoint of lowest held-out loss at `length` input tokens; the first of equals."""
    scores = held_out(run, length)
    return min(scores.items(), key=lambda one: (one[1], one[0])) if scores else None


def kept(steps: Sequence[int], settings: CheckpointSettings, best: int | None) -> set[int]:
    """Those of `steps`, in ascending order, that stay."""
    stays = set(steps[-settings.keep :])
    if settings.keep_every is not None:
        stays |= {step for step in steps if step % settings.keep_every == 0}
    return stays if best is None else stays | ({best} & set(steps))


def prune(run: Path, step: int, settings: CheckpointSettings, train_length: int) -> None:
    """Remove the checkpoints of steps after `step`, which a resumed run has left behind, and of the others
    those that the policy does not keep; called by one process, after the save of `step`."""
    for later in [one for one in steps_of(run) if one > step]:
        remove_checkpoint(folder_of(run, later))
    best = best_of(run, settings.best * train_length) if settings.best else None
    steps = steps_of(run)
    for old in set(steps) - kept(steps, settings, best[0] if best else None):
        remove_checkpoint(folder_of(run, old))
