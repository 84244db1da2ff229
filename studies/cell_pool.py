"""Runs the command lines of cells in worker processes, several at a time.

Threads of a pool start each cell in its own process. The process is forked from a server of the
standard library (start method `forkserver`) that has imported train.py and evaluate.py, so a cell
starts within a fraction of a second. Pools of processes (concurrent.futures, joblib) reuse a
process for many cells: one cell that is killed for lack of memory would stop all others, and
threads and a CUDA context would remain between cells.
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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pandas as pd
import torch

from data.files import locked
from errors import INTERRUPTED, REQUEUE, StudyError, UserError, printable
from run_directory.console import Console, duration
from settings.script import message_of
from studies.planned_cells import TRAINING, Command, PlannedCell

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# optimizers import torch._dynamo
PRELOADED = [
    "train",
    "evaluate",
    "evaluation.evaluate_runs",
    "interop.imported_runs",
    "torch._dynamo",
]
CELL_FAILED = 1  # exit status of a worker
RETRY = 2.0  # seconds between attempts at a cell that another process works on
TIMES = "times.jsonl"
COLUMNS = ["cell", "part", "wall", "cpu", "error"]

DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
LEFT = "left for later"  # would not finish within --hours
RUNNING = "running"
WAITING = "waiting"
PHASES = (DONE, FAILED, STOPPED, LEFT, RUNNING, WAITING)


class CellPool:
    """Runs the cells of a study in one call of study.py. Several processes, also on several
    machines, may run the same study at a time: the process that works on a cell locks it.

    The first signal lets the workers save their checkpoints; the second kills them.

    Args:
        flops: training FLOPs of each cell of the study.
        done: the cells that are done; the pool adds the cells that it finishes.

    Attributes:
        received: the signal that stopped the study.
    """

    def __init__(
        self,
        folder: Path,
        flops: Mapping[str, float],
        done: set[str],
        jobs: int,
        console: Console,
    ):
        self.folder = folder
        self.flops = flops
        self.done = done
        self.jobs = jobs
        self.console = console
        self.received: signal.Signals | None = None
        self._phases: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._running: set[BaseProcess] = set()
        # held while a worker is started, ends or receives a signal; a second signal may interrupt
        # the handler of the first
        self._lock = threading.RLock()
        available = gpus() or [None]
        self._devices = [available[slot % len(available)] for slot in range(jobs)]

    def run(self, cells: Sequence[PlannedCell], hours: float | None) -> None:
        """Run the unfinished commands of these cells. With `hours`, skip cells that are not
        expected to finish in time."""
        deadline = float("inf") if hours is None else time.monotonic() + 3600 * hours
        self._phases = {cell.id: DONE if cell.id in self.done else WAITING for cell in cells}
        queue = [cell for cell in cells if cell.id not in self.done]
        if not queue:
            return
        context = start_server()
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            while queue and not self.received:
                with ThreadPoolExecutor(self.jobs) as threads:
                    runs = [threads.submit(self._run, cell, context, deadline) for cell in queue]
                queue = [cell for cell, run in zip(queue, runs, strict=True) if run.result()]
                if queue:
                    time.sleep(RETRY)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def report(self, repeat: str) -> int:
        """Log the outcome and return the exit status: 0 if no cell failed, 1 if some did,
        128 + the signal that stopped the study. `repeat`: the command that resumes it."""
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
        """Pass a signal on to all workers and the processes that they started."""
        passed_on = signal.SIGKILL
        if self.received is None:
            self.received = signal.Signals(number)
            passed_on = signal.SIGINT
            self.console.info("stopping: cells save their checkpoints; a second signal kills them")
        with self._lock:
            for process in self._running:
                assert process.pid is not None  # the process was started
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    try:
                        os.killpg(process.pid, passed_on)
                    except ProcessLookupError:
                        # the process does not lead its group yet: it ignores the signal and has
                        # nothing to save
                        os.kill(process.pid, signal.SIGKILL)

    def _run(self, cell: PlannedCell, context: ForkServerContext, deadline: float) -> bool:
        """Run the unfinished commands of a cell in its own process, unless it would end too late.
        True if another process works on the cell."""
        seconds = seconds_left(self.folder, self.flops, self.done, [cell.id]) or 0.0
        if time.monotonic() + seconds > deadline:
            self._phases[cell.id] = LEFT
            return False
        begun = time.monotonic()
        with self._lock:
            if self.received:
                return False
            device = self._devices.pop()
            process = context.Process(target=work, args=(cell, self.folder, self.jobs, device))
            process.start()
            self._running.add(process)
            self._phases[cell.id] = RUNNING
        connection.wait([process.sentinel])
        with self._lock:
            process.join()
            self._running.remove(process)
            self._devices.append(device)
            status = process.exitcode or 0
            if status == REQUEUE:
                self._phases[cell.id] = WAITING
            else:
                self._end(cell, status, time.monotonic() - begun)
        return status == REQUEUE

    def _end(self, cell: PlannedCell, status: int, seconds: float) -> None:
        """Log how a cell ended."""
        name = cell.id
        phase = DONE
        reason = ""
        if status == 0:
            self.done.add(name)
        elif self.received and status != CELL_FAILED:
            phase = STOPPED
        else:
            phase = FAILED
            known = errors_of(read_times(self.folder))
            if status != CELL_FAILED or name not in known:  # the worker could not state its error
                part = cell.commands_left()[0].part
                error = f"{_end_of(status)}; output: {log_of(self.folder, name)}"
                add_time(self.folder, name, part, f"{part}: {error}")
            self._errors[name] = errors_of(read_times(self.folder))[name]
            reason = f": {self._errors[name]}"
        self._phases[name] = phase
        self.console.info(f"{name}: {phase} in {duration(seconds)}{reason}; {self._summary()}")

    def _summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(self._phases.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
        open_cells = [name for name, phase in self._phases.items() if phase in (RUNNING, WAITING)]
        seconds = seconds_left(self.folder, self.flops, self.done, open_cells)
        return text + (f"; about {duration(seconds / self.jobs)} left" if seconds else "")


def _end_of(status: int) -> str:
    """A description of the end of a worker that did not state its error."""
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
    """Start the server process. The server ignores the signals that a terminal or a scheduler sends
    to all processes of the study."""
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C reaches only the study, which passes it on to the workers that lead a group
    os.setsid()
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
    """The number of threads of a worker: OMP_NUM_THREADS, or its share of the CPU cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // jobs))


