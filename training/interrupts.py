"""Signals that ask a run to leave, and with which exit status it does."""

import os
import signal
import sys
import threading

from training.exits import INTERRUPTED, REQUEUE

PATIENCE = 0.5  # seconds in which the main thread must have heard a signal
_ASK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """Turns signals into exit statuses that say whether the same command is to be started again.

    SIGINT (Ctrl-C) leaves for good, and a second one ends at once. SIGTERM and SIGUSR1, which schedulers send
    ahead of taking the machine away, leave with the status that asks to be started again; they may come
    several times, through the launcher and directly, and a repetition changes nothing.

    Until `begin_steps` there is nothing to save: the block is left at once, by KeyboardInterrupt or
    SystemExit. From then on a signal is a request to save and leave, read from `status` after every step.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before = {}
        self._at_steps = False
        self._heard, self._left = threading.Event(), threading.Event()

    def __enter__(self) -> "Interrupts":
        self._pipe, self._end = os.pipe()
        os.set_blocking(self._end, False)
        self._wakeup = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        for number in _ASK:
            self._before[number] = signal.signal(number, self._note)
        os.register_at_fork(after_in_child=self._restore)  # what a library's fork is sent is not for this one
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        self._left.set()
        os.close(self._end)
        self._thread.join()
        os.close(self._pipe)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
            signal.set_wakeup_fd(self._wakeup)

    def begin_steps(self) -> None:
        """From here on there is something to save."""
        self._at_steps = True

    def _note(self, number: int, frame: object) -> None:
        self._heard.set()
        if number == self.received == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        repeated = self.received is not None
        if self.status != REQUEUE:
            self.received = signal.Signals(number)
        if not self._at_steps and not repeated:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            _say(number)
            raise SystemExit(REQUEUE)

    def _listen(self) -> None:
        """End a process whose main thread is in a library, or waits for others, and so hears no signal: at
        any before the first step, at a second Ctrl-C after it, of which the main thread would have died."""
        heard = []
        while number := os.read(self._pipe, 1):
            if number[0] not in _ASK:  # every signal that Python handles comes here
                continue
            heard.append(number[0])
            again = len(heard) > 1 and set(heard) == {signal.SIGINT} and not self._left.wait(PATIENCE)
            if again or (not self._at_steps and not self._heard.wait(PATIENCE)):
                _say(number[0])
                os._exit(INTERRUPTED if number[0] == signal.SIGINT else REQUEUE)

    @property
    def status(self) -> int:
        """The exit status asked for, 0 while no signal has come."""
        if self.received is None:
            return 0
        return INTERRUPTED if self.received == signal.SIGINT else REQUEUE


def _say(number: int) -> None:
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"(process {rank}) "
    text = f"stopped by {signal.Signals(number).name} before the first step: nothing to save. "
    text = "interrupted" if number == signal.SIGINT else f"{text}The same command goes on from here"
    print(who + text, file=sys.stderr, flush=True)
