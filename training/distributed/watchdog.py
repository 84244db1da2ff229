"""Detects that another process of a run died or hangs, long before a collective times out.

A thread of every process monitors two things. First, the duration of collective work such as a step: a
process that hangs blocks all others. Second, heartbeats: each process writes a file next to the run directory
every few seconds; the main process reads all heartbeats, the others that of the main process. A process may
prepare data, validate or save for any length of time while others wait. Where that folder is not shared, only
collective work is monitored.

A process that exits with an error writes it into its heartbeat file. The others then exit with the same error
and status, as a restart would fail in the same way.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import FAILED, RANK_LOST
from model.attention.sharding import is_broken_link

_HEARTBEATS = ".alive"
_GRACE = 60.0  # seconds to finish writing, or to receive the error, after another process failed


def heartbeats_of(run: Path) -> Path:
    """The folder of heartbeats: next to the run directory, which may not exist yet or may be renamed."""
    return run.parent / _HEARTBEATS / run.name


class Watchdog:
    """Exits this process with RANK_LOST where another process is lost, and with FAILED where another process
    reported an error.

    Counts only time in which this process ran, so clock changes and suspended machines do not end a run. A
    single process is not monitored.

    Args:
        attempt: an id of this attempt, the same on all processes; other heartbeats are from earlier ones.
    """

    def __init__(self, run: Path, attempt: str, rank: int, world: int, timeout: float):
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self._attempt = attempt
        self._folder = heartbeats_of(run)
        self._interval = min(5.0, timeout / 20)
        self._peers = range(1, world) if rank == 0 else (0,)
        self._collective: tuple[int, str] | None = None  # number and name of the collective work
        self._steps = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if world > 1 else None

    def __enter__(self) -> "Watchdog":
        if self._thread is not None:
            self._write("0")
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        message = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, Exception) and is_broken_link(error):
            self._exit(f"the connection to another process was lost ({message})")
        if isinstance(error, SystemExit) and self._failure():  # the launcher terminates the others
            self._exit("terminated by the launcher")
        if isinstance(error, Exception):
            self._write(f"process {self.rank} failed: {message}")
        if error is None:  # a heartbeat file that stops changing is reported
            with suppress(OSError):
                self._file(self.rank).unlink(missing_ok=True)
                self._folder.rmdir()  # succeeds in the last process
                self._folder.parent.rmdir()

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Work that every process takes part in; it must end within the timeout."""
        self._steps += 1
        self._collective = self._steps, what
        try:
            yield
        finally:
            self._collective = None

    def _watch(self) -> None:
        in_step = Stopwatch(time.monotonic, self._interval)
        silent = {peer: Stopwatch(time.monotonic, self._interval) for peer in self._peers}
        count = 0
        while not self._done.wait(self._interval):
            count += 1
            self._write(str(count))
            if (now := self._collective) is None:
                in_step.restart()
            elif in_step.seconds(now) > self.timeout:
                self._exit(
                    f"{now[1]} has not finished within {self.timeout:g} s: another process hangs"
                )
            for peer, watch in silent.items():
                if (beat := self._last_heartbeat(peer)) is None:
                    watch.restart()
                    continue
                limit = self.timeout if beat.isdigit() else min(self.timeout, _GRACE)
                if watch.seconds(beat) > limit:
                    self._exit(
                        f"process {peer} sent no heartbeat for {self.timeout:g} s: it is dead or hangs"
                    )

    def _file(self, rank: int) -> Path:
        return self._folder / str(rank)

    def _write(self, beat: str) -> None:
        with suppress(OSError):  # a full disk or missing folder is reported by other writers
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file(self.rank).write_text(f"{self._attempt} {beat}", encoding="utf-8")

    def _last_heartbeat(self, peer: int) -> str | None:
        """The last heartbeat of a process: a number, or the error it exited with."""
        try:
            # may be partly written
            text = self._file(peer).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        attempt, _, beat = text.partition(" ")
        return beat if attempt == self._attempt else None

    def _failure(self) -> str | None:
        """The error message another process exited with; None: none."""
        found = (self._last_heartbeat(peer) for peer in range(self.world) if peer != self.rank)
        return next((beat for beat in found if beat and not beat.isdigit()), None)

    def _exit(self, text: str) -> None:
        """Exit at once: an orderly shutdown would wait for the lost process again."""
        message = (
            f"{text} (training.rank_timeout). Run the same command again to resume from the last "
            "checkpoint"
        )
        status = RANK_LOST
        if (failure := self._failure()) is not None:
            self._write(failure)  # for processes that read this heartbeat only
            message = failure
            status = FAILED
        print(f"error: (process {self.rank}) {message}", file=sys.stderr, flush=True)
        os._exit(status)


class Stopwatch:
    """Seconds since a value changed.

    Each call counts at most twice the interval between calls, so the time in which this process was suspended
    is not attributed to others.
    """

    def __init__(self, clock: Callable[[], float], interval: float):
        self._clock = clock
        self._most = 2 * interval
        self.restart()

    def restart(self) -> None:
        """Start from 0 at the next call."""
        self._mark: object = object()
        self._sum, self._last = 0.0, self._clock()

    def seconds(self, mark: object) -> float:
        """Seconds since `mark` last changed."""
        now = self._clock()
        passed = min(max(now - self._last, 0.0), self._most)
        self._last = now
        self._sum = self._sum + passed if mark == self._mark else 0.0
        self._mark = mark
        return self._sum
