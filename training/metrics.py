"""The metrics of a run while it trains: metrics.jsonl, trackers, and the terminal."""

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from errors import INTERRUPTED, TrainingError
from run_directory.metrics_file import MetricsFile
from run_directory.process_group import error_barrier
from run_directory.run import MANIFEST, METRICS
from run_directory.stages import Stage
from training.batches import StepBatch
from training.hardware import peak_memory, reliable_peak
from training.live_view import LiveView
from training.optim.step_guard import REASONS
from training.retention import raise_stopped
from training.setup import TrainingRun
from training.step_result import StepMetrics, StepResult
from training.trackers import make_trackers
from training.train_state import TrainState


class _QueuedStep(NamedTuple):
    """A step whose result is not read yet."""

    done: int
    result: StepResult
    values: dict
    stage: Stage
    flops: float  # of the step


class Metrics:
    """Reads the results of steps on every rank; the main rank writes each line of metrics to
    metrics.jsonl, the trackers and the terminal.

    Every step is one line. On a GPU a result is read one step late, so that the host never waits
    inside a step. Speeds are measured every `log_interval` steps.

    loss: of the newest step that was read.
    """

    def __init__(self, run: TrainingRun, state: TrainState):
        settings = run.settings
        self._run = run
        self._interval = settings.training.log_interval
        self._late = 1 if run.device.type == "cuda" else 0
        self._peak = None  # FLOP/s of all devices, where it is known
        if run.parallel.main:
            dtype = run.parallel.autocast_dtype or next(run.model.parameters()).dtype
            peak = reliable_peak(run.device, dtype)
            self._peak = peak and peak * run.parallel.world
        self._stage: Stage | None = None
        self._step_flops = 0.0
        self._tokens = settings.tokens_after(state.step)
        self._view = LiveView(
            name=run.folder.name,
            steps=run.steps,
            tokens=settings.trained_tokens,
            done=state.step,
            console=run.console,
        )
        self._file = None
        self._trackers = []
        self._files: dict[Path, tuple[int, int] | None] = {}
        with error_barrier(run.parallel, "begin"):
            if run.parallel.main:
                self._file = MetricsFile(run.folder / METRICS, state.step)
                self._trackers = make_trackers(
                    settings,
                    run.folder,
                    state.step,
                    run.console,
                )
                self._files = {path: _file_id(path) for path in (run.folder, run.folder / METRICS)}
        self._open = ExitStack()
        self._queue: list[_QueuedStep] = []
        self._applied = state.step  # the last step that changed the weights
        self._speed = _Throughput()
        self.loss = math.nan
        if state.step == 0 and "step0" in run.run.manifest:  # of an extension run
            self.write(0, "step0", **run.run.manifest["step0"])

    def __enter__(self) -> "Metrics":
        for sink in (self._file, *self._trackers):
            if sink:
                self._open.callback(sink.close)
        self._view.draw = self._open.enter_context(self._run.console.live(self._view))
        self.resume_clock()
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: object,
    ) -> None:
        self._open.close()
        if error is None:
            self.check_files()

    def write(self, step: int, kind: str, **values: object) -> None:
        """Write one line of metrics."""
        if self._file:
            line = self._file.write(step, kind, **values)
            for sink in (*self._trackers, self._view):
                sink.write(line)

    def log(
        self,
        state: TrainState,
        result: StepResult,
        batch: StepBatch,
        rates: dict[str, float],
        stage: Stage,
        wait: bool,
    ) -> int:
        """Log the step that was just computed; returns the exit status that any rank requested, 0:
        none.

        Args:
            rates: the learning rates by name, with `lr`.
            wait: read this step too, also on a GPU.

        Raises TrainingError where more steps were skipped than the settings allow.
        """
        if stage is not self._stage:
            self._stage = stage
            tokens = stage.length * stage.batch_size
            self._step_flops = tokens * state.model.flops_per_token(stage.length)
        values = rates | batch.facts
        self._queue.append(_QueuedStep(state.step, result, values, stage, self._step_flops))
        return self.read(0 if wait else self._late)

    def read(self, pending: int = 0) -> int:
        """Read all results but the latest `pending`; as `log`."""
        status = 0
        while len(self._queue) > pending:
            step = self._queue.pop(0)
            metrics = step.result.read()
            status = metrics.status or status
            self._write_step(step, metrics)
            if metrics.reason:
                self._report_skipped(step.done, metrics)
            else:
                self._applied = step.done
        return status

    def _write_step(self, step: _QueuedStep, metrics: StepMetrics) -> None:
        self.loss = metrics.loss
        stage = step.stage
        if stage.start == step.done - 1 > 0:
            self._write_stage(stage)
        tokens = stage.length * stage.batch_size
        self._tokens += tokens
        self._speed.add(tokens, step.flops)
        skipped = {"skipped": REASONS[metrics.reason]} if metrics.reason else {}
        speed = {}
        if step.done % self._interval == 0 or step.done == self._run.steps:
            rate, flops = self._speed.measure()
            speed = {"tokens_per_second": rate}
            if self._peak and flops <= self._peak:  # else it was measured beside other work
                speed["mfu"] = flops / self._peak
            speed["peak_memory_bytes"] = peak_memory(self._run.device)
            if self._lost_file() is not None:
                self._run.requests.request(INTERRUPTED)  # all save, then this process reports it
        self.write(
            step.done,
            "train",
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            **skipped,
            tokens=self._tokens,
            **step.values,
            **speed,
        )

    def _write_stage(self, stage: Stage) -> None:
        size = {"length": stage.length, "batch_size": stage.batch_size} if stage.is_resized else {}
        self.write(
            stage.start,
            "change",
            overrides=list(stage.overrides),
            **size,
        )
        self._run.console.info(stage.describe())

    def _report_skipped(self, done: int, metrics: StepMetrics) -> None:
        """Warn of a step that was not applied; raise TrainingError where these are too many."""
        if metrics.stopped:
            raise_stopped(done, metrics, self._run.folder, self._applied)
        if self._file:
            self._run.console.warn(
                f"step {done} is skipped, {REASONS[metrics.reason]}: loss {metrics.loss:g}, "
                f"gradient norm {metrics.grad_norm:g}; number {metrics.count} of the run"
            )

    def end(self) -> None:
        """Log the end of the run."""
        self.write(
            self._run.steps,
            "end",
            peak_memory_bytes=peak_memory(self._run.device),
        )

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the rates."""
        self._speed.restart()

    def sync(self) -> None:
        """Flush the metrics to the disk before a checkpoint.

        Raises TrainingError where the run directory is lost: saving would create another one in its
        place.
        """
        if self._lost_file() == self._run.folder:
            self.check_files()
        if self._file:
            self._file.sync()

    def check_files(self) -> None:
        """Raise TrainingError where part of the run directory is lost."""
        if (lost := self._lost_file()) is not None:
            raise TrainingError(
                f"{lost} was removed or moved during training: restore it, then resume"
            )

    def _lost_file(self) -> Path | None:
        """The folder or file of this run that was removed, moved or replaced since training
        started."""
        for path, file_id in self._files.items():
            if _file_id(path) != file_id:
                return path
        manifest = self._run.folder / MANIFEST
        return manifest if self._file and not manifest.exists() else None


class _Throughput:
    """Tokens and FLOPs per second since the last `measure`, without the time of other work."""

    def __init__(self):
        self._seconds = self._tokens = self._flops = 0.0
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step."""
        self._last = time.perf_counter()

    def add(self, tokens: int, flops: float) -> None:
        """Count one more step."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._tokens += tokens
        self._flops += flops

    def measure(self) -> tuple[float, float]:
        """(tokens per second, FLOP/s) since the last call."""
        seconds = max(self._seconds, 1e-9)
        rates = self._tokens / seconds, self._flops / seconds
        self._seconds = self._tokens = self._flops = 0.0
        return rates


def _file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode of a path; None where it does not exist."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino
