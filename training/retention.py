"""Which checkpoints of a run are kept: the newest, every `keep_interval` steps, the best by
held-out loss, and the newest from before the run diverged."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.files import read_object
from errors import TrainingError
from run_directory.checkpoints import STATE, folder_of, remove_checkpoint, steps_of
from run_directory.training_settings import CheckpointSettings
from training.optim.step_guard import REASONS, SPIKE
from training.step_result import StepMetrics

# true in a checkpoint's state: the loss is far above that of a uniform prediction
DIVERGED = "diverged"
HELD_OUT = "held_out"  # in a checkpoint's state: {input tokens: held-out NLL in nats}


def held_out_state(nll: Mapping[int, float]) -> dict[str, float]:
    """The held-out loss for a checkpoint's state, without lengths at which it is not finite."""
    return {str(length): value for length, value in nll.items() if math.isfinite(value)}


def held_out(run: Path, length: int) -> dict[int, float]:
    """{step: NLL in nats} of a run's checkpoints with a validation at `length` input tokens."""
    losses = {}
    for step in steps_of(run):
        if (value := _state_of(run, step).get(HELD_OUT, {}).get(str(length))) is not None:
            losses[step] = value
    return losses


def _state_of(run: Path, step: int) -> dict:
    """A checkpoint's state; {} where it is damaged, which `find_checkpoint` reports."""
    try:
        return read_object(folder_of(run, step) / STATE, {"state": dict})["state"]
    except TrainingError:
        return {}


def newest_before_divergence(run: Path, before: int | None = None) -> int | None:
    """The newest checkpoint, of a step below `before`, from before the run diverged."""
    steps = [step for step in steps_of(run) if before is None or step < before]
    return next((step for step in reversed(steps) if not _state_of(run, step).get(DIVERGED)), None)


def best_of(run: Path, length: int) -> tuple[int, float] | None:
    """(step, NLL) of the first checkpoint with the lowest held-out loss at `length` input
    tokens."""
    scores = held_out(run, length)
    return min(scores.items(), key=lambda score: (score[1], score[0])) if scores else None


def kept(
    steps: Sequence[int], settings: CheckpointSettings, best: int | None, sound: int | None = None
) -> set[int]:
    """Which of the ascending `steps` are kept: those of the settings, and `best` and `sound`."""
    stays = set(steps[-settings.keep :])
    if settings.keep_interval is not None:
        stays |= {step for step in steps if step % settings.keep_interval == 0}
    return stays | {step for step in steps if step in (best, sound)}


def prune(
    run: Path,
    step: int,
    settings: CheckpointSettings,
    train_length: int,
) -> None:
    """Remove the checkpoints of steps after `step`, from before the run was resumed, and those that
    the settings do not keep. Called by one process after the save of `step`."""
    for later in [other for other in steps_of(run) if other > step]:
        remove_checkpoint(folder_of(run, later))
    best = best_of(run, settings.best * train_length) if settings.best else None
    steps = steps_of(run)
    for old in set(steps) - kept(
        steps, settings, best[0] if best else None, newest_before_divergence(run)
    ):
        remove_checkpoint(folder_of(run, old))


def raise_stopped(
    step: int,
    metrics: StepMetrics,
    folder: Path,
    applied: int,
) -> None:
    """Raise TrainingError for the step that stopped the run; `applied` is the last applied step."""
    is_spike = metrics.reason == SPIKE
    steps = steps_of(folder)
    # Without an update in between, the newest checkpoint has the weights that failed.
    is_source = bool(steps) and not is_spike and steps[-1] >= applied
    good = newest_before_divergence(folder, before=applied if is_source else None)
    saved = "there is no good checkpoint"
    if good is not None:
        saved = f"the newest good checkpoint in {folder} is that of step {good}"
    limit = "training.on_spike.limit" if is_spike else "training.on_nonfinite.limit"
    is_over = is_spike or metrics.count > 1
    number = ""
    if is_over:
        number = f" ({REASONS[metrics.reason]} number {metrics.count} of the run, above {limit})"
    fixes = [
        "lower training.optimizer.lr or training.grad_clip in a new run",
        "check the data of this step",
    ]
    if not is_source or math.isfinite(metrics.loss):  # else every later step has such a loss
        fixes.append(f"raise {limit}" if is_over else "set training.on_nonfinite.name=skip")
    raise TrainingError(
        f"step {step}: the loss is {metrics.loss:g}, the gradient norm {metrics.grad_norm:g}"
        f"{number}. The step was not applied, and {saved}: {', or '.join(fixes)}"
    )
