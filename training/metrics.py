"""The metrics of a run while it trains: metrics.jsonl, Weights & Biases, and the terminal."""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from errors import INTERRUPTED, REQUEUE, TrainingError
from run_directory.checkpoints import steps_of
from run_directory.console import Console, duration
from run_directory.metrics_file import MetricsFile
from run_directory.process_group import error_barrier
from run_directory.run import MANIFEST, METRICS
from run_directory.stages import Stage
from training.hardware import known_peak, peak_memory
from training.micro_batches import StepBatch
from training.parallel import Parallel
from training.setup import TrainingRun
from training.train_state import REASONS, SPIKE, StepDecision, TrainState
from training.wandb_log import WandbLog


def reduce_step(parallel: Parallel, nll: Tensor, status: int) -> tuple[Tensor, Tensor]:
    """Sum over all ranks the NLL and, of the ranks' exit statuses, how many are not 0 and how many
    ask for a requeue, (2,)."""
    requests = [torch.full_like(nll, float(flag)) for flag in (status > 0, status == REQUEUE)]
    total = parallel.sum(torch.stack([nll, *requests]))
    return total[0], total[1:]


class StepMetrics(NamedTuple):
    """The metrics of one step, on the host."""

    loss: float
    grad_norm: float  # before clipping
    status: int  # exit status requested by any rank; 0: none
    reason: int  # why the update was skipped: 0, NOT_FINITE or SPIKE
    count: int  # steps of the run skipped for that reason so far
    stopped: bool  # a limit of skipped steps is exceeded: no further update is applied


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, copied to the host asynchronously: reading waits for this step
    only."""

    # (7,) float64: loss, gradient norm, ranks that exit, ranks to requeue, reason, count, stopped
    values: Tensor
    ready: torch.cuda.Event | None  # recorded when `values` have arrived; None: they have

    @classmethod
    def of(
        cls, loss: Tensor, grad_norm: Tensor, requests: Tensor, decision: StepDecision
    ) -> "StepResult":
        """From tensors on the device.

        Args:
            loss: the mean NLL over all targets and ranks.
            grad_norm: the gradient norm before clipping.
            requests: the counts of `reduce_step`.
            decision: that of the StepGuard.
        """
        scalars = (loss, grad_norm, *requests, decision.reason, decision.count, decision.stopped)
        values = torch.stack([x.double() for x in scalars])
        if values.device.type != "cuda":
            return cls(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(host, ready)

    def read(self) -> StepMetrics:
        """Wait for the values."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, exits, requeue, reason, count, stopped = self.values.tolist()
        status = REQUEUE if requeue else INTERRUPTED if exits else 0
        return StepMetrics(
            loss=loss,
            grad_norm=norm,
            status=status,
            reason=int(reason),
            count=int(count),
            stopped=bool(stopped),
        )


