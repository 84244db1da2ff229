"""Runs the command lines of cells in worker processes, several at a time.

Workers are forks of a server process of the standard library (`multiprocessing`, start method
`forkserver`) that has imported train.py and evaluate.py, so a cell starts within a fraction of a
second. Pools (concurrent.futures, joblib) reuse a process for many cells: one cell that is killed
for lack of memory would stop all others, and threads and a CUDA context would remain between cells.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from data.files import locked
from errors import INTERRUPTED, REQUEUE, StudyError, UserError, printable
from run_directory.console import Console, duration
from settings.script import message_of
from studies.planned_cells import TRAINING, Command, PlannedCell

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# an optimizer imports torch._dynamo
PRELOADED = [
    "train",
    "evaluate",
    "evaluation.evaluate_runs",
    "interop.imported_runs",
    "torch._dynamo",
]
CELL_FAILED = 1  # exit status of a worker
RETRY = 2.0  # seconds after which a cell is tried again that another process works on
TIMES = "times.jsonl"
COLUMNS = ["cell", "part", "begun", "wall", "cpu", "error"]

WAITING = "waiting"
BUSY = "locked by another process"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
LEFT = "left for later"  # does not fit into --hours
PHASES = (DONE, FAILED, STOPPED, LEFT, RUNNING, BUSY, WAITING)
OPEN = (RUNNING, BUSY, WAITING)


class RunningCell(NamedTuple):
    cell: PlannedCell
    process: BaseProcess
    begun: float


class CellPool:
    """One call of a study on its cells. Several processes, also on several machines, may run the
    same study at a time: each cell is locked by the one that works on it.

    Events go to study.log, with the time, and to the console. The first signal lets the workers
    save their checkpoints; the second kills them.

    Args:
        commands: of all cells of the study: index cell and part; columns flops and done.

    Attributes:
        received: the signal that stopped the study.
    """

    def __init__(self, folder: Path, commands: pd.DataFrame, jobs: int, console: Console):
        self.folder = folder
        self.commands = commands
        self.jobs = jobs
        self.console = console
        self.received: signal.Signals | None = None
        self._phases: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._running: dict[int, RunningCell] = {}  # by slot
        self._devices = gpus()

    def run(self, cells: Sequence[PlannedCell], hours: float | None) -> None:
        """Run what is left of all cells that would end within so many hours."""
        deadline = float("inf") if hours is None else time.monotonic() + 3600 * hours
        is_done = self.commands.done.groupby("cell").all()
        self._phases = {cell.id: DONE if is_done[cell.id] else WAITING for cell in cells}
        queue = [cell for cell in cells if not is_done[cell.id]]
        if not queue:
            return
        context = start_server()
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        retry = 0.0  # when to try cells again that other processes work on
        try:
            while queue or self._running:
                for cell in list(queue):
                    if self.received or len(self._running) == self.jobs:
                        break
                    if self._phases[cell.id] == WAITING or time.monotonic() > retry:
                        queue.remove(cell)
                        self._start(cell, context, deadline)
                if self.received:
                    queue.clear()
                for cell, status, seconds in self._ended():
                    if status == REQUEUE:
                        queue.append(cell)
                        retry = time.monotonic() + RETRY
                    self._end(cell, status, seconds)
        finally:
            self._stop(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def report(self, repeat: str) -> int:
        """Log the outcome; the exit status: 0 all done, 1 a cell failed, 128 + a signal that
        stopped it. `repeat`: the command to run again."""
        self.console.info(self._summary())
        if self.received is not None:
            self.console.info(f"stopped by {self.received.name}; resume with: {repeat}")
            return 128 + self.received
        for name, error in self._errors.items():
            self.console.warn(f"{name} failed: {error}")
        if self._errors:
            self.console.info(f"retry failed cells with: {repeat}")
        return 1 if self._errors else 0

    def _on_signal(self, number: int, frame: object) -> None:
        is_first = self.received is None
        if is_first:
            self.received = signal.Signals(number)
            self._log("stopping: cells save their checkpoints; a second signal kills them")
        self._stop(signal.SIGINT if is_first else signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        """Send a signal to all workers and what they have started."""
        for _, process, _ in self._running.values():
            pid = process.pid
            assert pid is not None  # it was started
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:  # it does not lead its group yet
                    os.kill(pid, number)

    def _start(
        self,
        cell: PlannedCell,
        context: ForkServerContext,
        deadline: float,
    ) -> None:
        """Start what is left of a cell, unless it would end too late."""
        if time.monotonic() + (self._seconds_left([cell.id]) or 0.0) > deadline:
            self._phases[cell.id] = LEFT
            return
        slot = min(set(range(self.jobs)) - set(self._running))
        device = self._devices[slot % len(self._devices)] if self._devices else None
        process = context.Process(target=work, args=(cell, self.folder, self.jobs, device))
        if self._phases[cell.id] == WAITING:
            self._phases[cell.id] = RUNNING
        # a signal waits until it can be passed on
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
            self._running[slot] = RunningCell(cell, process, time.monotonic())
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _ended(self) -> list[tuple[PlannedCell, int, float]]:
        """Wait until a worker has ended, or for RETRY; the cells that ended, with the exit status
        and the seconds."""
        connection.wait([each.process.sentinel for each in self._running.values()], RETRY)
        ended = []
        for slot, (cell, process, begun) in list(self._running.items()):
            if not process.is_alive():
                del self._running[slot]
                ended.append((cell, process.exitcode or 0, time.monotonic() - begun))
        return ended

    def _end(self, cell: PlannedCell, status: int, seconds: float) -> None:
        """Log the end of a worker."""
        name = cell.id
        if status == REQUEUE:
            if self._phases[name] != BUSY:
                self._log(f"{name}: waiting for the process that works on it")
            self._phases[name] = BUSY
            return
        phase = DONE
        reason = ""
        if status == 0:
            self.commands.loc[name, "done"] = True
        elif self.received and status != CELL_FAILED:
            phase = STOPPED
        else:
            phase = FAILED
            if status != CELL_FAILED:  # the worker could not state its error
                add_time(
                    self.folder, name, f"{_end_of(status)}; output: {log_of(self.folder, name)}"
                )
            self._errors[name] = errors_of(read_times(self.folder))[name]
            reason = f": {self._errors[name]}"
        self._phases[name] = phase
        self._log(f"{name}: {phase} in {duration(seconds)}{reason}; {self._summary()}")

    def _log(self, text: str) -> None:
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with open(self.folder / "study.log", "a", encoding="utf-8") as file:
            file.write(f"{now}  {text}\n")
        self.console.info(text)

    def _seconds_left(self, cells: list[str]) -> float | None:
        return seconds_left(self.commands, read_times(self.folder), cells)

    def _summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(self._phases.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
        seconds = self._seconds_left([name for name, each in self._phases.items() if each in OPEN])
        return text + (f"; about {duration(seconds / self.jobs)} left" if seconds else "")


def _end_of(status: int) -> str:
    """How a worker ended that did not state its error."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (" (possibly out of memory)" if name == "SIGKILL" else "")


