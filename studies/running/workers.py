"""Runs the command lines of cells in worker processes, one for each cell.

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
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from data.files import locked
from errors import REQUEUE, StudyError, UserError, printable
from settings.script import message_of
from studies.running.commands import Command, commands_left, refuse_damaged
from studies.running.gathered import TIMES
from studies.running.plan import PlannedCell

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
PRELOADED = ["train", "evaluate", "evaluation.evaluate_runs", "interop.runs", __name__]
FAILED = 1
ERROR = "error: "  # begins the line of a failed command in the log


def gpus() -> list[str]:
    """The available GPUs, as CUDA_VISIBLE_DEVICES names them."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # without a CUDA context
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


def log_of(folder: Path, plan: PlannedCell) -> Path:
    return folder / "logs" / f"{plan.id}.log"


def start_server() -> multiprocessing.context.ForkServerContext:
    """Start the server process. It ignores the signals that a terminal or a scheduler sends to all
    processes of the study."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    forkserver.ensure_running()
    for number, handler in before.items():
        signal.signal(number, handler)
    return context


class Workers:
    """Worker processes, at most `jobs` at a time."""

    def __init__(self, folder: Path, jobs: int):
        self.folder = folder
        self.jobs = jobs
        self._context = start_server()
        self._devices = gpus()
        self._running: dict[int, tuple[PlannedCell, BaseProcess, int]] = {}  # by slot

    def __len__(self) -> int:
        return len(self._running)

    def start(self, plan: PlannedCell) -> None:
        """Start what is left of a cell."""
        slot = min(set(range(self.jobs)) - set(self._running))
        device = self._devices[slot % len(self._devices)] if self._devices else None
        log = log_of(self.folder, plan)
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = log.stat().st_size if log.exists() else 0
        arguments = (plan, self.folder, self.jobs, device)
        process = self._context.Process(target=work, args=arguments)
        # a signal waits until `stop` can pass it on
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
            self._running[slot] = (plan, process, begin)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def ended(self, seconds: float) -> list[tuple[PlannedCell, int, str]]:
        """Wait at most so long for a worker to end. The cells that ended, with the exit status and
        what the worker has added to the log."""
        connection.wait([process.sentinel for _, process, _ in self._running.values()], seconds)
        ended = []
        for slot, (plan, process, begin) in list(self._running.items()):
            if process.is_alive():
                continue
            del self._running[slot]
            output = b""
            with contextlib.suppress(FileNotFoundError):
                output = log_of(self.folder, plan).read_bytes()[begin:]
            ended.append((plan, process.exitcode or 0, output.decode(errors="replace")))
        return ended

    def stop(self, number: int) -> None:
        """Send a signal to all workers and what they have started."""
        for _, process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it does not lead its group yet
                    os.kill(process.pid, number)


def work(plan: PlannedCell, folder: Path, jobs: int, device: str | None) -> None:
    """The main function of a worker: exits with the status of `run_cell`."""
    os.setsid()  # Ctrl-C reaches only the study, which passes it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_study, daemon=True).start()
    output = os.open(log_of(folder, plan), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    share = max(1, (os.cpu_count() or 1) // jobs)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
    try:
        status = run_cell(plan, folder)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def _end_with_study() -> None:
    """Without the study another call could start the same cells: end this process at once."""
    study = multiprocessing.parent_process()
    assert study is not None
    connection.wait([study.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def run_cell(plan: PlannedCell, folder: Path) -> int:
    """Run what is left of a cell; returns an exit status. REQUEUE: another process, maybe on
    another machine, works on the cell. Any other status than 0 and FAILED: a signal."""
    plan.run.parent.mkdir(parents=True, exist_ok=True)
    with locked(plan.run.with_name(f"{plan.run.name}.lock")) as is_ours:
        if not is_ours:
            return REQUEUE
        status = 0
        for command in commands_left(plan):  # another process may have run some meanwhile
            ended = _run(command, plan, folder)
            if ended > FAILED:
                return ended
            status = max(status, ended)
            if ended and command.script == "train":
                break
        return status


def _run(command: Command, plan: PlannedCell, folder: Path) -> int:
    """Run a line, as its script does. Errors are printed as `error: PART: ...`."""
    print(f"$ {command}")
    wall = time.monotonic()
    cpu = time.process_time()
    try:
        if command.script == "train":
            refuse_damaged(plan)
        status = importlib.import_module(command.script).main(command.arguments)
        return 128 + signal.SIGINT if status else 0  # a signal, after which all is saved
    except (UserError, OSError) as error:
        print(f"{ERROR}{command.part}: {printable(message_of(error))}", file=sys.stderr)
    except Exception as error:
        traceback.print_exc()
        print(f"{ERROR}{command.part}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        seconds = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        line = {"cell": plan.id, "part": command.part} | seconds
        with open(folder / TIMES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return FAILED


def submit(plans: Sequence[PlannedCell], folder: Path, jobs: int, cluster: str) -> list[str]:
    """Submit what is left of each cell as a job of an array, at most `jobs` at a time; the ids of
    the jobs. `cluster`: slurm, or local of submitit. Slurm reads the resources of a job from
    environment variables such as SBATCH_PARTITION and SBATCH_TIMELIMIT.

    Raises StudyError without submitit.
    """
    try:
        import submitit
    except ImportError:
        raise StudyError("--launcher requires submitit: pip install -e .[slurm]") from None
    executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=cluster)
    executor.update_parameters(**({"slurm_array_parallelism": jobs} if cluster == "slurm" else {}))
    submitted = executor.map_array(run_job, plans, [folder] * len(plans))
    return [job.job_id for job in submitted]


def run_job(plan: PlannedCell, folder: Path) -> None:
    """The main function of a submitted job. Raises SystemExit unless the cell is done."""
    if status := run_cell(plan, folder):
        sys.exit(status)
