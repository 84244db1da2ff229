"""The commands a study runs: each in a group of its own, its output in a file, stopped together.

A command of its own means that a crash, a full memory or a signal ends one cell and not the study.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

KEPT_BYTES = 1 << 20  # of one log; of a longer one the beginning and the end stay

# On Linux a command dies with the study however that ends, kill -9 included: two trainers of one run would
# meet otherwise. Elsewhere it goes on, holds its run folder, and the next call of the study waits for it.
_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class Commands:
    """The Python commands under way. After `stop`, none is started any more."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self.stopping = threading.Event()

    def run(self, words: Sequence[str], log: Path, environment: dict[str, str]) -> int | None:
        """Run `python WORDS`, output appended to `log`; its exit status, None if the study is stopping.

        To be called in a thread that outlives the command: the kernel ties the command to it.
        """
        tie = ["-SE", "-c", _TIED, str(os.getpid())] if sys.platform == "linux" else []
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            with self._lock:
                if self.stopping.is_set():
                    return None
                process = subprocess.Popen(
                    [sys.executable, *tie, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the study alone, which passes it on
                )
                self._running.add(process)
            try:
                status = process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
        cap(log)
        return status

    def stop(self) -> None:
        """Ask every command to save what it has and to end."""
        with self._lock:
            self.stopping.set()
            running = list(self._running)
        _signal(running, signal.SIGINT)

    def kill(self) -> None:
        with self._lock:
            self.stopping.set()
            running = list(self._running)
        _signal(running, signal.SIGKILL)


def _signal(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)


def cap(log: Path) -> None:
    """Keep the beginning and the end of a log that has grown too long."""
    size = log.stat().st_size
    if size <= KEPT_BYTES:
        return
    head = KEPT_BYTES // 16
    with open(log, "r+b") as file:
        first = file.read(head)
        file.seek(size - (KEPT_BYTES - head))
        last = file.read()
        note = f"\n... {size - len(first) - len(last):,} bytes left out ...\n".encode()
        file.seek(0)
        file.write(first + note + last)
        file.truncate()


def last_error(log: Path, status: int | None = None) -> str:
    """Why a command failed: the signal that ended it, else its last `error: ...`, else its last line."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (", often for want of memory" if -status == signal.SIGKILL else "")
    lines = tail(log).splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = [line.strip() for line in lines if line.strip()]
    return errors[-1] if errors else said[-1] if said else "it said nothing"


def tail(file: Path, size: int = 16 << 10) -> str:
    """The end of a text file; '' where there is none."""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