def gpus() -> list[str]:
    """The available GPUs, as CUDA_VISIBLE_DEVICES names them."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # without a CUDA context
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


def start_server() -> ForkServerContext:
    """Start the server process. It ignores the signals that a terminal or a scheduler sends to all
    processes of the study."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    forkserver.ensure_running()
    for number, handler in before.items():
        signal.signal(number, handler)
    return context


# In a worker.


def work(cell: PlannedCell, folder: Path, jobs: int, device: str | None) -> None:
    """The main function of a worker: exits with the status of `run_cell`."""
    os.setsid()  # Ctrl-C reaches only the study, which passes it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_study, daemon=True).start()
    log = log_of(folder, cell.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(threads_of(jobs))
    sys.exit(run_cell(cell, folder))


def threads_of(jobs: int) -> int:
    """The share of a worker in the CPU cores, or what OMP_NUM_THREADS says."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // jobs))


def _end_with_study() -> None:
    """Without the study another call could start the same cells: end this process at once."""
    study = multiprocessing.parent_process()
    assert study is not None
    connection.wait([study.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def run_cell(cell: PlannedCell, folder: Path) -> int:
    """Run what is left of a cell; returns an exit status. REQUEUE: another process, maybe on
    another machine, works on the cell."""
    cell.run.parent.mkdir(parents=True, exist_ok=True)
    with locked(cell.run.with_name(f"{cell.run.name}.lock")) as is_ours:
        if not is_ours:
            return REQUEUE
        begun = datetime.now().isoformat()
        status = 0
        try:
            for command in cell.commands_left():  # another process may have run some meanwhile
                if not _run(command, cell, folder, begun):
                    status = CELL_FAILED
                    if command.part == TRAINING:
                        break
        except (KeyboardInterrupt, SystemExit):  # the latter from SIGTERM before the first step
            return INTERRUPTED
        return status


def _run(command: Command, cell: PlannedCell, folder: Path, begun: str) -> bool:
    """Run a line as its script does, and log its time and error; whether it succeeded. Raises
    KeyboardInterrupt after a signal."""
    print(f"$ {command}")
    error = ""
    wall = time.monotonic()
    cpu = time.process_time()
    try:
        if command.part == TRAINING:
            cell.refuse_damaged()
        if importlib.import_module(command.script).main(command.arguments):
            raise KeyboardInterrupt  # all is saved
    except (UserError, OSError) as problem:
        error = message_of(problem)
        print(f"error: {printable(error)}", file=sys.stderr)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}; full output: {log_of(folder, cell.id)}"
        traceback.print_exc()
    finally:
        seconds = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        error = error and f"{command.part}: {error}"
        add_time(folder, cell.id, error, command.part, begun, **seconds)
    return not error


def log_of(folder: Path, cell: str) -> Path:
    return folder / "logs" / f"{cell}.log"


# The times of all commands that ran.


def add_time(
    folder: Path,
    cell: str,
    error: str,
    part: str = "",
    begun: str = "",
    wall: float = 0.0,
    cpu: float = 0.0,
) -> None:
    """Append a line to times.jsonl: the seconds of a command that ran, and its error.

    Args:
        part: '' for the end of a worker that could not state its error.
        begun: when the worker has begun.
    """
    line = {"cell": cell, "part": part, "begun": begun, "wall": wall, "cpu": cpu, "error": error}
    with open(folder / TIMES, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_times(folder: Path) -> pd.DataFrame:
    """The lines of times.jsonl."""
    file = folder / TIMES
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return pd.DataFrame(map(json.loads, lines), columns=COLUMNS)


def errors_of(times: pd.DataFrame) -> dict[str, str]:
    """The errors of the last worker of each cell that had any."""
    is_last = times.begun == times.groupby("cell").begun.transform("last")
    failed = times.loc[is_last & (times.error != "")]
    return failed.groupby("cell").error.agg("; ".join).to_dict()


def seconds_left(commands: pd.DataFrame, times: pd.DataFrame, cells: Sequence[str]) -> float | None:
    """Seconds of what is left of these cells, one after the other, at the measured rate of the
    commands that are done; None before any is."""
    wall = times.groupby(["cell", "part"]).wall.sum().reindex(commands.index)
    known = commands.done & wall.notna()
    if not known.any():
        return None
    is_left = ~commands.done & commands.index.isin(list(cells), level="cell")
    rate = wall[known].sum() / commands.flops[known].sum()
    return float(rate * commands.flops[is_left].sum())


# In a job of a scheduler.


def submit(cells: Sequence[PlannedCell], folder: Path, jobs: int, cluster: str) -> list[str]:
    """Submit what is left of each cell as a job of an array, at most `jobs` at a time; the ids of
    the jobs. `cluster`: slurm, or local of submitit. Slurm reads the resources of a job from
    environment variables such as SBATCH_PARTITION and SBATCH_TIMELIMIT.

    Raises StudyError without submitit.
    """
    try:
        import submitit  # pyright: ignore[reportMissingImports]: an extra
    except ImportError:
        raise StudyError("--launcher requires submitit: pip install -e .[slurm]") from None
    executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=cluster)
    if cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=jobs)
    return [job.job_id for job in executor.map_array(run_job, cells, [folder] * len(cells))]


def run_job(cell: PlannedCell, folder: Path) -> None:
    """The main function of a submitted job. Raises SystemExit unless the cell is done."""
    if status := run_cell(cell, folder):
        sys.exit(status)
