"""The progress of a study: a live table in a terminal, and one line per event in study.log."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from run_directory.console import Console, duration
from studies.running.plan import PlannedCell

WAITING = "waiting"
BUSY = "locked by another process"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
LEFT = "left for later"  # does not fit into --hours
COUNTED = (DONE, FAILED, STOPPED, LEFT, RUNNING, BUSY, WAITING)


@dataclass
class _CellState:
    phase: str = WAITING
    since: float = field(default_factory=time.monotonic)
    log: Path | None = None
    note: str = ""


class StudyProgress:
    """The state of every cell, rendered as a live table. Events go to `journal`, with the time, and
    to the console."""

    def __init__(self, plans: list[PlannedCell], jobs: int, console: Console, journal: Path):
        self.plans = plans
        self.jobs = jobs
        self.console = console
        self.journal = journal
        self._states = {plan.id: _CellState() for plan in plans}
        self._seconds: list[float] = []  # per cell that ran in this call

    def info(self, text: str) -> None:
        """Log one event."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
        self.console.info(text)

    def phase(self, plan: PlannedCell) -> str:
        return self._states[plan.id].phase

    def set(self, plan: PlannedCell, phase: str, log: Path | None = None, note: str = "") -> None:
        self._states[plan.id] = _CellState(phase, log=log, note=note)

    def finish(self, plan: PlannedCell, phase: str, seconds: float, error: str = "") -> None:
        """Log the end of a cell that ran."""
        self.set(plan, phase, note=error)
        if phase == DONE:
            self._seconds.append(seconds)
        reason = f": {error}" if error else ""
        self.info(f"{plan.id}: {phase} in {duration(seconds)}{reason}; {self.summary()}")

    def report(self, received, repeat: str) -> int:
        """Log the outcome; the exit status: 0 all done, 1 a cell failed, 128 + a signal that
        stopped it. `repeat`: the command to run again."""
        self.console.info(self.summary())
        if received is not None:
            self.console.info(f"stopped by {received.name}; resume with: {repeat}")
            return 128 + received
        failed = {name: state.note for name, state in self._states.items() if state.phase == FAILED}
        for name, note in failed.items():
            self.console.warn(f"{name} failed: {note}")
        if failed:
            self.console.info(f"retry failed cells with: {repeat}")
        return 1 if failed else 0

    def summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(state.phase for state in self._states.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in COUNTED if counts[phase])
        left = sum(counts[phase] for phase in (RUNNING, BUSY, WAITING))
        if left and self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            text += f"; about {duration(mean * left / self.jobs)} left"
        return text

    def __rich__(self) -> Table:
        table = Table("cell", "state", "time", title=self.summary(), title_justify="left")
        now = time.monotonic()
        for plan in self.plans:
            state = self._states[plan.id]
            if state.phase in (WAITING, DONE, LEFT):
                continue
            note = _last_line(state.log) if state.log is not None else state.note
            table.add_row(
                plan.id, escape(f"{state.phase}  {note}".strip()), duration(now - state.since)
            )
        return table


def _last_line(log: Path) -> str:
    """The last line of a log that a child may not have begun yet."""
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2048))
        lines = file.read().decode("utf-8", "replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1][:100] if lines else ""
