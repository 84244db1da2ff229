"""Saves a run in training, and resumes it from its newest checkpoint."""

import math

from run_directory.checkpoints import find_checkpoint, prune, save_checkpoint, steps_of
from run_directory.process_group import error_barrier
from run_directory.training_schedule import stage_of, stages_of
from training.metrics import Metrics
from training.setup import TrainingRun
from training.train_state import TrainState


def resume(run: TrainingRun, state: TrainState) -> None:
    """Restore the newest intact checkpoint of the run, if there is one. Every process must call it;
    the main process compares the checkpoints with their hashes."""
    parallel = run.parallel
    parallel.agree(
        steps_of(run.folder),
        "the list of checkpoints",
        "the run directory must be on a disk that all processes share",
    )
    checkpoint = None
    with error_barrier(parallel, "resume"):
        if parallel.main:
            checkpoint = find_checkpoint(run.folder, warn=run.console.warn)
    checkpoint = parallel.gather(checkpoint)[0]
    if checkpoint is not None:
        state.restore(checkpoint, parallel)
    state.model.reposition(stage_of(stages_of(run.settings), state.step).model)


def save(run: TrainingRun, state: TrainState, metrics: Metrics) -> None:
    """Save the run after `state.step` updates, and remove the checkpoints that the settings do not
    keep. None is removed while the loss is far above that of a uniform prediction. Every process
    must call it; an error on one of them is raised on all."""
    parallel = run.parallel
    metrics.read()
    carried = state.carried_rows(parallel)
    with error_barrier(parallel, "save"):
        metrics.sync()
        tensors = state.capture(carried)
        record = {
            "step": state.step,
            "step_guard": state.guard.state(),
            "tokens": run.settings.tokens_after(state.step),
        }
        if state.loss_scale is not None:
            record["loss_scale"] = state.loss_scale.state()
    save_checkpoint(run.folder, state.step, tensors, record, parallel)
    with error_barrier(parallel, "save"):
        if parallel.main:
            kept = run.settings.training.checkpoint
            uniform = math.log(run.data.tokenizer.vocab_size)
            has_diverged = metrics.loss > 2 * uniform
            if has_diverged:
                run.console.warn(
                    f"step {state.step}: training has diverged: the loss is {metrics.loss:g}, but "
                    f"{uniform:.3g} for a uniform prediction; earlier checkpoints are kept"
                )
            prune(run.folder, state.step, None if has_diverged else kept)
    metrics.resume_clock()
