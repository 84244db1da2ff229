"""The metrics of a run while it trains: metrics.jsonl, Weights & Biases, and the terminal."""

import importlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import INTERRUPTED, REQUEUE, TrainingError
from run_directory.checkpoints import steps_of
from run_directory.console import Console, duration
from run_directory.metrics_file import parsed_line, read_metrics
from run_directory.process_group import error_barrier
from run_directory.run import MANIFEST, METRICS
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import Stage
from training.hardware import known_peak, peak_memory
from training.micro_batches import StepBatch
from training.setup import TrainingRun
from training.step_guard import NOT_FINITE, REASONS, SPIKE
from training.train_state import TrainState

UPLOAD_TIMEOUT = 20.0  # seconds for the last uploads to Weights & Biases


class StepResult:
    """Scalars of one step by name, copied to the host asynchronously: reading waits for this step
    only."""

    def __init__(self, scalars: dict[str, Tensor]):
        self._names = list(scalars)
        self._values = torch.stack([x.double() for x in scalars.values()])
        self._copied: torch.cuda.Event | None = None
        if self._values.device.type == "cuda":
            host = torch.empty(self._values.shape, dtype=torch.float64, pin_memory=True)
            self._values = host.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> dict[str, float]:
        """Wait for the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


class MetricsFile:
    """Appends lines to metrics.jsonl and flushes each to the operating system, so kill -9 loses
    none.

    Opening it starts a new attempt at `step`; an incomplete last line is removed first.
    """

    def __init__(self, file: Path, step: int):
        self.attempt = 1
        if file.exists():
            _complete_last_line(file)
            self.attempt += max((line["attempt"] for line in read_metrics(file)), default=0)
        self._stream = file.open("a", encoding="utf-8")
        self.write(step, "start")

    def write(self, step: int, kind: str = "train", **values: object) -> dict:
        """Write one line and return it as written; a number that is not finite becomes "nan" or
        "inf"."""
        line: dict = {"kind": kind, "step": step, "attempt": self.attempt}
        line |= {key: _plain(value) for key, value in values.items()}
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()
        return line

    def sync(self) -> None:
        """Flush all lines to the disk; called before a checkpoint."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def _complete_last_line(file: Path) -> None:
    """Remove an incomplete last line; a line that lacks only its newline gets one."""
    content = file.read_bytes()
    rest = content.rpartition(b"\n")[2]
    if rest and parsed_line(rest) is not None:
        with file.open("ab") as stream:
            stream.write(b"\n")
    else:
        os.truncate(file, len(content) - len(rest))


