"""Shows the metrics of a run in training: a live view on a terminal, lines elsewhere."""

import math
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from run_directory.console import Console, duration

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps the loss is averaged over
KEPT = 400  # steps in the loss curve
CURVE = 24  # width of the loss curve, in characters
CHANGE = ("green", "red")  # colors of a change in NLL: decrease, increase


class LiveView:
    """Shows lines of metrics.jsonl. On a terminal it is drawn with rich (`__rich__`) and leaves out
    unknown values; other outputs receive one line per measured speed and per validation.

    Args:
        steps, tokens: of the whole run.
        done: steps of earlier attempts.

    draw: redraws the terminal; None: there is none.
    """

    def __init__(self, name: str, steps: int, tokens: int, done: int, console: Console):
        self.name = name
        self.steps = steps
        self.tokens = tokens
        self.console = console
        self.draw: Callable[[], None] | None = None
        self._step: dict = {"step": done}  # the newest step
        self._measured: dict = {}  # the newest step with a measured speed
        self._losses: deque[float] = deque(maxlen=KEPT)
        self._nll: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._validation = ""

    def write(self, line: dict) -> None:
        """Show one line of metrics.jsonl."""
        if line["kind"] == "train":
            self._step = line
            self._losses.append(float(line["loss"]))
            if is_measured := "tokens_per_second" in line:
                self._measured = line
            if self.draw:
                self.draw()
            elif is_measured:
                self.console.info(
                    f"step {line['step']:>{len(str(self.steps))}}/{self.steps}  loss "
                    f"{self._losses[-1]:7.4f}  lr {line['lr']:.2e}  {self._rate()}  "
                    f"{duration(self._seconds_left())} left"
                )
        elif line["kind"] == "validation":
            targets = f"{line['targets']:,} targets of {line['documents']} documents"
            self._before = self._nll
            self._nll = {int(k): float(v) for k, v in line["nll"].items()}
            self._validation = f"step {line['step']:,}, {targets}"
            if not self._before:
                self.console.info(f"held-out NLL by length: the same {targets}")
            values = "  ".join(validation_in_words(self._nll, self._before))
            self.console.info(f"step {line['step']} held-out NLL  {values}")

    def _rate(self) -> str:
        """Tokens per second, with the model FLOPs utilization where it is known."""
        mfu = f"  MFU {self._measured['mfu']:.0%}" if "mfu" in self._measured else ""
        return f"{self._measured['tokens_per_second']:>8,.0f} tokens/s{mfu}"

    def _seconds_left(self) -> float:
        return (self.tokens - self._measured["tokens"]) / self._measured["tokens_per_second"]

    def __rich__(self) -> Group:
        lines = [self._head(), self._loss(), self._speed()]
        return Group(*lines, self._held_out()) if self._nll else Group(*lines)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 2))
        done = self._step["step"]
        left = f"{duration(self._seconds_left())} left" if self._measured else ""
        bar = ProgressBar(total=self.steps, completed=done, width=20)
        head.add_row(
            Text(self.name, "bold"),
            f"step {done:,}/{self.steps:,}",
            bar,
            f"{done / self.steps:.0%}",
            left,
        )
        return head

    def _loss(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if not self._losses:
            return text.append("waiting for the first step")
        losses = list(self._losses)
        recent = losses[-RECENT:]
        earlier = losses[-2 * RECENT : -RECENT]
        text.append("loss ").append(f"{mean(recent):.4f}", "bold")
        if len(earlier) == RECENT:
            change = mean(recent) - mean(earlier)
            text.append(f" {change:+.4f}", _tint(change))
        rate = self._step["lr"]
        norm = float(self._step["grad_norm"])
        return text.append(f"  {sparkline(losses, CURVE)}  lr {rate:.2e}  gradient {norm:.2g}")

    def _speed(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if m := self._measured:
            text.append(f"{self._rate().strip()}  {m['peak_memory_bytes'] / 2**20:,.0f} MiB")
        return text

    def _held_out(self) -> Group:
        table = Table(
            "context",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
            header_style="",
        )
        for length in self._nll:
            table.add_column(f"{length:,}", justify="right")
        table.add_row("NLL", *(f"{nll:.4f}" for nll in self._nll.values()))
        if self._before:
            changes = [
                nll - self._before.get(length, math.nan) for length, nll in self._nll.items()
            ]
            table.add_row(
                "change", *(Text(f"{c:+.4f}" if c == c else "", _tint(c)) for c in changes)
            )
        return Group(
            Text(f"held out: {self._validation}", "dim", no_wrap=True, overflow="ellipsis"), table
        )


def validation_in_words(nll: dict[int, float], before: dict[int, float]) -> list[str]:
    """`256: 3.5271 (-0.0210)` for each length, with the change since the last validation."""
    return [
        f"{length}: {value:.4f}" + (f" ({value - before[length]:+.4f})" if length in before else "")
        for length, value in nll.items()
    ]


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    good = [value for value in values if math.isfinite(value)]
    return sum(good) / len(good) if good else math.nan


def sparkline(values: Sequence[float], width: int) -> str:
    """Plot values with at most `width` block characters, each the mean of equally many values, from
    the minimum to the maximum; a gap where no value is finite."""
    values = list(values)
    width = min(width, len(values))
    bins = [
        mean(values[i * len(values) // width : (i + 1) * len(values) // width])
        for i in range(width)
    ]
    good = [value for value in bins if value == value]
    low = min(good, default=0.0)
    scale = (len(BLOCKS) - 1) / ((max(good, default=0.0) - low) or math.inf)
    return "".join(
        BLOCKS[round((value - low) * scale)] if value == value else " " for value in bins
    )


def _tint(change: float) -> str:
    """The color of a change in loss."""
    return "" if change != change or change == 0 else CHANGE[change > 0]
