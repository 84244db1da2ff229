"""Signal handling: save a checkpoint and exit with a status for the scheduler, which may requeue
the job."""

import ctypes
import os
import signal
import sys

from errors import INTERRUPTED, REQUEUE

# Windows has neither SIGHUP nor SIGUSR1
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class StopRequests:
    """The exit status that a signal requests from the run.

    SIGINT (Ctrl-C) exits with INTERRUPTED; a second one exits at once. SIGTERM and SIGUSR1, which
    schedulers send before they stop a job, and SIGHUP of a closed terminal (unless ignored, as
    under nohup) exit with REQUEUE; repeated signals, e.g. through the launcher and directly, have
    no further effect. On Linux, a process started by torchrun or `accelerate launch` also receives
    SIGTERM when its launcher dies.

    Before `begin_steps` there is nothing to save: a signal leaves the block at once, by
    KeyboardInterrupt or SystemExit. Afterwards it sets `status`, which the training loop exchanges
    in every step.

    Attributes:
        status: the exit status that this process requests; 0: none.
        received: the signal that requests it.
    """

    def __init__(self):
        self.status = 0
        self.received: signal.Signals | None = None
        self._before = {}
        self._at_steps = False

    def __enter__(self) -> "StopRequests":
        for number in _SIGNALS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if not is_ignored or signal.Signals(number).name != "SIGHUP":
                self._before[number] = signal.signal(number, self._handle)
        _end_with_launcher()
        # forked children use the default handlers
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restore)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def begin_steps(self) -> None:
        """From here on a signal sets `status` instead of exiting."""
        self._at_steps = True

    def _handle(self, number: int, frame: object) -> None:
        is_first = self.received is None
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.status != REQUEUE:
            self.received = signal.Signals(number)
            self.status = INTERRUPTED if number == signal.SIGINT else REQUEUE
        if not is_first or self._at_steps:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"(process {rank}) "
        name = signal.Signals(number).name
        print(
            f"{where}stopped by {name} before the first step: nothing to save. Run the same "
            "command again to resume",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(REQUEUE)


def _end_with_launcher() -> None:
    """Request SIGTERM when the launcher dies; otherwise its processes would continue to train."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # the launcher died before the request
        os.kill(os.getpid(), signal.SIGTERM)
