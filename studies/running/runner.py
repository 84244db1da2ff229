"""Runs the cells of a study in worker processes, several at a time.

The first signal lets the workers save their checkpoints; the second kills them.
"""

import signal
import time
from collections.abc import Sequence

from errors import REQUEUE
from studies.running.plan import PlannedCell
from studies.running.time_left import BUSY, DONE, FAILED, LEFT, RUNNING, STOPPED, StudyProgress
from studies.running.workers import ERROR, SIGNALS, Workers, log_of
from studies.running.workers import FAILED as CELL_FAILED

RETRY = 2.0  # seconds after which a cell is tried again that another process works on
TAIL = 15  # lines of the log of a failed cell that are printed


class StudyRunner:
    """One call of a study on its cells. Several processes, also on several machines, may run the
    same study at a time: each cell is locked by the one that works on it."""

    def __init__(self, plans: Sequence[PlannedCell], progress: StudyProgress, hours: float | None):
        self.progress = progress
        self._queue = list(plans)
        self._signals: list[int] = []
        self._retry = 0.0  # when to try cells again that other processes work on
        self._deadline = float("inf") if hours is None else time.monotonic() + 3600 * hours

    def run(self) -> signal.Signals | None:
        """Run all cells; the signal that stopped it, or None."""
        for plan in list(self._queue):
            if not self.progress.work.left[plan.id]:
                self._queue.remove(plan)
                self.progress.phases[plan.id] = DONE
        if not self._queue:
            return None
        self._workers = Workers(self.progress.work.folder, self.progress.jobs)
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            while self._start_cells() or len(self._workers):
                for plan, status, output in self._workers.ended(RETRY):
                    self._end(plan, status, output)
        finally:
            self._workers.stop(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
        return signal.Signals(self._signals[0]) if self._signals else None

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        is_first = len(self._signals) == 1
        if is_first:
            self.progress.info("stopping: cells save their checkpoints; a second signal kills them")
        self._workers.stop(signal.SIGINT if is_first else signal.SIGKILL)

    def _start_cells(self) -> bool:
        """Start cells while there are free slots; whether any cell is left for later."""
        can_retry = time.monotonic() > self._retry
        for plan in list(self._queue):
            if self._signals or len(self._workers) == self.progress.jobs:
                break
            is_busy = self.progress.phases[plan.id] == BUSY
            if is_busy and not can_retry:
                continue
            self._queue.remove(plan)
            seconds = self.progress.work.seconds_left([plan]) or 0.0
            if time.monotonic() + seconds > self._deadline:
                self.progress.phases[plan.id] = LEFT
                continue
            if not is_busy:
                self.progress.phases[plan.id] = RUNNING
            self._workers.start(plan)
        if self._signals:
            self._queue.clear()
        return bool(self._queue)

    def _end(self, plan: PlannedCell, status: int, output: str) -> None:
        if status == 0:
            self.progress.finish(plan, DONE)
        elif status == REQUEUE:
            self._queue.append(plan)
            self._retry = time.monotonic() + RETRY
            if self.progress.phases[plan.id] != BUSY:
                self.progress.phases[plan.id] = BUSY
                self.progress.info(f"{plan.id}: waiting for the process that works on it")
        elif self._signals and status != CELL_FAILED:
            self.progress.finish(plan, STOPPED)
        else:
            log = log_of(self.progress.work.folder, plan)
            lines = output.splitlines()
            last = max((i for i, line in enumerate(lines) if line.startswith(ERROR)), default=None)
            for line in lines[:last][-TAIL:]:
                self.progress.console.info(f"    {line}")
            self.progress.finish(plan, FAILED, f"{_error(status, lines)}; output: {log}")


def _error(status: int, lines: Sequence[str]) -> str:
    """Why a worker failed."""
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    if status == CELL_FAILED and errors:
        return "; ".join(errors)
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (" (possibly out of memory)" if name == "SIGKILL" else "")
