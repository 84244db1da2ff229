"""What a run tells while it trains: metrics.jsonl, its mirrors, and lines for whoever follows along."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from training.console import Console, duration
from training.gate import REASONS, refuse_stopped
from training.live import LiveView, short_name
from training.log import MetricsLog
from training.loop import Meter, Outcome, Reading
from training.mirrors import make_mirrors
from training.settings import RunSettings
from training.stages import Stage


class Recorder:
    """Reads the outcomes of steps, on every rank alike, and writes them down on the main one.

    Outcomes stay on the device until `read`; every step gets a line in metrics.jsonl. A terminal shows where
    the run is; a log file gets a line every `log_every` steps.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        step: int,
        *,
        main: bool,
        console: Console,
        flops_per_token: float,
        peak: float,
        memory: Callable[[], int],
    ):
        """`peak`: FLOP/s of all devices; `memory`: the most bytes that this process has held."""
        self.folder, self.settings, self.console = folder, settings, console
        self._log = MetricsLog(folder / "metrics.jsonl", step) if main else None
        self._mirrors = make_mirrors(settings, folder, step, console) if main else []
        self._meter = Meter(settings.tokens_after, settings.steps, step)
        self._flops_per_token, self._peak, self._memory = flops_per_token, peak, memory
        self._unread: list[tuple[int, dict, dict, Outcome, float]] = []
        self._begun: dict[int, Stage] = {}  # stages to tell of, by the unread step they follow
        self._view = LiveView(short_name(folder), settings.steps, step, peak)
        self._open = ExitStack()
        self._draw: Callable[[], None] | None = None

    def __enter__(self) -> "Recorder":
        for one in (self._log, *self._mirrors):
            if one:
                self._open.callback(one.close)
        self._draw = self._open.enter_context(self.console.live(self._view))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def step(self, done: int, outcome: Outcome, rates: dict[str, float], **values: object) -> None:
        """Note a step whose outcome may still be on its way; `rates` by name, `lr` among them."""
        self._unread.append((done, rates, values, outcome, self._flops_per_token))

    def read(self, leave: int = 0) -> int:
        """Read all outcomes but the latest `leave`; returns the exit status that a signal asked for, or 0.

        Raises:
            TrainingError: a step was the one too many that could not be applied.
        """
        status = 0
        while len(self._unread) > leave:
            done, rates, values, outcome, flops_per_token = self._unread.pop(0)
            found = outcome.read()
            status = found.status or status
            self._meter.step(flops_per_token)
            timing, left = {}, 0.0
            shown = done % self.settings.training.log_every == 0 or done == self.settings.steps
            if shown:
                speed, flops, left = self._meter.look()
                timing = {"tokens_per_second": speed, "mfu": flops / self._peak}
                timing["peak_memory_bytes"] = self._memory()
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
            if (stage := self._begun.pop(done, None)) is not None:
                self._begin(stage)
        return status

    def _skip(self, done: int, found: Reading) -> None:
        """Say that a step was not applied; raise where that is one too many."""
        if found.stopped:
            refuse_stopped(done, found.loss, found.grad_norm, found.reason, found.count, self.folder)
        if self._log:
            self.console.warn(
                f"step {done} is skipped, {REASONS[found.reason]}: loss {found.loss:g}, gradient norm "
                f"{found.grad_norm:g}; number {found.count} of the run"
            )

    def write(self, done: int, kind: str, **values: object) -> None:
        """One line of metrics."""
        if self._log:
            line = self._log.write(done, kind, **values)
            for mirror in self._mirrors:
                mirror.write(line)

    def change(self, stage: Stage, flops_per_token: float) -> None:
        """Note that a stage begins, and what a token costs in it; steps before it that are still to be read
        keep theirs, and are told first."""
        self._flops_per_token = flops_per_token
        if self._unread:
            self._begun[stage.start] = stage
        else:
            self._begin(stage)

    def _begin(self, stage: Stage) -> None:
        size = {"length": stage.length, "batch_size": stage.batch_size} if stage.is_resized else {}
        self.write(stage.start, "change", words=list(stage.words), **size)
        self.console.say(stage.describe())

    def look(self, done: int, nll: dict[int, float], targets: int, documents: int, **values: object) -> None:
        """Note the NLL (nats) of held-out targets by length; say it with the change since the look before."""
        self.write(done, "validation", nll=nll, targets=targets, documents=documents, **values)
        before = self._view.nll
        self._view.look(done, nll, targets, documents)  # first: a line that is said draws the view anew
        if not before:
            self.console.say(f"held-out NLL by length: the same {targets:,} targets of {documents} documents")
        self.console.say(f"step {done} held-out NLL  {'  '.join(looks_in_words(nll, before))}")

    def sync(self) -> None:
        """Force the metrics to the disk, before a checkpoint that counts on them."""
        if self._log:
            self._log.sync()

    def resume_clock(self) -> None:
        """Leave the time since the last step out of the rates."""
        self._meter.restart()

    def _show(self, done: int, found: Reading, rate: float, timing: dict, left: float) -> None:
        """A terminal is drawn anew, and a log file gets its line where rates are known."""
        view, steps = self._view, self.settings.steps
        view.step(done, found.loss, found.grad_norm, rate)
        if timing:
            view.speed, view.mfu, view.memory = timing.values()
            view.left = left
        if self._draw:
            self._draw()
        elif timing:
            self.console.say(
                f"step {done:>{len(str(steps))}}/{steps}  loss {found.loss:7.4f}  lr {rate:.2e}  "
                f"{view.speed:>8,.0f} tokens/s  MFU {view.mfu:.0%}  {duration(left)} left"
            )


def looks_in_words(nll: dict[int, float], before: dict[int, float]) -> list[str]:
    """`256: 3.5271 (-0.0210)` for each length, with the change since the look before where there was one."""
    return [
        f"{length}: {value:.4f}" + (f" ({value - before[length]:+.4f})" if length in before else "")
        for length, value in nll.items()
    ]
