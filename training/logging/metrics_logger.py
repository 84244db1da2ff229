"""The metrics of a run while it trains: metrics.jsonl, trackers, and the terminal."""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from data import Batch
from training.errors import INTERRUPTED, TrainingError
from training.files import read_json
from training.logging.console import duration
from training.logging.live import LiveView, short_name
from training.logging.metrics_file import MetricsFile
from training.logging.step_metrics import StepMetrics, StepResult, ThroughputMeter
from training.logging.trackers import make_trackers
from training.optim.step_guard import REASONS, raise_stopped
from training.run.directory import MANIFEST
from training.run.hardware import peak_flops, peak_memory
from training.run.setup import TrainingRun
from training.stages import Stage, stage_after, stages_of


class MetricsLogger:
    """Reads the results of steps on every rank; the main rank writes metrics.jsonl and the trackers.

    Results stay on the device until `read`; every step is one line of metrics.jsonl. A terminal shows the
    live view; other outputs print one line every `log_interval` steps.

    loss: of the newest step that was read.
    """

    def __init__(self, run: TrainingRun, step: int):
        folder, settings, main = run.folder, run.settings, run.parallel.main
        self.folder, self.settings, self.console = folder, settings, run.console
        self._log = MetricsFile(folder / "metrics.jsonl", step) if main else None
        own = (folder, folder / "metrics.jsonl") if main else ()
        self._own = [(path, path.stat()) for path in own]
        self._trackers = make_trackers(settings, folder, step, run.console) if main else []
        self._meter = ThroughputMeter(settings.tokens_after, settings.steps, step)
        self._device, self._flops_per_token_at = run.device, run.model.flops_per_token
        self._flops_per_token = self._flops_per_token_at(stage_after(stages_of(settings), step).length)
        self._peak = peak_flops(run.device) * run.parallel.world
        self.loss = math.nan
        self._applied = step  # the last step that changed the weights
        self._unread: list[tuple[int, dict, dict, StepResult, float]] = []
        self._begun: dict[int, Stage] = {}  # stages to log, by the unread step they follow
        self._view = LiveView(short_name(folder), settings.steps, step, self._peak)
        self._open = ExitStack()
        self._draw: Callable[[], None] | None = None
        if step == 0 and "step0" in (manifest := read_json(folder / MANIFEST)):  # of an extension run
            self.write(0, "step0", **manifest["step0"])

    def __enter__(self) -> "MetricsLogger":
        for one in (self._log, *self._trackers):
            if one:
                self._open.callback(one.close)
        self._draw = self._open.enter_context(self.console.live(self._view))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._open.close()
        if error is None:
            self.check()

    def _lost(self) -> Path | None:
        """The folder or file of this run that was removed, moved or replaced since training started."""
        for path, before in self._own:
            try:
                if not os.path.samestat(path.stat(), before):
                    return path
            except FileNotFoundError:
                return path
        manifest = self.folder / MANIFEST
        return manifest if self._log and not manifest.exists() else None

    @property
    def status(self) -> int:
        """The exit status to request from all processes where part of the run folder is lost, so that they
        save and report it after the same step; else 0."""
        return INTERRUPTED if self._lost() else 0

    def check(self) -> None:
        """Raises TrainingError where part of the run folder is lost."""
        if (lost := self._lost()) is not None:
            raise TrainingError(
                f"{lost} was removed or moved during training: restore it, then run the same command again"
            )

    def step(self, done: int, result: StepResult, rates: dict[str, float], batch: Batch) -> None:
        """Queue the result of a step, which may not have been computed yet; `rates` by name, with `lr`."""
        values = {"tokens": self.settings.tokens_after(done), "targets": batch.n_targets}
        values |= {"passes": batch.passes} if batch.passes else {}
        values |= {"epoch": batch.epoch, "data": batch.hash}
        self._unread.append((done, rates, values, result, self._flops_per_token))

    def read(self, pending: int = 0) -> int:
        """Read all results but the latest `pending`; returns the exit status that any rank requested, or 0.

        Raises:
            TrainingError: more steps were skipped than the settings allow.
        """
        status = 0
        while len(self._unread) > pending:
            done, rates, values, result, flops_per_token = self._unread.pop(0)
            found = result.read()
            status = found.status or status
            self.loss = found.loss
            self._meter.step(flops_per_token)
            timing, left = {}, 0.0
            shown = done % self.settings.training.log_interval == 0 or done == self.settings.steps
            if shown:
                speed, flops, left = self._meter.measure()
                timing = {"tokens_per_second": speed, "mfu": flops / self._peak}
                timing["peak_memory_bytes"] = peak_memory(self._device)
            self._show(done, found, rates["lr"], timing, left)
            skipped = {"skipped": REASONS[found.reason]} if found.reason else {}
            self.write(
                done,
                "train",
                loss=found.loss,
                grad_norm=found.grad_norm,
                **skipped,
                **rates,
                **values,
                **timing,
            )
            if found.reason:
                self._skip(done, found)
            else:
                self._applied = done
            if (stage := self._begun.pop(done, None)) is not None:
                self._begin(stage)
        return status

    def _skip(self, done: int, found: StepMetrics) -> None:
        """Warn of a step that was not applied; raise TrainingError where these are too many."""
        if found.stopped:
            what = (done, found.loss, found.grad_norm, found.reason, found.count)
            raise_stopped(*what, self.folder, self._applied)
        if self._log:
            self.console.warn(
                f"step {done} is skipped, {REASONS[found.reason]}: loss {found.loss:g}, gradient norm "
                f"{found.grad_norm:g}; number {found.count} of the run"
            )

    def write(self, done: int, kind: str, **values: object) -> None:
        """One line of metrics."""
        if self._log:
            line = self._log.write(done, kind, **values)
            for tracker in self._trackers:
                tracker.write(line)

    def end(self, done: int) -> None:
        """Log the end of the run."""
        self.write(done, "end", peak_memory_bytes=peak_memory(self._device))

    def change(self, stage: Stage) -> None:
        """Log that a stage begins, after the steps before it that are not read yet."""
        self._flops_per_token = self._flops_per_token_at(stage.length)
        if self._unread:
            self._begun[stage.start] = stage
        else:
            self._begin(stage)

    def _begin(self, stage: Stage) -> None:
        size = {"length": stage.length, "batch_size": stage.batch_size} if stage.is_resized else {}
        self.write(stage.start, "change", overrides=list(stage.overrides), **size)
        self.console.info(stage.describe())

    def validation(
        self, done: int, nll: dict[int, float], targets: int, documents: int, **values: object
    ) -> None:
        """Log the NLL (nats) of held-out targets by length, and its change since the last validation."""
        self.write(done, "validation", nll=nll, targets=targets, documents=documents, **values)
        before = self._view.nll
        self._view.validation(done, nll, targets, documents)  # first: a logged line redraws the view
        if not before:
            self.console.info(
                f"held-out NLL by length: the same {targets:,} targets of {documents} documents"
            )
        self.console.info(f"step {done} held-out NLL  {'  '.join(validation_in_words(nll, before))}")

    def sync(self) -> None:
        """Flush the metrics to the disk before a checkpoint.

        Raises TrainingError where the run folder is lost: saving would create another one in its place.
        """
        if self._lost() == self.folder:
            self.check()
        if self._log:
            self._log.sync()

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the rates."""
        self._meter.restart()

    def _show(self, done: int, found: StepMetrics, rate: float, timing: dict, left: float) -> None:
        """Redraw a terminal; write a line to a log file where rates were measured."""
        view, steps = self._view, self.settings.steps
        view.step(done, found.loss, found.grad_norm, rate)
        if timing:
            view.speed, view.mfu, view.memory = timing.values()
            view.left = left
        if self._draw:
            self._draw()
        elif timing:
            self.console.info(
                f"step {done:>{len(str(steps))}}/{steps}  loss {found.loss:7.4f}  lr {rate:.2e}  "
                f"{view.speed:>8,.0f} tokens/s  MFU {view.mfu:.0%}  {duration(left)} left"
            )


def validation_in_words(nll: dict[int, float], before: dict[int, float]) -> list[str]:
    """`256: 3.5271 (-0.0210)` for each length, with the change since the last validation."""
    return [
        f"{length}: {value:.4f}" + (f" ({value - before[length]:+.4f})" if length in before else "")
        for length, value in nll.items()
    ]