def _plain(value: object) -> object:
    """A value that JSON can represent; json.dumps raises TypeError for other classes."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Reads the results of steps on every rank; the main rank writes each line of metrics to
    metrics.jsonl, Weights & Biases and the terminal.

    Every step is one line. On a GPU a result is read one step late, so that the host never waits
    inside a step. Speeds are measured every `log_interval` steps.

    `loss` is the loss of the newest step that was read.
    """

    def __init__(self, run: TrainingRun, state: TrainState):
        settings = run.settings
        self._run = run
        self._interval = settings.training.log_interval
        self._late = 1 if run.device.type == "cuda" else 0
        self._tokens = settings.tokens_after(state.step)
        self._open = ExitStack()
        self._file: MetricsFile | None = None
        self._sinks: list[Any] = []  # objects with a method `write`
        with error_barrier(run.parallel, "begin"):
            if run.parallel.main:
                self._file = MetricsFile(run.folder / METRICS, state.step)
                self._open.callback(self._file.close)
                self._sinks = [ProgressLines(run.steps, settings.trained_tokens, run.console)]
                if settings.training.wandb.mode != "disabled":
                    self._sinks.append(WandbLog(settings, run.folder, run.console))
                    self._open.callback(self._sinks[-1].close)
        self._queue: list[tuple[int, StepResult, StepBatch]] = []
        self._seconds = 0.0  # duration of the steps since the last measured speed
        self._measured = self._tokens  # tokens at the last measured speed
        self.loss = math.nan

    def __enter__(self) -> "Metrics":
        self.resume_clock()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(self, step: int, kind: str, **values: object) -> None:
        """Write one line of metrics."""
        if self._file:
            line = self._file.write(step, kind, **values)
            for sink in self._sinks:
                sink.write(line)

    def log(self, state: TrainState, result: StepResult, batch: StepBatch, wait: bool) -> int:
        """Log the step that was just computed; returns the exit status that any rank requested, 0:
        none.

        Args:
            wait: read this step too, also on a GPU.

        Raises TrainingError if more steps were skipped than the settings allow.
        """
        self._queue.append((state.step, result, batch))
        return self.read(0 if wait else self._late)

    def read(self, pending: int = 0) -> int:
        """Read all results except the latest `pending`; returns and raises like `log`."""
        status = 0
        while len(self._queue) > pending:
            step, result, batch = self._queue.pop(0)
            scalars = result.read()
            if scalars["exit"]:
                status = REQUEUE if scalars["requeue"] else INTERRUPTED
            self._write_step(step, scalars, batch)
            if scalars["stopped"]:
                raise TrainingError(why_stopped(self._run.folder, step, scalars))
            if scalars["reason"] in (NOT_FINITE, SPIKE) and self._file:
                self._run.console.warn(
                    f"step {step} is skipped ({REASONS[int(scalars['reason'])]}; number "
                    f"{scalars['count']:.0f} of the run): loss {scalars['loss']:g}, gradient norm "
                    f"{scalars['grad_norm']:g}"
                )
        return status

    def _write_step(self, step: int, scalars: dict[str, float], batch: StepBatch) -> None:
        stage = batch.stage
        if stage.start == step - 1 > 0:
            self._write_change(stage)
        self.loss = scalars["loss"]
        self._tokens += stage.length * stage.batch_size
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        values: dict[str, Any] = batch.rates | batch.facts
        if "loss_scale" in scalars:
            values["loss_scale"] = scalars["loss_scale"]
        if scalars["reason"]:
            values["skipped"] = REASONS[int(scalars["reason"])]
            values["skipped_steps"] = int(scalars["count"])
        if step % self._interval == 0 or step == self._run.steps:
            rate = (self._tokens - self._measured) / max(self._seconds, 1e-9)
            values["tokens_per_second"] = rate
            if peak := known_peak(self._run.device):
                flops = rate * self._run.model.flops_per_token(stage.length)
                values["mfu"] = flops / (peak * self._run.parallel.world)
            values["peak_memory_bytes"] = peak_memory(self._run.device)
            self._seconds = 0.0
            self._measured = self._tokens
        self.write(
            step,
            "train",
            loss=scalars["loss"],
            grad_norm=scalars["grad_norm"],
            tokens=self._tokens,
            **values,
        )

    def _write_change(self, stage: Stage) -> None:
        size = {"length": stage.length, "batch_size": stage.batch_size}
        overrides = list(stage.overrides)
        self.write(stage.start, "change", overrides=overrides, **size if stage.is_resized else {})
        self._run.console.info(f"after step {stage.start} {stage.changes}")

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the rates."""
        self._last = time.perf_counter()

    def sync(self) -> None:
        """Flush the metrics to the disk before a checkpoint.

        Raises TrainingError if a file of the run directory is lost: saving would create another one
        in its place.
        """
        if self._file:
            for name in ("", METRICS, MANIFEST):
                if not (lost := self._run.folder / name).exists():
                    raise TrainingError(
                        f"{lost} was removed or moved during training: restore it, then resume"
                    )
            self._file.sync()


def why_stopped(folder: Path, step: int, scalars: dict[str, float]) -> str:
    """An error message for the step that stopped the run in `folder`."""
    steps = steps_of(folder)
    saved = f"step {steps[-1]} is saved" if steps else "there is no checkpoint"
    fix = "raise training.on_nonfinite.limit"
    reason = int(scalars["reason"])
    if reason == SPIKE:
        fix = "raise training.on_spike.limit"
    elif scalars["count"] == 1:
        fix = "set training.on_nonfinite.name=skip"
    return (
        f"step {step}: the loss is {scalars['loss']:g}, the gradient norm "
        f"{scalars['grad_norm']:g} ({REASONS[reason]} number {scalars['count']:.0f} of the run). "
        f"The step was not applied, and {saved}: lower training.optimizer.lr or "
        f"training.grad_clip in a new run, or check its data, or {fix}"
    )


class ProgressLines:
    """Prints one line for each measured speed, and for each validation, of metrics.jsonl.

    Args:
        steps, tokens: number of steps and of tokens of the whole run.
    """

    def __init__(self, steps: int, tokens: int, console: Console):
        self._steps = steps
        self._tokens = tokens
        self._console = console
        self._nll: dict[str, float] = {}  # NLL of the last validation, by length

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


class WandbLog:
    """A copy of metrics.jsonl for Weights & Biases. Its failures never stop a run: the first one is
    reported, and ends the log.

    Attributes:
        run: the run of wandb; None: no run is open.
    """

    def __init__(self, settings: RunSettings, folder: Path, console: Console):
        self._console = console
        self.run: Any = None
        w = settings.training.wandb
        with self._ended_by_errors():
            # Imported only if used: the import takes half a second and writes files to the home
            # folder.
            self.run = importlib.import_module("wandb").init(
                project=w.project,
                entity=w.entity,
                mode=w.mode,
                dir=str(folder),
                id=folder.name,
                name=folder.name,
                resume="allow" if w.mode == "online" else None,
                config=settings.model_dump(mode="json"),
                # Without a timeout, the end of a run would wait as long as the network is down,
                # even after a signal. Unsent data stay in the run directory, for `wandb sync`.
                settings={"finish_timeout": UPLOAD_TIMEOUT, "finish_timeout_raises": True},
            )
            # A metric of our own: a resumed run repeats steps, which wandb's counter rejects.
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")

    def write(self, line: dict) -> None:
        """Send one line of metrics; names are prefixed with its kind, nested names joined with
        slashes."""
        if self.run is None:
            return
        values = dict(line)
        kind = values.pop("kind")
        place = {key: values.pop(key) for key in ("step", "attempt")}
        with self._ended_by_errors():
            self.run.log(flat(values, kind) | place)

    def close(self) -> None:
        if self.run is not None:
            with self._ended_by_errors():
                self.run.finish()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of the tracker: training continues
            self.run = None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._console.warn(f"wandb is disabled; training continues: {first}")


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Flatten nested values; nested names are joined with slashes."""
    flattened = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        flattened |= flat(value, name) if isinstance(value, dict) else {name: value}
    return flattened
