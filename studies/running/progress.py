"""The progress of a study: a live table in a terminal, and one line per event in study.log."""

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.table import Table

from run_directory.console import Console, duration
from studies.running.plan import PlannedCell
from studies.running.processes import tail

WAITING = "waiting"
BUSY = "locked by another process"
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
# the second is followed by the evaluation's name
TRAINING = "training"
EVALUATING = "evaluating"
ENDED = (DONE, FAILED, STOPPED)


@dataclass
class _CellState:
    phase: str = WAITING
    since: float = field(default_factory=time.monotonic)
    log: Path | None = None
    note: str = ""


class StudyProgress:
    """The state of every cell, set by the worker threads; rendered as a live table. Events go to `journal`,
    with the time, and to the console."""

    def __init__(self, plans: list[PlannedCell], jobs: int, console: Console, journal: Path):
        self.plans = plans
        self.jobs = jobs
        self.console = console
        self.journal = journal
        self._states = {plan.cell.id: _CellState() for plan in plans}
        self._seconds: list[float] = []  # per cell that ran in this call
        self._lock = threading.Lock()

    def info(self, text: str) -> None:
        """Log one event."""
        with self._lock:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
            self.console.info(text)

    def set(self, plan: PlannedCell, phase: str, log: Path | None = None, note: str = "") -> None:
        self._states[plan.cell.id] = _CellState(phase, log=log, note=note)

    def finished(self, plan: PlannedCell, seconds: float, worked: bool) -> None:
        """Log the end of a cell. `worked`: it was not done before."""
        phase = self._states[plan.cell.id].phase
        if worked and phase == DONE:
            self._seconds.append(seconds)
        if phase != WAITING:
            took = f" in {duration(seconds)}" if worked else ""
            self.info(f"{plan.cell.id}: {phase}{took}; {self.summary()}")

    def report(self, received, repeat: str) -> int:
        """Log the outcome; the exit status: 0 all done, 1 a cell failed, 128 + a signal that stopped it.
        `repeat`: the command to run again."""
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
        known = (*ENDED, "running", BUSY, WAITING)
        counts = Counter(s.phase if s.phase in known else "running" for s in self._states.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in known if counts[phase])
        left = len(self.plans) - sum(counts[phase] for phase in ENDED)
        if left and self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            text += f"; about {duration(mean * left / self.jobs)} left"
        return text

    def __rich__(self) -> Table:
        table = Table(title=self.summary(), title_justify="left")
        for column in ("cell", "state", "step", "loss", "tokens/s", "left", "time"):
            table.add_column(column, justify="left" if column in ("cell", "state") else "right")
        now = time.monotonic()
        for plan in self.plans:
            state = self._states[plan.cell.id]
            if state.phase in (WAITING, DONE):
                continue
            time_in_phase = duration(now - state.since)
            if state.phase == TRAINING:
                table.add_row(plan.cell.id, state.phase, *_training(plan), time_in_phase)
            else:
                note = state.note or (_last_line(state.log) if state.phase not in ENDED else "")
                text = f"{state.phase}  {note}".strip().replace("[", r"\[")
                table.add_row(plan.cell.id, text, *[""] * 4, time_in_phase)
        return table


def _training(plan: PlannedCell) -> tuple[str, str, str, str]:
    """(step, loss, tokens/s, time left), read from the end of metrics.jsonl."""
    step = 0
    loss = ""
    rate = 0.0
    for line in tail(plan.run / "metrics.jsonl").splitlines()[1:]:
        try:
            found = json.loads(line)
        except ValueError:
            continue  # an incomplete line
        if found.get("kind") == "train":
            step = found["step"]
            loss = f"{found['loss']:.4f}"
            rate = found.get("tokens_per_second") or rate
    done = f"{step}/{plan.settings.steps}"
    if not rate:
        return done, loss, "", ""
    left = (plan.settings.trained_tokens - plan.settings.tokens_after(step)) / rate
    return done, loss, f"{rate:,.0f}", duration(left)


def _last_line(log: Path | None) -> str:
    lines = (
        [line.strip() for line in tail(log, 2 << 10).splitlines() if line.strip()] if log else []
    )
    return lines[-1][:100] if lines else ""
