"""Train and evaluate the cells of a study in parallel; a failed cell does not affect the others.

Only unfinished steps run, and every command resumes, so calling a study again is always safe.
"""

import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from data.files import locked
from errors import StudyError, TrainingError
from run_directory.run import is_run, locked_run
from studies.running.plan import USER_ERRORS, PlannedCell
from studies.running.processes import CommandRunner, last_error
from studies.running.progress import (
    BUSY,
    DONE,
    EVALUATING,
    FAILED,
    STOPPED,
    TRAINING,
    WAITING,
    StudyProgress,
)
from studies.running.records import CellRecord, trained
from studies.running.texts import StudyTexts

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.25  # seconds between refreshes of the table


@contextmanager
def lock_study(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock the study's directory: exclusively, or `shared` among the tasks of an array."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        if locked(lock, shared=shared) is False:
            raise StudyError(
                f"{folder} is in use by another process; wait until it ends, or set another --run-dir"
            )
        yield


class StudyRunner:
    """One call of a study on some of its cells. Of `options` it reads `jobs`, `no_training` and
    `evaluate_again`."""

    def __init__(
        self,
        folder: Path,
        plans: Sequence[PlannedCell],
        texts: StudyTexts,
        progress: StudyProgress,
        options: Namespace,
    ):
        self.folder = folder
        self.texts = texts
        self.progress = progress
        self.options = options
        self._commands = CommandRunner()
        self._queue = list(plans)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._received: list[int] = []

    def run(self, after_cell: Callable[[], object] = lambda: None) -> signal.Signals | None:
        """Run all cells; the signal that stopped it, or None."""
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with (
                ThreadPoolExecutor(self.options.jobs) as pool,
                self.progress.console.live(self.progress) as draw,
            ):
                futures = [pool.submit(self._work, slot) for slot in range(self.options.jobs)]
                while not all(future.done() for future in futures):
                    time.sleep(POLL)
                    if draw is not None:
                        draw()
                    if self._ended.is_set():
                        self._ended.clear()
                        after_cell()
                    if any(future.done() and future.exception() for future in futures):
                        self._commands.stop()
            for future in futures:
                future.result()  # raises what a thread has raised
            after_cell()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return signal.Signals(self._received[0]) if self._received else None

    def _on_signal(self, number: int, frame: object) -> None:
        self._received.append(number)
        if len(self._received) == 1:
            self.progress.info("stopping: cells save their checkpoints; a second signal kills them")
        self._commands.stop(kill=len(self._received) > 1)

    def _work(self, slot: int) -> None:
        while (plan := self._next()) is not None:
            start = time.monotonic()
            worked = False
            try:
                worked = self._cell(plan, slot)
            except USER_ERRORS as error:  # such as a full disk
                self.progress.set(plan, FAILED, note=str(error))
                self.progress.info(f"{plan.cell.id}: failed: {error}")
            self.progress.finished(plan, time.monotonic() - start, worked)
            self._ended.set()

    def _next(self) -> PlannedCell | None:
        """The next cell that no other process trains; waits if there are only such cells."""
        reported = False
        while not self._commands.stopping.is_set():
            with self._lock:
                for i, plan in enumerate(self._queue):
                    if not _locked_elsewhere(plan.run):
                        return self._queue.pop(i)
                    self.progress.set(plan, BUSY)
                if not self._queue:
                    return None
                if not reported:
                    names = ", ".join(plan.cell.id for plan in self._queue)
                    self.progress.info(f"waiting for other processes that train {names}")
                    reported = True
            self._commands.stopping.wait(8 * POLL)
        return None

    def _cell(self, plan: PlannedCell, slot: int) -> bool:
        """Train and evaluate one cell; False if everything was done before."""
        record = CellRecord(self.folder, plan)
        checkpoint = trained(plan)
        errors = []
        worked = checkpoint is None
        if checkpoint is None and self.options.no_training:
            self.progress.set(plan, WAITING)
            record.save("pending", None, None)
            return False
        if checkpoint is None:
            self.progress.info(f"{plan.cell.id}: training")
            arguments = ["train.py", *plan.cell.arguments, "--run-dir", str(plan.run)]
            error = self._command(plan, TRAINING, "training", arguments, slot, record)
            checkpoint = None if error else trained(plan)
            if checkpoint is None:
                errors.append(error or "training: the checkpoint of the last step is missing")
        missing = checkpoint is None
        for evaluation in plan.evaluations:
            if checkpoint is None:
                break
            extra = self.texts.arguments(plan, evaluation)
            if record.evaluated(evaluation, extra, checkpoint) and not self.options.evaluate_again:
                continue
            worked = True
            phase = f"{EVALUATING} {evaluation.name}"
            arguments = ["evaluate.py", str(plan.run), *evaluation.arguments, *extra]
            if error := self._command(plan, phase, evaluation.name, arguments, slot, record):
                errors.append(error)
                missing = True
            else:
                record.mark_evaluated(evaluation, extra, checkpoint)
            record.save("pending", None, checkpoint)
        if self._commands.stopping.is_set() and missing:
            status = "pending"
            phase = STOPPED
            errors = []
        else:
            status, phase = ("failed", FAILED) if errors else ("done", DONE)
        text = "; ".join(errors)
        record.save(status, text or None, checkpoint)
        self.progress.set(plan, phase, note=text)
        return worked

    def _command(
        self,
        plan: PlannedCell,
        phase: str,
        name: str,
        arguments: list[str],
        slot: int,
        record: CellRecord,
    ) -> str:
        """Run a script with arguments; the error, '' on success."""
        log = self.folder / "logs" / plan.cell.id / f"{name}.log"
        start = time.monotonic()
        self.progress.set(plan, phase, log=log)
        command = [str(ROOT / arguments[0]), *arguments[1:]]
        status = self._commands.run(command, log, environment(slot, self.options.jobs))
        # of interrupted attempts
        before = record.seconds.get(name, 0.0) if phase == TRAINING else 0.0
        record.seconds[name] = round(before + time.monotonic() - start, 1)
        if status == 0:
            return ""
        if self._commands.stopping.is_set():
            return f"{name}: stopped"
        error = f"{name}: {last_error(log, status)}; full output: {log.relative_to(self.folder)}"
        self.progress.info(f"{plan.cell.id}: {error}")
        return error


def environment(slot: int, jobs: int) -> dict[str, str]:
    """Environment of a command: its share of the CPU cores, and its GPU."""
    found = dict(os.environ)
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    if devices := gpus():
        found["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return found


def gpus() -> list[str]:
    """The available GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


def _locked_elsewhere(run: Path) -> bool:
    try:
        with locked_run(run) if is_run(run) else nullcontext():
            return False
    except TrainingError:
        return True
