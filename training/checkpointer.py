"""Saves a run in training, at once or in a background thread, and resumes it from its newest
checkpoint."""

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from data.sampling.exposure import write_exposure
from errors import INTERRUPTED
from run_directory.checkpoints import Snapshot, find_checkpoint, save_snapshot
from run_directory.exposure import make_ledger, with_parents
from run_directory.process_group import error_barrier
from run_directory.stages import stage_after, stages_of
from training.metrics import Metrics
from training.retention import (
    DIVERGED,
    HELD_OUT,
    held_out_state,
    newest_before_divergence,
    prune,
)
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
    keep.

    An asynchronous save copies tensors to the host and returns; a thread writes the files, one save
    at a time. An error there is raised by the next save; until then it requests that the run stops.
    Every process calls `save` after the same step; an error on one of them is raised on all.
    Leaving the block waits for the thread.

    steps: the steps after which the settings ask for a checkpoint, besides the last one.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._settings = run.settings.training.checkpoint
        self._group = run.parallel.saving_group
        self._ledger = make_ledger(run.settings, run.sampler)
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        interval = self._settings.interval
        self.steps = range(interval, run.steps + 1, interval) if interval else range(0)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: object,
    ) -> None:
        with self._thread:
            if error is None:
                self.wait()
            else:  # raise the first error only; finish the current checkpoint if possible
                with suppress(Exception):
                    self.wait()

    def save(
        self, state: TrainState, metrics: Metrics, held_out: Mapping[int, float], wait: bool
    ) -> None:
        """Save the run after `state.step` updates.

        Args:
            held_out: {input tokens: NLL in nats} at this step, where it was measured.
            wait: return when the files are written, also of an asynchronous save.
        """
        run = self._run
        parallel = run.parallel
        metrics.read()
        with error_barrier(parallel, "save"):
            metrics.sync()
            facts = self._facts(state.step, metrics.loss, held_out)
        carried = state.carried_rows(parallel)
        with error_barrier(parallel.error_group, "save"):
            if parallel.takes_part:
                self._save(state, facts, wait, carried)
        with error_barrier(parallel, "save"):
            if parallel.main:
                exposure = with_parents(run.folder, self._ledger.upto(state.step))
                write_exposure(run.folder, exposure)
                metrics.check_files()  # after the checkpoint: a lost file must not cost the weights
        metrics.resume_clock()

    def wait(self) -> None:
        """Wait until the current save is written; raises its error."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _save(
        self,
        state: TrainState,
        facts: dict,
        wait: bool,
        carried: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.wait()
        is_asynchronous = self._settings.asynchronous
        with error_barrier(self._group, "save"):
            snapshot = state.capture(is_asynchronous, carried)
        snapshot.state.update(facts)
        if not is_asynchronous:
            self._write(snapshot)
            return
        self._writing = self._thread.submit(self._write, snapshot)
        self._writing.add_done_callback(self._request_stop_if_failed)
        if wait:
            self.wait()

    def _request_stop_if_failed(self, writing: Future[None]) -> None:
        if writing.exception() is not None:
            self._run.requests.request(INTERRUPTED)

    def _write(self, snapshot: Snapshot) -> None:
        run = self._run
        save_snapshot(run.folder, snapshot, self._group)
        with error_barrier(self._group, "save"):
            if self._group.rank == 0:
                prune(
                    run.folder,
                    snapshot.step,
                    self._settings,
                    run.settings.train_length,
                )

    def _facts(
        self,
        step: int,
        loss: float,
        held_out: Mapping[int, float],
    ) -> dict:
        """What a checkpoint records beside the training state."""
        run = self._run
        facts = {"tokens": run.settings.tokens_after(step), HELD_OUT: held_out_state(held_out)}
        uniform = math.log(run.data.tokenizer.vocab_size)  # the loss of a uniform prediction
        if not loss <= 2 * uniform:
            facts[DIVERGED] = True
            if run.parallel.main and (sound := newest_before_divergence(run.folder)) is not None:
                run.console.warn(
                    f"step {step}: training has diverged: the loss is {loss:g}, that of a uniform "
                    f"prediction {uniform:.3g}; the checkpoint of step {sound} is kept as well"
                )
        return facts
