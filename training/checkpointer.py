"""Saves a run in training, and resumes it from its newest checkpoint."""

import math
from collections.abc import Mapping

from data.sampling.exposure import write_exposure
from run_directory.checkpoints import (
    DIVERGED,
    HELD_OUT,
    find_checkpoint,
    newest_before_divergence,
    prune,
    save_snapshot,
)
from run_directory.exposure import make_ledger, with_parents
from run_directory.process_group import error_barrier
from run_directory.stages import stage_after, stages_of
from training.metrics import Metrics
from training.setup import TrainingRun
from training.train_state import TrainState


def resume(run: TrainingRun, state: TrainState) -> None:
    """Restore the newest good checkpoint of the run, if there is one. Every process calls it."""
    console = run.console if run.parallel.main else None
    checkpoint = find_checkpoint(run.folder, console)
    if checkpoint is not None:
        state.restore(checkpoint, run.parallel)
    run.parallel.agree(
        state.step,
        "the newest checkpoint",
        "the run directory must be on a disk that all processes share",
    )
    state.model.reposition(stage_after(stages_of(run.settings), state.step).model)


class Checkpointer:
    """Saves checkpoints and the exposure of a run, and removes checkpoints that the settings do not
    keep. Every process calls `save` after the same step; an error on one of them is raised on all.

    steps: the steps after which the settings ask for a checkpoint.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._ledger = make_ledger(run.settings, run.sampler)
        interval = run.settings.training.checkpoint.interval
        self.steps = {*(range(interval, run.steps + 1, interval) if interval else ()), run.steps}

    def save(self, state: TrainState, metrics: Metrics, held_out: Mapping[int, float]) -> None:
        """Save the run after `state.step` updates.

        Args:
            held_out: {input tokens: NLL in nats} at this step, where it was measured.
        """
        run = self._run
        parallel = run.parallel
        metrics.read()
        carried = state.carried_rows(parallel)
        snapshot = None
        with error_barrier(parallel, "save"):
            metrics.sync()
            if parallel.takes_part:
                snapshot = state.capture(carried)
                snapshot.state.update(self._facts(state.step, metrics.loss, held_out))
        if snapshot is not None and parallel.sharded:  # all processes save, and share errors
            save_snapshot(run.folder, snapshot, parallel)
        with error_barrier(parallel, "save"):
            if snapshot is not None and not parallel.sharded:
                save_snapshot(run.folder, snapshot)
            if parallel.main:
                kept = run.settings.training.checkpoint
                prune(run.folder, state.step, kept, run.settings.train_length)
                exposure = with_parents(run.folder, self._ledger.upto(state.step))
                write_exposure(run.folder, exposure)
        metrics.resume_clock()

    def _facts(self, step: int, loss: float, held_out: Mapping[int, float]) -> dict:
        """What a checkpoint records beside the training state: tokens, the held-out loss without
        lengths at which it is not finite, and whether the run has diverged."""
        run = self._run
        measured = {str(length): nll for length, nll in held_out.items() if math.isfinite(nll)}
        facts = {"tokens": run.settings.tokens_after(step), HELD_OUT: measured}
        uniform = math.log(run.data.tokenizer.vocab_size)  # the loss of a uniform prediction
        if not loss <= 2 * uniform:
            facts[DIVERGED] = True
            if run.parallel.main and (sound := newest_before_divergence(run.folder)) is not None:
                run.console.warn(
                    f"step {step}: training has diverged: the loss is {loss:g}, that of a uniform "
                    f"prediction {uniform:.3g}; the checkpoint of step {sound} is kept as well"
                )
        return facts
