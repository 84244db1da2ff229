"""Work on all cells: train, evaluate, write down; side by side, whatever happens to any of them.

A step is asked for only where it is not done, and every command goes on where it was stopped, so that calling
the study again is always right.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from studies.plan import USER_ERRORS, CellPlan, Evaluation
from studies.processes import Commands, last_error
from studies.progress import BUSY, DONE, EVALUATING, FAILED, STOPPED, TRAINING, WAITING, Progress
from studies.records import CellFile, trained
from studies.texts import Texts
from training.checkpoint import Checkpoint
from training.console import duration
from training.errors import TrainingError
from training.run import held, is_run

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.25  # seconds between two looks at the table, and at cells that others work on


@dataclass(frozen=True)
class How:
    """How a study is worked on; none of it changes a number beyond rounding."""

    jobs: int = 1
    train: bool = True  # false: cells that are not trained yet wait
    again: bool = False  # true: evaluate.py is asked again even where its results are in place


class Runner:
    """One call of a study on some of its cells."""

    def __init__(self, folder: Path, plans: Sequence[CellPlan], texts: Texts, how: How, progress: Progress):
        self.folder, self.texts, self.how, self.progress = folder, texts, how, progress
        self._commands = Commands()
        self._queue = list(plans)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._received: list[int] = []

    def run(self, each: Callable[[], object]) -> signal.Signals | None:
        """Work until nothing is left, `each` after every cell; the signal that stopped it, or None."""
        before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ThreadPoolExecutor(self.how.jobs) as pool, self.progress.shown() as shown:
                futures = [pool.submit(self._work, slot) for slot in range(self.how.jobs)]
                while not all(future.done() for future in futures):
                    time.sleep(POLL)
                    shown.refresh()
                    if self._ended.is_set():
                        self._ended.clear()
                        each()
                    if any(future.done() and future.exception() for future in futures):
                        self._commands.stop()
            for future in futures:
                future.result()  # a bug in a thread is a bug here
            each()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return signal.Signals(self._received[0]) if self._received else None

    def _note(self, number: int, frame: object) -> None:
        self._received.append(number)
        if len(self._received) > 1:
            self._commands.kill()
            return
        self.progress.say("stopping: every cell saves what it has; once more ends them at once")
        self._commands.stop()

    def _work(self, slot: int) -> None:
        while (plan := self._next()) is not None:
            start = time.monotonic()
            phase = self.progress.phase(plan)
            try:
                worked = self._cell(plan, slot)
            except USER_ERRORS as error:  # a full disk, a folder that may not be written
                self.progress.set(plan, FAILED, note=str(error))
                self.progress.say(f"{plan.cell.id}: failed: {error}")
                worked = False
            phase = self.progress.phase(plan)
            if worked and phase == DONE:
                self.progress.worked(time.monotonic() - start)
            if phase != WAITING:
                took = f" in {duration(time.monotonic() - start)}" if worked else ""
                self.progress.say(f"{plan.cell.id}: {phase}{took}; {self.progress.summary()}")
            self._ended.set()

    def _next(self) -> CellPlan | None:
        """The next cell that no other process trains; waits while there are only such."""
        told = False
        while not self._commands.stopping.is_set():
            with self._lock:
                for i, plan in enumerate(self._queue):
                    if not _held_elsewhere(plan.run):
                        return self._queue.pop(i)
                    self.progress.set(plan, BUSY)
                if not self._queue:
                    return None
                if not told:
                    names = ", ".join(plan.cell.id for plan in self._queue)
                    self.progress.say(f"waiting for other processes that train {names}")
                    told = True
            self._commands.stopping.wait(8 * POLL)
        return None

    def _cell(self, plan: CellPlan, slot: int) -> bool:
        """Bring one cell to its end; whether anything had to be done."""
        file, checkpoint, errors = CellFile(self.folder, plan), trained(plan), []
        worked = checkpoint is None
        if checkpoint is None and not self.how.train:
            self.progress.set(plan, WAITING)
            file.save("pending", None, None)
            return False
        if checkpoint is None:
            self.progress.set(plan, TRAINING)
            self.progress.say(f"{plan.cell.id}: training")
            words = [str(ROOT / "train.py"), *plan.cell.words, "--folder", str(plan.run)]
            error = self._command(plan, "training", words, slot, file)
            checkpoint = None if error else trained(plan)
            if checkpoint is None:
                errors.append(error or "training: ended without the checkpoint of its last step")
        missing = checkpoint is None
        if checkpoint is not None:
            for evaluation in plan.evaluations:
                extra = self.texts.words(plan, evaluation)
                if file.evaluated(evaluation, extra, checkpoint) and not self.how.again:
                    continue
                worked = True
                error = self._evaluate(plan, evaluation, extra, checkpoint, slot, file)
                errors += [error] if error else []
                missing |= bool(error)
        if self._commands.stopping.is_set() and missing:
            status, phase, errors = "pending", STOPPED, []
        else:
            status, phase = ("failed", FAILED) if errors else ("done", DONE)
        text = "; ".join(errors)
        file.save(status, text or None, checkpoint)
        self.progress.set(plan, phase, note=text)
        return worked

    def _evaluate(
        self,
        plan: CellPlan,
        evaluation: Evaluation,
        extra: list[str],
        checkpoint: Checkpoint,
        slot: int,
        file: CellFile,
    ) -> str:
        """Ask evaluate.py; '' where it went well."""
        name = evaluation.name
        self.progress.set(plan, f"{EVALUATING} {name}", log=self._log(plan, name))
        words = [str(ROOT / "evaluate.py"), str(plan.run), *evaluation.words, *extra]
        error = self._command(plan, name, words, slot, file)
        if not error:
            file.note(evaluation, extra, checkpoint)
        file.save("pending", None, checkpoint)
        return error

    def _command(self, plan: CellPlan, name: str, words: list[str], slot: int, file: CellFile) -> str:
        """Run one command of a cell; what went wrong in words, '' if nothing."""
        log, start = self._log(plan, name), time.monotonic()
        status = self._commands.run(words, log, environment(slot, self.how.jobs))
        took = file.seconds.get(name, 0.0) if name == "training" else 0.0  # in pieces, if it was stopped
        file.seconds[name] = round(took + time.monotonic() - start, 1)
        if status == 0:
            return ""
        if self._commands.stopping.is_set():
            return f"{name}: stopped"
        error = f"{name}: {last_error(log, status)}; all it said is in {log.relative_to(self.folder)}"
        self.progress.say(f"{plan.cell.id}: {error}")
        return error

    def _log(self, plan: CellPlan, name: str) -> Path:
        return self.folder / "logs" / plan.cell.id / f"{name}.log"


def environment(slot: int, jobs: int) -> dict[str, str]:
    """Variables of a command: its share of the cores, and its GPU."""
    found = dict(os.environ)
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    if devices := gpus():
        found["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return found


def gpus() -> list[str]:
    """The GPUs that commands may be given, as CUDA_VISIBLE_DEVICES names them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


def _held_elsewhere(run: Path) -> bool:
    if not is_run(run):
        return False
    try:
        with held(run):
            return False
    except TrainingError:
        return True