def _end_with_study() -> None:
    """End this process as soon as the study ends: another call could start the same cells."""
    study = multiprocessing.parent_process()
    assert study is not None
    connection.wait([study.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def run_cell(cell: PlannedCell, folder: Path) -> int:
    """Run the unfinished commands of a cell and return an exit status. REQUEUE: another process,
    possibly on another machine, works on the cell."""
    cell.run.parent.mkdir(parents=True, exist_ok=True)
    with locked(cell.run.with_name(f"{cell.run.name}.lock")) as is_ours:
        if not is_ours:
            return REQUEUE
        status = 0
        try:
            for command in cell.commands_left():  # another process may have run some meanwhile
                if not _run(command, cell, folder):
                    status = CELL_FAILED
                    if command.part == TRAINING:
                        break
        except (KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM before the first step
            return INTERRUPTED
        return status


def _run(command: Command, cell: PlannedCell, folder: Path) -> bool:
    """Run a command as its script does, and log its time and error. True if it succeeded. Raises
    KeyboardInterrupt after a signal."""
    print(f"$ {command}")
    error = ""
    wall = time.monotonic()
    cpu = time.process_time()
    try:
        if command.part == TRAINING:
            cell.refuse_damaged()
        if importlib.import_module(command.script).main(command.arguments):
            raise KeyboardInterrupt  # the checkpoint is saved
    except (UserError, OSError) as problem:
        error = f"{command.part}: {message_of(problem)}"
        print(f"error: {printable(error)}", file=sys.stderr)
    except Exception as problem:
        name = type(problem).__name__
        error = f"{command.part}: {name}: {problem}; full output: {log_of(folder, cell.id)}"
        traceback.print_exc()
    finally:
        seconds = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        add_time(folder, cell.id, command.part, error, **seconds)
    return not error


def log_of(folder: Path, cell: str) -> Path:
    return folder / "logs" / f"{cell}.log"


# The times of all commands that ran.


def add_time(
    folder: Path,
    cell: str,
    part: str,
    error: str,
    wall: float = 0.0,
    cpu: float = 0.0,
) -> None:
    """Append a line to times.jsonl: the seconds that a command ran, and its error or ''."""
    line = {"cell": cell, "part": part, "wall": wall, "cpu": cpu, "error": error}
    with open(folder / TIMES, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_times(folder: Path) -> pd.DataFrame:
    """The lines of times.jsonl."""
    file = folder / TIMES
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return pd.DataFrame(map(json.loads, lines), columns=COLUMNS)


def errors_of(times: pd.DataFrame) -> dict[str, str]:
    """The errors of the cells whose commands failed in their last run."""
    last = times.drop_duplicates(["cell", "part"], keep="last")
    return last.loc[last.error != ""].groupby("cell").error.agg("; ".join).to_dict()


def seconds_left(
    folder: Path, flops: Mapping[str, float], done: Collection[str], cells: Collection[str]
) -> float | None:
    """Estimated seconds to run the unfinished ones of these cells one after the other, at the
    measured rate of the finished cells; None before any cell is done.

    Args:
        flops: training FLOPs of each cell.
    """
    wall = read_times(folder).groupby("cell").wall.sum()
    measured = [name for name in wall.index if name in done]
    if not measured:
        return None
    rate = wall[measured].sum() / sum(flops[name] for name in measured)
    return float(rate * sum(flops[name] for name in cells if name not in done))


# In the jobs of a scheduler.


def submit(cells: Sequence[PlannedCell], folder: Path, jobs: int, cluster: str) -> list[str]:
    """Submit each cell's unfinished commands as one job of an array, of which at most `jobs` run at
    a time. Returns the ids of the jobs. `cluster`: a cluster of submitit, slurm or local. Slurm
    reads the resources of a job from environment variables such as SBATCH_PARTITION and
    SBATCH_TIMELIMIT.

    Raises StudyError if submitit is not installed.
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
