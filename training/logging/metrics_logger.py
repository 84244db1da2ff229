"""The metrics of a run while it trains: metrics.jsonl, trackers, and the terminal."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from data import Batch
from data.files import read_object
from errors import INTERRUPTED, TrainingError
from training.logging.live import LiveView, short_name
from training.logging.metrics_file import MetricsFile
from training.logging.step_metrics import StepMetrics, StepResult, ThroughputMeter
from training.logging.trackers import make_trackers
from training.optim.step_guard import REASONS, raise_stopped
from training.run.directory import MANIFEST
from training.run.hardware import peak_flops, peak_memory
from training.run.setup import TrainingRun
from training.stages import Stage, stage_after, stages_of


class _QueuedStep(NamedTuple):
    """A step whose result is not read yet."""

    done: int
    result: StepResult
    rates: dict[str, float]
    values: dict
    flops_per_token: float
    stage: Stage | None  # the stage that begins with this step


class MetricsLogger:
    """Reads the results of steps on every rank; the main rank writes each line of metrics to metrics.jsonl,
    the trackers and the terminal.

    Results stay on the device until `read`; every step is one line. Speeds are measured every `log_interval`
    steps.

    loss: of the newest step that was read.
    """

    def __init__(self, run: TrainingRun, step: int):
        folder = run.folder
        settings = run.settings
        self.folder = folder
        self.settings = settings
        self.console = run.console
        self._device = run.device
        self._flops_per_token_at = run.model.flops_per_token
        self._flops_per_token = self._flops_per_token_at(
            stage_after(stages_of(settings), step).length
        )
        self._peak = peak_flops(run.device) * run.parallel.world
        tokens = settings.tokens_after(settings.steps)
        self._view = LiveView(
            short_name(folder), settings.steps, tokens, step, self._peak, run.console
        )
        self._file = None
        self._trackers = []
        self._own = {}
        if run.parallel.main:
            self._file = MetricsFile(folder / "metrics.jsonl", step)
            self._trackers = make_trackers(settings, folder, step, run.console)
            self._own = {path: _file_id(path) for path in (folder, folder / "metrics.jsonl")}
        self._meter = ThroughputMeter()
        self._open = ExitStack()
        self._queue: list[_QueuedStep] = []
        self._stage: Stage | None = None  # the stage that begins with the next step
        self._applied = step  # the last step that changed the weights
        self.loss = math.nan
        # of an extension run
        if step == 0 and "step0" in (manifest := read_object(folder / MANIFEST)):
            self.write(0, "step0", **manifest["step0"])

    def __enter__(self) -> "MetricsLogger":
        for one in (self._file, *self._trackers):
            if one:
                self._open.callback(one.close)
        self._view.draw = self._open.enter_context(self.console.live(self._view))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._open.close()
        if error is None:
            self.check()

    def _lost(self) -> Path | None:
        """The folder or file of this run that was removed, moved or replaced since training started."""
        lost = [path for path, file_id in self._own.items() if _file_id(path) != file_id]
        if self._file and not (self.folder / MANIFEST).exists():
            lost.append(self.folder / MANIFEST)
        return lost[0] if lost else None

    @property
    def status(self) -> int:
        """The exit status to request from all processes where part of the run directory is lost, so that they
        save and report it after the same step; else 0."""
        return INTERRUPTED if self._lost() else 0

    def check(self) -> None:
        """Raises TrainingError where part of the run directory is lost."""
        if (lost := self._lost()) is not None:
            raise TrainingError(
                f"{lost} was removed or moved during training: restore it, then resume"
            )

    def sync(self) -> None:
        """Flush the metrics to the disk before a checkpoint.

        Raises TrainingError where the run directory is lost: saving would create another one in its place.
        """
        if self._lost() == self.folder:
            self.check()
        if self._file:
            self._file.sync()

    def write(self, step: int, kind: str, **values: object) -> None:
        """Write one line of metrics."""
        if self._file:
            line = self._file.write(step, kind, **values)
            for sink in (*self._trackers, self._view):
                sink.write(line)

    def step(self, done: int, result: StepResult, rates: dict[str, float], batch: Batch) -> None:
        """Queue the result of a step, which may not have been computed yet; `rates` by name, with `lr`."""
        values = {"tokens": self.settings.tokens_after(done), "targets": batch.n_targets}
        values |= {"passes": batch.passes} if batch.passes else {}
        values |= {"epoch": batch.epoch, "data": batch.hash}
        self._queue.append(
            _QueuedStep(done, result, rates, values, self._flops_per_token, self._stage)
        )
        self._stage = None

    def read(self, pending: int = 0) -> int:
        """Read all results but the latest `pending`; returns the exit status that any rank requested, or 0.

        Raises:
            TrainingError: more steps were skipped than the settings allow.
        """
        status = 0
        while len(self._queue) > pending:
            step = self._queue.pop(0)
            found = step.result.read()
            status = found.status or status
            self.loss = found.loss
            if step.stage:
                self._log_stage(step.stage)
            tokens = step.values["tokens"] - self.settings.tokens_after(step.done - 1)
            self._meter.step(tokens, step.flops_per_token)
            skipped = {"skipped": REASONS[found.reason]} if found.reason else {}
            values = skipped | step.rates | step.values
            if (
                step.done % self.settings.training.log_interval == 0
                or step.done == self.settings.steps
            ):
                speed, flops = self._meter.measure()
                values |= {"tokens_per_second": speed, "mfu": flops / self._peak}
                values |= {"peak_memory_bytes": peak_memory(self._device)}
            self.write(step.done, "train", loss=found.loss, grad_norm=found.grad_norm, **values)
            if found.reason:
                self._skip(step.done, found)
            else:
                self._applied = step.done
        return status

    def _skip(self, done: int, found: StepMetrics) -> None:
        """Warn of a step that was not applied; raise TrainingError where these are too many."""
        if found.stopped:
            raise_stopped(done, found, self.folder, self._applied)
        if self._file:
            self.console.warn(
                f"step {done} is skipped, {REASONS[found.reason]}: loss {found.loss:g}, gradient norm "
                f"{found.grad_norm:g}; number {found.count} of the run"
            )

    def change(self, stage: Stage) -> None:
        """Log that a stage begins with the next step."""
        self._stage = stage
        self._flops_per_token = self._flops_per_token_at(stage.length)

    def _log_stage(self, stage: Stage) -> None:
        size = {"length": stage.length, "batch_size": stage.batch_size} if stage.is_resized else {}
        self.write(stage.start, "change", overrides=list(stage.overrides), **size)
        self.console.info(stage.describe())

    def end(self, done: int) -> None:
        """Log the end of the run."""
        self.write(done, "end", peak_memory_bytes=peak_memory(self._device))

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the rates."""
        self._meter.restart()


def _file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode of a path; None where it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
