"""Runs the cells of a study, each in a child process of its own, several at a time.

The first signal lets the children save their checkpoints; the second kills them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.files import locked
from errors import INTERRUPTED, REQUEUE
from studies.running.cell_work import FAILED as CELL_FAILED
from studies.running.cell_work import CellWork
from studies.running.children import STOPPED as STOP_SIGNALS
from studies.running.children import gpus, start_child
from studies.running.forecast import StudyForecast
from studies.running.plan import PlannedCell
from studies.running.progress import (
    BUSY,
    DONE,
    FAILED,
    LEFT,
    RUNNING,
    STOPPED,
    StudyProgress,
)
from studies.running.study_call import StudyCall

POLL = 0.05  # seconds between looks at the children
RETRY = 2.0  # seconds after which a cell is tried again that another process works on


@dataclass
class _RunningCell:
    work: CellWork
    slot: int
    begun: float


class StudyRunner:
    """One call of a study on its cells. Several processes, also on several machines, may run the
    same study at a time: each cell is locked by the one that works on it."""

    def __init__(
        self,
        folder: Path,
        plans: Sequence[PlannedCell],
        progress: StudyProgress,
        forecast: StudyForecast,
        call: StudyCall,
    ):
        self.folder = folder
        self.progress = progress
        self.forecast = forecast
        self.call = call
        self._jobs = call.options.jobs
        self._queue = list(plans)
        self._running: dict[int, _RunningCell] = {}  # by process id
        self._signals: list[int] = []
        self._retry = 0.0  # when to try cells again that other processes work on
        hours = call.options.hours
        self._deadline = float("inf") if hours is None else time.monotonic() + 3600 * hours

    def run(self) -> signal.Signals | None:
        """Run all cells; the signal that stopped it, or None."""
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            while self._start_cells() or self._running:
                self._collect()
        finally:
            self._stop(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
        return signal.Signals(self._signals[0]) if self._signals else None

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        is_first = len(self._signals) == 1
        if is_first:
            self.progress.info("stopping: cells save their checkpoints; a second signal kills them")
        self._stop(signal.SIGINT if is_first else signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        for child in list(self._running):
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                os.killpg(child, number)

    def _start_cells(self) -> bool:
        """Start cells while there are free slots; whether any cell is left for later."""
        if self._signals:
            self._queue.clear()
        can_retry = time.monotonic() > self._retry
        for plan in list(self._queue):
            if self._signals or len(self._running) == self._jobs:
                break
            if can_retry or self.progress.phases[plan.id] != BUSY:
                self._queue.remove(plan)
                self._start(plan)
        return bool(self._queue)

    def _work(self, plan: PlannedCell) -> CellWork:
        return CellWork(plan, self.folder, self.call)

    def _start(self, plan: PlannedCell) -> None:
        work = self._work(plan)
        if work.is_done():
            work.record.save("done", None, work.checkpoint)
            self.progress.phases[plan.id] = DONE
            return
        if time.monotonic() + self.forecast.seconds(plan, work) > self._deadline:
            self.progress.phases[plan.id] = LEFT
            return
        taken = {running.slot for running in self._running.values()}
        slot = min(set(range(self._jobs)) - taken)

        def child() -> int:
            if devices := gpus():
                os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
            plan.run.parent.mkdir(parents=True, exist_ok=True)
            with locked(plan.run.with_name(f"{plan.run.name}.lock")) as is_ours:
                if not is_ours:
                    return REQUEUE
                return self._work(plan).run()  # what another process has done meanwhile is not left

        if self.progress.phases[plan.id] != BUSY:
            self.progress.phases[plan.id] = RUNNING
        pid = start_child(child, work.log)
        self._running[pid] = _RunningCell(work, slot, time.monotonic())

    def _collect(self) -> None:
        """Wait a moment, and record the children that have ended."""
        time.sleep(POLL)
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running = self._running.pop(pid)
                seconds = time.monotonic() - running.begun
                self._end(running.work, os.waitstatus_to_exitcode(status), seconds)

    def _end(self, work: CellWork, status: int, seconds: float) -> None:
        plan = work.plan
        if status == 0:
            self.forecast.add(plan, self.folder)
            self.progress.finish(plan, DONE, seconds)
        elif status == REQUEUE:
            self._queue.append(plan)
            self._retry = time.monotonic() + RETRY
            if self.progress.phases[plan.id] != BUSY:
                self.progress.phases[plan.id] = BUSY
                self.progress.info(f"{plan.id}: waiting for the process that works on it")
        elif status == INTERRUPTED or (self._signals and status < 0):
            self.progress.finish(plan, STOPPED, seconds)
        else:
            self.progress.finish(plan, FAILED, seconds, self._error(work, status))

    def _error(self, work: CellWork, status: int) -> str:
        """Why a child failed; recorded here if the child could not do so."""
        record = self._work(work.plan).record
        if status == CELL_FAILED and record.entry["error"]:
            return record.entry["error"]
        error = f"ended with status {status}; output: {work.log}"
        if status < 0:
            error = f"ended by {signal.Signals(-status).name}"
            error += " (possibly out of memory)" if status == -signal.SIGKILL else ""
        record.save("failed", error, work.checkpoint)
        return error
