"""Subprocesses of a study: each in its own process group with a log file, all stopped together.

Separate processes confine a crash, an out-of-memory error or a signal to one cell.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

# On Linux a subprocess is killed when the study dies, even by kill -9; otherwise two processes
# could train the same run. Elsewhere it continues and keeps its run directory locked, and the next
# call waits for it.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\nctypes.CDLL(None).prctl(1, signal.SIGKILL)\nos.getppid() == "
    "int(sys.argv[1]) or sys.exit(1)\nos.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


def gpus() -> list[str]:
    """The available GPUs, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # not needed by --help

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


class CommandRunner:
    """Runs Python commands. Starts none after `stop`."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self.stopping = threading.Event()

    def run(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str],
    ) -> int | None:
        """Run `python ARGUMENTS` and append its output to `log`; its exit status, None if the study
        is stopping.

        Call it in a thread that outlives the command: the kernel binds the process to that thread.
        """
        bound = ["-SE", "-c", _DIE_WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            with self._lock:
                if self.stopping.is_set():
                    return None
                process = subprocess.Popen(
                    [sys.executable, *bound, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches only the study, which passes it on
                )
                self._running.add(process)
            try:
                status = process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
        return status

    def stop(self, kill: bool = False) -> None:
        """Interrupt all processes, which save a checkpoint and exit; or kill them with their
        children."""
        with self._lock:
            self.stopping.set()
            running = list(self._running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                if kill:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.send_signal(signal.SIGINT)


def last_error(log: Path, status: int | None = None) -> str:
    """Why a command failed: its signal, else its last `error: ...` line, else its last line of
    output."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (
            " (possibly out of memory)" if -status == signal.SIGKILL else ""
        )
    lines = [line.strip() for line in tail(log).splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*lines, *errors][-1] if lines else "no output"


def tail(file: Path, size: int = 16 << 10) -> str:
    """The end of a text file; '' if it does not exist."""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
