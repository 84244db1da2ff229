"""Shows the metrics of a run in training: a live view on a terminal, lines elsewhere."""

import math
from collections import deque
from collections.abc import Callable

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from run_directory.console import Console, duration

RECENT = 20  # steps the loss is averaged over


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
        self._speed = ""  # as last measured
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._nll: dict[int, float] = {}
        self._validation = ""

    def write(self, line: dict) -> None:
        """Show one line of metrics.jsonl."""
        if line["kind"] == "train":
            self._step = line
            self._losses.append(float(line["loss"]))
            if rate := line.get("tokens_per_second"):
                mfu = f"  MFU {line['mfu']:.0%}" if "mfu" in line else ""
                left = duration((self.tokens - line["tokens"]) / rate)
                self._speed = f"{rate:>8,.0f} tokens/s{mfu}  {left} left"
            if self.draw:
                self.draw()
            elif rate:
                self.console.info(
                    f"step {line['step']:>{len(str(self.steps))}}/{self.steps}  loss "
                    f"{self._losses[-1]:7.4f}  lr {line['lr']:.2e}  {self._speed}"
                )
        elif line["kind"] == "validation":
            before = self._nll
            self._nll = {int(k): float(v) for k, v in line["nll"].items()}
            if not before:
                self.console.info(
                    f"held-out NLL by length: the same {line['targets']:,} targets of "
                    f"{line['documents']} documents"
                )
            values = "  ".join(validation_in_words(self._nll, before))
            self._validation = f"step {line['step']} held-out NLL  {values}"
            self.console.info(self._validation)

    def __rich__(self) -> Group:
        done = self._step["step"]
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.name, "bold"),
            f"step {done:,}/{self.steps:,}",
            ProgressBar(total=self.steps, completed=done, width=20),
            f"{done / self.steps:.0%}",
            self._speed.strip(),
        )
        loss = "waiting for the first step"
        if self._losses:
            finite = [x for x in self._losses if math.isfinite(x)]
            mean = sum(finite) / len(finite) if finite else math.nan
            loss = (
                f"loss {mean:.4f}  lr {self._step['lr']:.2e}  gradient "
                f"{float(self._step['grad_norm']):.2g}"
            )
        lines = [loss, self._validation] if self._validation else [loss]
        return Group(head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


def validation_in_words(nll: dict[int, float], before: dict[int, float]) -> list[str]:
    """`256: 3.5271 (-0.0210)` for each length, with the change since the last validation."""
    return [
        f"{length}: {value:.4f}" + (f" ({value - before[length]:+.4f})" if length in before else "")
        for length, value in nll.items()
    ]