class Metrics:
    """Reads the results of steps on every rank; the main rank writes each line of metrics to
    metrics.jsonl, Weights & Biases and the terminal.

    Every step is one line. On a GPU a result is read one step late, so that the host never waits
    inside a step. Speeds are measured every `log_interval` steps.

    loss: of the newest step that was read.
    """

    def __init__(self, run: TrainingRun, state: TrainState):
        settings = run.settings
        self._run = run
        self._interval = settings.training.log_interval
        self._late = 1 if run.device.type == "cuda" else 0
        peak = known_peak(run.device)
        self._peak = peak and peak * run.parallel.world  # FLOP/s
        self._flops_per_token = run.model.flops_per_token
        self._tokens = settings.tokens_after(state.step)
        self._open = ExitStack()
        self._file: MetricsFile | None = None
        self._sinks: list[Any] = []  # with `write`
        with error_barrier(run.parallel, "begin"):
            if run.parallel.main:
                self._file = MetricsFile(run.folder / METRICS, state.step)
                self._open.callback(self._file.close)
                self._sinks = [ProgressLines(run.steps, settings.trained_tokens, run.console)]
                if settings.training.wandb.mode != "disabled":
                    wandb = WandbLog(settings, run.folder, run.console)
                    self._open.callback(wandb.close)
                    self._sinks.append(wandb)
        self._queue: list[tuple[int, StepResult, dict, Stage]] = []
        self._seconds = 0.0  # of the steps since the last measured speed
        self._measured = self._tokens  # tokens then
        self.loss = math.nan

    def __enter__(self) -> "Metrics":
        self.resume_clock()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._open.close()
        if error is None and self._lost():
            raise self._lost_error()

    def write(self, step: int, kind: str, **values: object) -> None:
        """Write one line of metrics."""
        if self._file:
            line = self._file.write(step, kind, **values)
            for sink in self._sinks:
                sink.write(line)

    def log(
        self,
        state: TrainState,
        result: StepResult,
        batch: StepBatch,
        rates: dict[str, float],
        wait: bool,
    ) -> int:
        """Log the step that was just computed; returns the exit status that any rank requested, 0:
        none.

        Args:
            rates: the learning rates by name, with `lr`.
            wait: read this step too, also on a GPU.

        Raises TrainingError where more steps were skipped than the settings allow.
        """
        self._queue.append((state.step, result, rates | batch.facts, batch.stage))
        return self.read(0 if wait else self._late)

    def read(self, pending: int = 0) -> int:
        """Read all results but the latest `pending`; as `log`."""
        status = 0
        while len(self._queue) > pending:
            step, result, values, stage = self._queue.pop(0)
            metrics = result.read()
            status = metrics.status or status
            self._write_step(step, metrics, values, stage)
            if metrics.stopped:
                raise TrainingError(self._why_stopped(step, metrics))
            if metrics.reason and self._file:
                self._run.console.warn(
                    f"step {step} is skipped, {REASONS[metrics.reason]}: loss {metrics.loss:g}, "
                    f"gradient norm {metrics.grad_norm:g}; number {metrics.count} of the run"
                )
        return status

    def _write_step(self, step: int, metrics: StepMetrics, values: dict, stage: Stage) -> None:
        if stage.start == step - 1 > 0:
            size = {"length": stage.length, "batch_size": stage.batch_size}
            size = size if stage.is_resized else {}
            self.write(stage.start, "change", overrides=list(stage.overrides), **size)
            self._run.console.info(stage.describe())
        self.loss = metrics.loss
        self._tokens += stage.length * stage.batch_size
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        if metrics.reason:
            values |= {"skipped": REASONS[metrics.reason]}
        if step % self._interval == 0 or step == self._run.steps:
            rate = (self._tokens - self._measured) / max(self._seconds, 1e-9)
            values |= {"tokens_per_second": rate}
            if self._peak:
                values["mfu"] = rate * self._flops_per_token(stage.length) / self._peak
            values["peak_memory_bytes"] = peak_memory(self._run.device)
            self._seconds = 0.0
            self._measured = self._tokens
            if self._lost():
                self._run.requests.request(INTERRUPTED)  # all save, then this process reports it
        self.write(
            step,
            "train",
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            tokens=self._tokens,
            **values,
        )

    def _lost(self) -> list[Path]:
        """The files of the run directory that are gone."""
        files = [self._run.folder / name for name in (METRICS, MANIFEST)]
        return [file for file in files if self._file and not file.exists()]

    def _lost_error(self) -> TrainingError:
        folder = self._run.folder
        lost = self._lost()[0] if folder.exists() else folder
        return TrainingError(
            f"{lost} was removed or moved during training: restore it, then resume"
        )

    def _why_stopped(self, step: int, metrics: StepMetrics) -> str:
        """An error message for the step that stopped the run."""
        steps = steps_of(self._run.folder)
        saved = f"step {steps[-1]} is saved" if steps else "there is no checkpoint"
        fix = "raise training.on_nonfinite.limit"
        if metrics.reason == SPIKE:
            fix = "raise training.on_spike.limit"
        elif metrics.count == 1:
            fix = "set training.on_nonfinite.name=skip"
        return (
            f"step {step}: the loss is {metrics.loss:g}, the gradient norm {metrics.grad_norm:g} "
            f"({REASONS[metrics.reason]} number {metrics.count} of the run). The step was not "
            f"applied, and {saved}: lower training.optimizer.lr or training.grad_clip in a new "
            f"run, or check its data, or {fix}"
        )

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the rates."""
        self._last = time.perf_counter()

    def sync(self) -> None:
        """Flush the metrics to the disk before a checkpoint.

        Raises TrainingError where the run directory is lost: saving would create another one in its
        place.
        """
        if not self._run.folder.exists():
            raise self._lost_error()
        if self._file:
            self._file.sync()


class ProgressLines:
    """Prints one line for each measured speed, and for each validation, of metrics.jsonl.

    Args:
        steps, tokens: of the whole run.
    """

    def __init__(self, steps: int, tokens: int, console: Console):
        self._steps = steps
        self._tokens = tokens
        self._console = console
        self._nll: dict[str, float] = {}  # of the last validation, by length

    def write(self, line: dict) -> None:
        """Print one line of metrics.jsonl, if it is of these kinds."""
        if line["kind"] == "train" and "tokens_per_second" in line:
            rate = line["tokens_per_second"]
            mfu = f"  MFU {line['mfu']:.0%}" if "mfu" in line else ""
            left = duration((self._tokens - line["tokens"]) / rate)
            self._console.info(
                f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  loss "
                f"{float(line['loss']):7.4f}  lr {line['lr']:.2e}  {rate:>8,.0f} tokens/s{mfu}  "
                f"{left} left"
            )
        elif line["kind"] == "validation":
            if not self._nll:
                self._console.info(
                    f"held-out NLL by length: the same {line['targets']:,} targets of "
                    f"{line['documents']} documents"
                )
            nll = {length: float(value) for length, value in line["nll"].items()}
            values = [
                f"{length}: {value:.4f}"
                + (f" ({value - self._nll[length]:+.4f})" if length in self._nll else "")
                for length, value in nll.items()
            ]
            self._console.info(f"step {line['step']} held-out NLL  {'  '.join(values)}")
            self._nll = nll
