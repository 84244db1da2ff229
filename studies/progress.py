"""What a study shows while it runs: a live table at a terminal, and one line per event for a log."""

import json
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table

from studies.plan import CellPlan
from studies.processes import tail
from training.console import Console, duration

WAITING, BUSY, DONE, FAILED, STOPPED = "waiting", "busy elsewhere", "done", "failed", "stopped"
TRAINING, EVALUATING = "training", "evaluating"  # ... and the name of what is measured
ENDED = (DONE, FAILED, STOPPED)


@dataclass
class _State:
    phase: str = WAITING
    since: float = field(default_factory=time.monotonic)
    log: Path | None = None
    note: str = ""


class Progress:
    """The state of every cell, told by the threads that work on them.

    Events go to `journal` with the time of day, and to the console.
    """

    def __init__(self, plans: list[CellPlan], jobs: int, console: Console, journal: Path):
        self.plans, self.jobs, self.console, self.journal = plans, jobs, console, journal
        self._states = {plan.cell.id: _State() for plan in plans}
        self._seconds: list[float] = []  # of cells that were worked on in this call
        self._lock = threading.Lock()
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One event."""
        with self._lock:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                self.console.say(text)

    def set(self, plan: CellPlan, phase: str, log: Path | None = None, note: str = "") -> None:
        self._states[plan.cell.id] = _State(phase, log=log, note=note)

    def worked(self, seconds: float) -> None:
        """Note how long a cell took that was not done already."""
        self._seconds.append(seconds)

    def phase(self, plan: CellPlan) -> str:
        return self._states[plan.cell.id].phase

    def count(self, phase: str) -> int:
        return sum(state.phase == phase for state in self._states.values())

    def failures(self) -> list[str]:
        """One sentence a cell that failed."""
        return [
            f"{name} failed: {state.note}" for name, state in self._states.items() if state.phase == FAILED
        ]

    def summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(
            s.phase if s.phase in (*ENDED, WAITING, BUSY) else "running" for s in self._states.values()
        )
        order = (DONE, FAILED, STOPPED, "running", BUSY, WAITING)
        text = ", ".join(f"{counts[phase]} {phase}" for phase in order if counts[phase])
        left = len(self.plans) - sum(counts[phase] for phase in ENDED)
        if left and self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            text += f"; about {duration(mean * left / self.jobs)} left"
        return text

    @contextmanager
    def shown(self):
        """Show the live table, where there is a terminal; the value's `.refresh()` draws it anew."""
        if self.console.quiet or not sys.stderr.isatty():
            yield self
            return
        with Live(
            self._table(), console=RichConsole(file=sys.stderr), auto_refresh=False, transient=True
        ) as live:
            self._live = live
            try:
                yield self
            finally:
                self._live = None

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(title=self.summary(), title_justify="left")
        for column in ("cell", "state", "step", "loss", "tokens/s", "left", "since"):
            table.add_column(column, justify="left" if column in ("cell", "state") else "right")
        now = time.monotonic()
        for plan in self.plans:
            state = self._states[plan.cell.id]
            if state.phase in (WAITING, DONE):
                continue
            since = duration(now - state.since)
            if state.phase == TRAINING:
                table.add_row(plan.cell.id, state.phase, *_training(plan), since)
            else:
                said = state.note or (_last_line(state.log) if state.phase not in ENDED else "")
                table.add_row(
                    plan.cell.id, f"{state.phase}  {said}".strip().replace("[", r"\["), *[""] * 4, since
                )
        return table


def _training(plan: CellPlan) -> tuple[str, str, str, str]:
    """(step, loss, tokens/s, time left), read from the end of metrics.jsonl."""
    step, loss, rate = 0, "", 0.0
    for line in tail(plan.run / "metrics.jsonl").splitlines()[1:]:
        try:
            found = json.loads(line)
        except ValueError:
            continue  # a line that is being written
        if found.get("kind") == "train":
            step, loss = found["step"], f"{found['loss']:.4f}"
            rate = found.get("tokens_per_second") or rate
    left = (plan.settings.trained_tokens - plan.settings.tokens_after(step)) / rate if rate else None
    return (
        f"{step}/{plan.settings.steps}",
        loss,
        f"{rate:,.0f}" if rate else "",
        "" if left is None else duration(left),
    )


def _last_line(log: Path | None) -> str:
    lines = [line.strip() for line in tail(log, 2 << 10).splitlines() if line.strip()] if log else []
    return lines[-1][:100] if lines else ""
