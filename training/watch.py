"""Notices that another process of a run died or hangs, which no collective does by itself in less than a day.

A thread of every process watches two things. A step that does not end: all processes take part in it, so one
that is stuck holds up all the others. And, at any time, that processes beat: each writes into a folder beside
the run's every few seconds, the main one listens to all, and all to the main one. So one process may prepare,
validate or save for as long as it takes while others wait. Where that folder is not shared, the steps alone
are watched.

A process that leaves by an error of its own writes that where it beats. Those who lose it by that leave with
its words and as it does: started again, the same command would only meet the same error.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from training.exits import FAILED, RANK_LOST

_BEATS = ".alive"
_GRACE = 60.0  # seconds in which who sees another's error may finish what it writes, or hear of it by itself


def beats_of(run: Path) -> Path:
    """Where the processes of a run beat: beside its folder, which comes later and may be set aside."""
    return run.parent / _BEATS / run.name


class Watch:
    """Ends this process, with status RANK_LOST and a sentence, where the others are lost; with FAILED where
    one of them said that it left by an error.

    Only time in which this process ran is counted: neither a clock that jumps nor a machine that slept can
    end a run. A process alone is not watched.

    attempt: a word of this attempt alone, the same on all processes; beats without it are of an earlier one.
    """

    def __init__(self, run: Path, attempt: str, rank: int, world: int, timeout: float):
        self.rank, self.world, self.timeout, self._attempt = rank, world, timeout, attempt
        self._folder = beats_of(run)
        self._interval = min(5.0, timeout / 20)
        self._peers = range(1, world) if rank == 0 else (0,)
        self._under_way: tuple[int, str] | None = None  # which step since the start, and its name
        self._steps = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True) if world > 1 else None

    def __enter__(self) -> "Watch":
        if self._thread is not None:
            self._write("0")
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        words = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, Exception) and is_broken_link(error):
            self._leave(f"another process is gone ({words})")
        if isinstance(error, SystemExit) and self._failure():  # a batch system tells the others to end
            self._leave("told to end")
        if isinstance(error, Exception):
            self._write(f"process {self.rank} failed: {words}")
        if error is None:  # a file left behind without a beat tells the others
            with suppress(OSError):
                self._file(self.rank).unlink(missing_ok=True)
                self._folder.rmdir()  # by the last of them
                self._folder.parent.rmdir()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What every process takes part in: its end is due within the timeout."""
        self._steps += 1
        self._under_way = self._steps, what
        try:
            yield
        finally:
            self._under_way = None

    def _look(self) -> None:
        in_step = Stopwatch(time.monotonic, self._interval)
        silent = {peer: Stopwatch(time.monotonic, self._interval) for peer in self._peers}
        count = 0
        while not self._done.wait(self._interval):
            count += 1
            self._write(str(count))
            if (now := self._under_way) is None:
                in_step.restart()
            elif in_step.seconds(now) > self.timeout:
                text = f"{now[1]} has not ended for {self.timeout:g} s: another process is dead or hangs"
                self._leave(text)
            for peer, watch in silent.items():
                if (beat := self._heard(peer)) is None:
                    watch.restart()
                    continue
                limit = self.timeout if beat.isdigit() else min(self.timeout, _GRACE)
                if watch.seconds(beat) > limit:
                    self._leave(f"process {peer} gave no sign for {self.timeout:g} s: it is dead or hangs")

    def _file(self, rank: int) -> Path:
        return self._folder / str(rank)

    def _write(self, beat: str) -> None:
        with suppress(OSError):  # no room or no folder: whoever writes there says so
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file(self.rank).write_text(f"{self._attempt} {beat}", encoding="utf-8")

    def _heard(self, peer: int) -> str | None:
        """The last beat of a process, a number, or the error that it left by."""
        try:
            text = self._file(peer).read_text(encoding="utf-8", errors="replace")  # half of it, perhaps
        except OSError:
            return None
        attempt, _, beat = text.partition(" ")
        return beat if attempt == self._attempt else None

    def _failure(self) -> str | None:
        """The error that another process left by, in words; None where none has."""
        heard = (self._heard(peer) for peer in range(self.world) if peer != self.rank)
        return next((beat for beat in heard if beat and not beat.isdigit()), None)

    def _leave(self, text: str) -> None:
        """End at once: whatever is shut down in order would wait for the lost process again."""
        said = f"{text} (training.rank_timeout). The same command goes on from the last checkpoint"
        status = RANK_LOST
        if (failure := self._failure()) is not None:
            self._write(failure)  # for those who listen to this process alone
            said, status = failure, FAILED
        print(f"error: (process {self.rank}) {said}", file=sys.stderr, flush=True)
        os._exit(status)


class Stopwatch:
    """Seconds since something changed, of those in which this process was looking.

    Each look counts no more than twice the interval between looks: a process that was stopped and goes on has
    seen nothing, and must not take its own sleep for the others'.
    """

    def __init__(self, clock: Callable[[], float], interval: float):
        self._clock, self._most = clock, 2 * interval
        self.restart()

    def restart(self) -> None:
        """Nothing is waited for: begin anew with the next look."""
        self._mark: object = object()
        self._sum, self._last = 0.0, self._clock()

    def seconds(self, mark: object) -> float:
        """How long `mark` has been what it is."""
        now = self._clock()
        passed, self._last = min(max(now - self._last, 0.0), self._most), now
        self._sum = self._sum + passed if mark == self._mark else 0.0
        self._mark = mark
        return self._sum


def is_broken_link(error: Exception) -> bool:
    """Whether an error says that a collective lost its partner; gloo says it in words only."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text or "connection" in text)
    )
