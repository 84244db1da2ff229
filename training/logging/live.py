"""Live view of a run in training: progress, losses and held-out NLL by length."""

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from training.logging.console import duration

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps the loss is averaged over
KEPT = 400  # steps in the loss curve
CURVE = 24  # width of the loss curve, in characters
CHANGE = ("green", "red")  # colors of a change in NLL: decrease, increase


class LiveView:
    """State and rendering (`__rich__`) of the live view; unknown values are left out."""

    def __init__(self, name: str, steps: int, done: int, peak: float):
        self.name, self.steps, self.done, self.peak = name, steps, done, peak
        self.losses: deque[float] = deque(maxlen=KEPT)
        self.norm, self.rate = math.nan, math.nan
        self.speed, self.mfu, self.left, self.memory = 0.0, 0.0, math.nan, 0
        self.nll: dict[int, float] = {}
        self.before: dict[int, float] = {}
        self.looked = ""

    def step(self, done: int, loss: float, norm: float, rate: float) -> None:
        self.done, self.norm, self.rate = done, norm, rate
        self.losses.append(loss)

    def validation(self, done: int, nll: dict[int, float], targets: int, documents: int) -> None:
        """Record the NLL (nats) of held-out targets by length."""
        self.before, self.nll = self.nll, nll
        self.looked = f"step {done:,}, {targets:,} targets of {documents} documents"

    def __rich__(self) -> Group:
        lines = [self._head(), self._loss(), self._speed()]
        return Group(*lines, self._held_out()) if self.nll else Group(*lines)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 2))
        left = f"{duration(self.left)} left" if math.isfinite(self.left) else ""
        bar = ProgressBar(total=self.steps, completed=self.done, width=20)
        share = f"{self.done / self.steps:.0%}"
        head.add_row(Text(self.name, "bold"), f"step {self.done:,}/{self.steps:,}", bar, share, left)
        return head

    def _loss(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if not self.losses:
            return text.append("waiting for the first step")
        recent = list(self.losses)[-RECENT:]
        earlier = list(self.losses)[-2 * RECENT : -RECENT]
        text.append("loss ").append(f"{mean(recent):.4f}", "bold")
        if len(earlier) == RECENT:
            text.append(f" {mean(recent) - mean(earlier):+.4f}", _tint(mean(recent) - mean(earlier)))
        return text.append(f"  {sparkline(self.losses, CURVE)}  lr {self.rate:.2e}  gradient {self.norm:.2g}")

    def _speed(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if self.speed:
            peak = f"{self.peak / 1e12:,.3g} TFLOP/s"
            text.append(f"{self.speed:,.0f} tokens/s  MFU {self.mfu:.0%} of {peak} (6N, causal attention)")
        if self.memory:
            text.append(f"  {self.memory / 2**20:,.0f} MiB")
        return text

    def _held_out(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
        table.add_column("context")
        for length in self.nll:
            table.add_column(f"{length:,}", justify="right")
        table.add_row("NLL", *(f"{nll:.4f}" for nll in self.nll.values()))
        if self.before:
            changes = [nll - self.before.get(length, math.nan) for length, nll in self.nll.items()]
            table.add_row("change", *(Text(f"{c:+.4f}" if c == c else "", _tint(c)) for c in changes))
        return Group(Text(f"held out: {self.looked}", "dim", no_wrap=True, overflow="ellipsis"), table)


def short_name(folder: Path, most: int = 24) -> str:
    """The folder's own name; a long one is shortened in the middle."""
    name = folder.name
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    good = [value for value in values if math.isfinite(value)]
    return sum(good) / len(good) if good else math.nan


def sparkline(values: Sequence[float], width: int) -> str:
    """Plot values with at most `width` block characters, each the mean of equally many values, from the
    minimum to the maximum; a gap where no value is finite."""
    values = list(values)
    width = min(width, len(values))
    bins = [mean(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    good = [value for value in bins if value == value]
    if not good:
        return " " * width
    low, span = min(good), max(good) - min(good)
    top = len(BLOCKS) - 1
    return "".join(
        " " if value != value else BLOCKS[round((value - low) / span * top) if span else 0] for value in bins
    )


def _tint(change: float) -> str:
    """The color of a change in loss."""
    return "" if change != change or change == 0 else CHANGE[change > 0]
