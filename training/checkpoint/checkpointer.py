"""Checkpoints of a run: resuming from the newest, saving at once or in a background thread, pruning."""

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from data.sampling.exposure import write_exposure
from errors import INTERRUPTED
from run_directory.training_settings import CheckpointSettings
from training.checkpoint.restore import restore
from training.checkpoint.retention import (
    DIVERGED,
    HELD_OUT,
    held_out_state,
    newest_before_divergence,
    prune,
)
from training.checkpoint.snapshot import Snapshot, capture
from training.checkpoint.storage import find_checkpoint, save_snapshot
from training.distributed.error_barrier import ALONE, ProcessGroup, error_barrier
from training.exposure import make_ledger, with_parents
from training.logging.metrics_logger import MetricsLogger
from training.optim.ema import EMA
from training.optim.step_guard import StepGuard
from training.run.first_checkpoint import groups_before
from training.run.setup import TrainingRun
from training.stages import stage_after, stages_of


class CheckpointWriter:
    """Writes checkpoints of one run and removes those that the settings do not keep.

    An asynchronous save copies tensors to the host and returns; a thread writes the files, one save at a
    time. An error there is raised by the next call of `write` or `wait`. All processes of the group must call
    these after the same step; an error on one of them is raised on all. Leaving the block waits.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        train_length: int,
        group: ProcessGroup = ALONE,
    ):
        self.folder = folder
        self.settings = settings
        self.train_length = train_length
        self.group = group
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._thread:
            if error is None:
                self.wait()
            else:  # raise the first error only; finish the current checkpoint if possible
                with suppress(Exception):
                    self.wait()

    def write(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict,
        average: EMA | None = None,
        wait: bool = False,
    ) -> None:
        """Save the run after `step` updates; with `wait`, return when the files are written."""
        self.wait()
        with error_barrier(self.group, "save"):
            snapshot = capture(model, optimizer, average, copied=self.settings.asynchronous)
        if self.settings.asynchronous:
            self._writing = self._thread.submit(self._write, step, snapshot, state)
            if wait:
                self.wait()
        else:
            self._write(step, snapshot, state)

    @property
    def status(self) -> int:
        """The exit status to request from all processes where an asynchronous save has failed, so that all
        stop after the same step; else 0."""
        writing = self._writing
        failed = writing is not None and writing.done() and writing.exception() is not None
        return INTERRUPTED if failed else 0

    def wait(self) -> None:
        """Wait until the current save is written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _write(self, step: int, snapshot: Snapshot, state: dict) -> None:
        save_snapshot(self.folder, step, snapshot, state, self.group)
        with error_barrier(self.group, "save"):
            if self.group.rank == 0:
                prune(self.folder, step, self.settings, self.train_length)


class Checkpointer(CheckpointWriter):
    """Resumes a run from its newest good checkpoint and saves it: weights, optimizer, EMA, step guard, random
    generators, and the exposure ledger. Every process calls every method after the same step.

    saved: step of the newest checkpoint.
    groups: hashes of the text groups that the steps before it read.
    """

    def __init__(
        self, run: TrainingRun, optimizer: torch.optim.Optimizer, ema: EMA | None, guard: StepGuard
    ):
        settings = run.settings
        checkpoint = settings.training.checkpoint
        length = settings.train_length
        super().__init__(run.folder, checkpoint, length, run.parallel.saving_group)
        self.run = run
        self.optimizer = optimizer
        self.ema = ema
        self.guard = guard
        self._ledger = make_ledger(settings, run.batches)
        self.saved = 0
        self.groups = []

    def resume(self) -> int:
        """Restore the newest good checkpoint, if there is one; returns its step, else 0."""
        run = self.run
        settings = self.run.settings
        found = find_checkpoint(run.folder, run.console if run.parallel.main else None)
        state: dict = restore(run.model, self.optimizer, found, self.ema) if found else {}
        self.saved = found.step if found else 0
        run.parallel.agree(
            self.saved,
            "the newest checkpoint",
            "the run directory must be on a disk that all processes share",
        )
        run.model.reposition(stage_after(stages_of(settings), self.saved).model)
        self.guard.load(state.get("step_guard", {}))
        self.groups = groups_before(run.folder, settings, state | {"step": self.saved})
        return self.saved

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` updates."""
        every = self.settings.interval
        return step == self.run.settings.steps or (every is not None and step % every == 0)

    def save(
        self, step: int, logger: MetricsLogger, held_out: Mapping[int, float], wait: bool
    ) -> None:
        """Save the run after `step` updates.

        Args:
            held_out: {input tokens: NLL in nats} at this step, where it was measured.
            wait: return when the files are written, also of an asynchronous save.
        """
        run = self.run
        parallel = self.run.parallel
        logger.read()
        with error_barrier(parallel, "save"):
            logger.sync()
            state = self._state(step, logger.loss, held_out)
        with error_barrier(parallel.error_group, "save"):
            if parallel.takes_part:
                self.write(step, run.model, self.optimizer, state, self.ema, wait)
        with error_barrier(parallel, "save"):
            if parallel.main:
                write_exposure(run.folder, with_parents(run.folder, self._ledger.upto(step)))
                logger.check()  # after the checkpoint: a lost file must not cost the weights
        self.saved = step
        logger.resume_clock()

    def _state(self, step: int, loss: float, held_out: Mapping[int, float]) -> dict:
        run = self.run
        state = {
            "step": step,
            "tokens": run.settings.tokens_after(step),
            "step_guard": self.guard.state(),
        }
        state |= {"groups": run.batches.groups_used(step), HELD_OUT: held_out_state(held_out)}
        uniform = math.log(run.data.tokenizer.vocab_size)  # the loss of a uniform prediction
        if not loss <= 2 * uniform:
            state[DIVERGED] = True
            if run.parallel.main and (sound := newest_before_divergence(run.folder)) is not None:
                run.console.warn(
                    f"step {step}: training has diverged: the loss is {loss:g}, that of a uniform prediction "
                    f"{uniform:.3g}; the checkpoint of step {sound} is kept as well"
                )
        return state
