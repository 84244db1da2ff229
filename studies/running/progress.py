"""The progress of a study: one line per event, also in study.log."""

from collections import Counter
from datetime import datetime
from pathlib import Path

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


class StudyProgress:
    """The phase of every cell. Events go to `journal`, with the time, and to the console."""

    def __init__(self, plans: list[PlannedCell], jobs: int, console: Console, journal: Path):
        self.jobs = jobs
        self.console = console
        self.journal = journal
        self.phases = {plan.id: WAITING for plan in plans}
        self._errors: dict[str, str] = {}
        self._seconds: list[float] = []  # per cell that ran in this call

    def info(self, text: str) -> None:
        """Log one event."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
        self.console.info(text)

    def finish(self, plan: PlannedCell, phase: str, seconds: float, error: str = "") -> None:
        """Log the end of a cell that ran."""
        self.phases[plan.id] = phase
        if phase == DONE:
            self._seconds.append(seconds)
        elif phase == FAILED:
            self._errors[plan.id] = error
        reason = f": {error}" if error else ""
        self.info(f"{plan.id}: {phase} in {duration(seconds)}{reason}; {self.summary()}")

    def report(self, received, repeat: str) -> int:
        """Log the outcome; the exit status: 0 all done, 1 a cell failed, 128 + a signal that
        stopped it. `repeat`: the command to run again."""
        self.console.info(self.summary())
        if received is not None:
            self.console.info(f"stopped by {received.name}; resume with: {repeat}")
            return 128 + received
        for name, error in self._errors.items():
            self.console.warn(f"{name} failed: {error}")
        if self._errors:
            self.console.info(f"retry failed cells with: {repeat}")
        return 1 if self._errors else 0

    def summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(self.phases.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in COUNTED if counts[phase])
        left = sum(counts[phase] for phase in (RUNNING, BUSY, WAITING))
        if left and self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            text += f"; about {duration(mean * left / self.jobs)} left"
        return text
