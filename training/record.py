"""What a run tells while it trains: metrics.jsonl, its mirror, and lines for whoever follows along."""

from pathlib import Path

from training.console import Console, duration
from training.log import MetricsLog, Mirror
from training.loop import Meter, Outcome, refuse_broken
from training.settings import RunSettings
from training.stages import Stage


class Recorder:
    """Reads the outcomes of steps, on every rank alike, and writes them down on the main one.

    Outcomes stay on the device until `read`; every step gets a line in metrics.jsonl, every `log_every`-th
    one on the terminal.
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
    ):
        self.folder, self.settings, self.console = folder, settings, console
        self._log = MetricsLog(folder / "metrics.jsonl", step) if main else None
        self._mirror = (
            Mirror(settings.training.wandb, folder, settings.model_dump(mode="json"), console)
            if main
            else None
        )
        self._meter = Meter(settings.tokens_after, settings.steps, step)
        self._flops_per_token, self._peak = flops_per_token, peak
        self._unread: list[tuple[int, dict, dict, Outcome]] = []

    @property
    def attempt(self) -> int:
        return self._log.attempt if self._log else 0

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        if self._log:
            self._log.close()
        if self._mirror:
            self._mirror.close()

    def step(self, done: int, outcome: Outcome, rates: dict[str, float], **values: object) -> None:
        """Note a step whose outcome may still be on its way; `rates` by name, `lr` among them."""
        self._unread.append((done, rates, values, outcome))

    def read(self, leave: int = 0) -> int:
        """Read all outcomes but the latest `leave`; returns how many ranks were asked to stop.

        Raises:
            TrainingError: the loss or gradient of a step was not finite.
        """
        stop = 0
        while len(self._unread) > leave:
            done, rates, values, outcome = self._unread.pop(0)
            loss, norm, requests = outcome.read()
            stop = max(stop, requests)
            self._meter.step()
            timing: dict = {}
            shown = done % self.settings.training.log_every == 0 or done == self.settings.steps
            if shown:
                speed, left = self._meter.look()
                timing = {"tokens_per_second": speed, "mfu": speed * self._flops_per_token / self._peak}
                self._say(done, loss, rates["lr"], timing, left)
            self.write(done, "train", loss=loss, grad_norm=norm, **rates, **values, **timing)
            refuse_broken(done, loss, norm, self.folder)
        return stop

    def write(self, done: int, kind: str, **values: object) -> None:
        """One line of metrics."""
        if self._log and self._mirror:
            self._mirror.write(self._log.write(done, kind, **values))

    def change(self, stage: Stage, flops_per_token: float) -> None:
        """Note that a stage begins, and what a token costs in it."""
        self._flops_per_token = flops_per_token
        size = {"length": stage.length, "batch_size": stage.batch_size} if stage.is_resized else {}
        self.write(stage.start, "change", words=list(stage.words), **size)
        self.console.say(stage.describe())

    def sync(self) -> None:
        """Force the metrics to the disk, before a checkpoint that counts on them."""
        if self._log:
            self._log.sync()

    def resume_clock(self) -> None:
        """Leave the time since the last step out of the rates."""
        self._meter.restart()

    def _say(self, done: int, loss: float, rate: float, timing: dict, left: float) -> None:
        steps = self.settings.steps
        self.console.say(
            f"step {done:>{len(str(steps))}}/{steps}  loss {loss:7.4f}  lr {rate:.2e}  "
            f"{timing['tokens_per_second']:>8,.0f} tokens/s  MFU {timing['mfu']:.0%}  "
            f"{duration(left)} left"
        )
