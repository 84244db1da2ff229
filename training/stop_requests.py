"""Signal handling: save a checkpoint and exit with a status for the scheduler, which may requeue
the job."""

import ctypes
import os
import signal
import socket
import sys
import threading

from errors import INTERRUPTED, REQUEUE

HANDLING_TIME = 0.5  # seconds in which the main thread must have handled a signal
# Windows has neither SIGHUP nor SIGUSR1
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class StopRequests:
    """The exit status that a signal, or a part of the training that failed, requests from the run.

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
        self._handled = threading.Event()
        self._left = threading.Event()

    def __enter__(self) -> "StopRequests":
        # a pair of sockets: on Windows a pipe cannot be woken up
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
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
        self._left.set()
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
            signal.set_wakeup_fd(self._wakeup)

    def begin_steps(self) -> None:
        """From here on a signal sets `status` instead of exiting."""
        self._at_steps = True

    def request(self, status: int) -> None:
        """Ask all processes to save and exit after the same step; REQUEUE precedes other
        statuses."""
        if self.status != REQUEUE:
            self.status = status

    def _handle(self, number: int, frame: object) -> None:
        self._handled.set()
        if number == self.received == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        repeated = self.received is not None
        if self.status != REQUEUE:
            self.received = signal.Signals(number)
            self.request(_status_of(number))
        if not self._at_steps and not repeated:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            _report(number)
            raise SystemExit(REQUEUE)

    def _listen(self) -> None:
        """Exit where the main thread cannot handle a signal because it is inside a library call or
        waits for other processes: on any signal before the first step, on a second Ctrl-C
        afterwards."""
        numbers = []
        while byte := self._receiver.recv(1):
            (number,) = byte
            if number not in _SIGNALS:  # Python writes every handled signal to the pipe
                continue
            numbers.append(number)
            is_repeated = len(numbers) > 1 and set(numbers) == {signal.SIGINT}
            is_stuck = is_repeated and not self._left.wait(HANDLING_TIME)
            if is_stuck or (not self._at_steps and not self._handled.wait(HANDLING_TIME)):
                _report(number)
                os._exit(_status_of(number))


def _status_of(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def _end_with_launcher() -> None:
    """Request SIGTERM when the launcher dies; otherwise its processes would continue to train."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the request
        os.kill(os.getpid(), signal.SIGTERM)


def _report(number: int) -> None:
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"(process {rank}) "
    text = "interrupted"
    if number != signal.SIGINT:
        text = (
            f"stopped by {signal.Signals(number).name} before the first step: nothing to save. "
            "Run the same command again to resume"
        )
    print(who + text, file=sys.stderr, flush=True)
