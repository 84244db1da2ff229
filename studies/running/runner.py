"""Runs the cells of a study, each command (train.py, evaluate.py) in a process of its own.

Worker threads take cells from a queue. The first signal lets running commands save their
checkpoints; the second kills them.
"""

import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from data.files import locked, write_text
from errors import StudyError, TrainingError
from model import find_device
from run_directory.run import is_run, locked_run
from studies.running.cell_record import CellRecord, last_checkpoint
from studies.running.commands import CommandRunner, gpus, last_error
from studies.running.corpora import StudyCorpora
from studies.running.plan import USER_ERRORS, PlannedCell
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
from training.precision import faster_precision, recorded_precision

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.25  # seconds between refreshes of the table


@contextmanager
def lock_study(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock the study's directory: exclusively, or `shared` among the tasks of an array."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        if locked(lock, shared=shared) is False:
            raise StudyError(
                f"{folder} is in use by another process; wait until it ends, or set another "
                "--run-dir"
            )
        yield


def auto_precision(folder: Path, plans: Sequence[PlannedCell]) -> str:
    """What training.precision=auto resolves to in all cells: chosen with the first one, then kept
    in a file of the study."""
    file = folder / "precision.txt"
    if not file.exists():
        device = find_device("auto")
        trained = next((plan.run for plan in plans if is_run(plan.run)), None)
        if trained is not None:
            chosen = recorded_precision(trained, device)
        else:
            chosen = faster_precision(plans[0].settings, None, device)
        write_text(file, chosen)
    return file.read_text(encoding="utf-8")


class CommandFailed(Exception):
    """A command has ended with an error, or was stopped."""


class StudyRunner:
    """One call of a study on its cells `plans`. Of `options` it reads `jobs`, `no_training` and
    `evaluate_again`."""

    def __init__(
        self,
        folder: Path,
        plans: Sequence[PlannedCell],
        corpora: StudyCorpora,
        progress: StudyProgress,
        options: Namespace,
    ):
        self.folder = folder
        self.corpora = corpora
        self.progress = progress
        self.options = options
        self._commands = CommandRunner()
        self._queue = list(plans)
        self._lock = threading.Lock()
        self._signals: list[int] = []
        self._precision = ""
        if any(plan.settings.training.precision == "auto" for plan in plans):
            self._precision = auto_precision(folder, plans)

    def run(self) -> signal.Signals | None:
        """Run all cells; the signal that stopped it, or None."""
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        jobs = self.options.jobs
        try:
            with (
                ThreadPoolExecutor(jobs) as pool,
                self.progress.console.live(self.progress) as draw,
            ):
                futures = [pool.submit(self._work, slot) for slot in range(jobs)]
                while not all(future.done() for future in futures):
                    time.sleep(POLL)
                    if draw is not None:
                        draw()
                    if any(future.done() and future.exception() for future in futures):
                        self._commands.stop()
            for future in futures:
                future.result()  # raises what a thread has raised
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return signal.Signals(self._signals[0]) if self._signals else None

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self.progress.info("stopping: cells save their checkpoints; a second signal kills them")
        self._commands.stop(kill=len(self._signals) > 1)

    def _work(self, slot: int) -> None:
        while (plan := self._next()) is not None:
            start = time.monotonic()
            worked = False
            try:
                worked = self._run_cell(plan, slot)
            except USER_ERRORS as error:  # such as a full disk
                self.progress.set(plan, FAILED, note=str(error))
                self.progress.info(f"{plan.id}: failed: {error}")
            self.progress.finished(plan, time.monotonic() - start, worked)

    def _next(self) -> PlannedCell | None:
        """The next cell that no other process trains; waits if there are only such cells."""
        reported = False
        while not self._commands.stopping.is_set():
            with self._lock:
                for plan in self._queue:
                    if not _is_locked(plan.run):
                        self._queue.remove(plan)
                        return plan
                    self.progress.set(plan, BUSY)
                if not self._queue:
                    return None
                if not reported:
                    names = ", ".join(plan.id for plan in self._queue)
                    self.progress.info(f"waiting for other processes that train {names}")
                    reported = True
            self._commands.stopping.wait(8 * POLL)
        return None

    def _run_cell(self, plan: PlannedCell, slot: int) -> bool:
        """Train and evaluate one cell; False if everything was done before."""
        record = CellRecord(self.folder, plan)
        errors = []
        worked = False
        checkpoint = last_checkpoint(plan)
        if checkpoint is None:
            if self.options.no_training:
                self.progress.set(plan, WAITING)
                record.save("pending", None, None)
                return False
            worked = True
            self.progress.info(f"{plan.id}: training")
            arguments = ["train.py", *plan.cell.arguments, "--run-dir", str(plan.run)]
            if plan.settings.training.precision == "auto":
                arguments += ["--auto-precision", self._precision]
            try:
                self._command(
                    plan,
                    TRAINING,
                    "training",
                    arguments,
                    slot,
                    record,
                )
            except CommandFailed as error:
                errors.append(str(error))
            else:
                checkpoint = last_checkpoint(plan)
                if checkpoint is None:
                    errors.append("training: the checkpoint of the last step is missing")
        for evaluation in plan.evaluations if checkpoint is not None else ():
            extra = self.corpora.arguments(plan, evaluation)
            is_evaluated = record.is_evaluated(evaluation, extra, checkpoint)
            if is_evaluated and not self.options.evaluate_again:
                continue
            worked = True
            phase = f"{EVALUATING} {evaluation.name}"
            arguments = ["evaluate.py", str(plan.run), *evaluation.arguments, *extra]
            try:
                self._command(
                    plan,
                    phase,
                    evaluation.name,
                    arguments,
                    slot,
                    record,
                )
                record.mark_evaluated(evaluation, extra, checkpoint)
            except CommandFailed as error:
                errors.append(str(error))
            record.save("pending", None, checkpoint)
        if not errors:
            record.save("done", None, checkpoint)
            self.progress.set(plan, DONE)
        elif self._commands.stopping.is_set():
            record.save("pending", None, checkpoint)
            self.progress.set(plan, STOPPED)
        else:
            record.save("failed", "; ".join(errors), checkpoint)
            self.progress.set(plan, FAILED, note="; ".join(errors))
        return worked

    def _command(
        self,
        plan: PlannedCell,
        phase: str,
        name: str,
        arguments: list[str],
        slot: int,
        record: CellRecord,
    ) -> None:
        """Run a script with arguments; raises CommandFailed with its error."""
        log = self.folder / "logs" / plan.id / f"{name}.log"
        start = time.monotonic()
        self.progress.set(plan, phase, log=log)
        command = [str(ROOT / arguments[0]), *arguments[1:]]
        status = self._commands.run(
            command,
            log,
            environment(slot, self.options.jobs),
        )
        seconds = time.monotonic() - start
        if phase == TRAINING:  # interrupted attempts count
            seconds += record.seconds.get(name, 0.0)
        record.seconds[name] = round(seconds, 1)
        if status == 0:
            return
        if self._commands.stopping.is_set():
            raise CommandFailed(f"{name}: stopped")
        place = log.relative_to(self.folder)
        error = f"{name}: {last_error(log, status)}; full output: {place}"
        self.progress.info(f"{plan.id}: {error}")
        raise CommandFailed(error)


def environment(slot: int, jobs: int) -> dict[str, str]:
    """Environment of a command: its share of the CPU cores, and its GPU."""
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    if devices := gpus():
        variables["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return variables


def _is_locked(run: Path) -> bool:
    """Whether another process trains the run."""
    if not is_run(run):
        return False
    try:
        with locked_run(run):
            return False
    except TrainingError:
        return True
