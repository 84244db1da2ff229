"""Signals before and after the first step. In several processes: test_processes.py."""

import os
import signal
import time

import pytest

from errors import INTERRUPTED, REQUEUE
from training.stop_requests import StopRequests


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0)  # handlers run between two lines


@pytest.fixture(autouse=True)
def _default_handlers():
    """Also under nohup, which ignores SIGHUP, and after scripts that handle SIGTERM to their end."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _all_as_before(_default_handlers):
    """Handlers are those of before."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == handlers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_sigterm_before_first_step_exits_immediately(number, capsys):
    tidied = []
    with pytest.raises(SystemExit) as caught, StopRequests():
        try:
            send(number)
        finally:
            # the launcher's, too: they do not cut short what tidies up
            send(number, signal.SIGTERM)
            tidied.append(True)
    assert caught.value.code == REQUEUE
    assert tidied
    message = f"stopped by {number.name} before the first step: nothing to save."
    assert capsys.readouterr().err == f"{message} Run the same command again to resume\n"


def test_sigint_before_first_step_raises_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), StopRequests():
        send(signal.SIGINT)


@pytest.mark.parametrize(
    ("numbers", "status", "received"),
    [
        ([], 0, None),
        ([signal.SIGINT], INTERRUPTED, signal.SIGINT),
        ([signal.SIGTERM, signal.SIGTERM], REQUEUE, signal.SIGTERM),
        ([signal.SIGHUP], REQUEUE, signal.SIGHUP),
        ([signal.SIGINT, signal.SIGUSR1], REQUEUE, signal.SIGUSR1),
        ([signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT], REQUEUE, signal.SIGUSR1),
    ],
)
def test_signal_after_first_step_is_deferred(numbers, status, received, capsys):
    with StopRequests() as requests:
        requests.begin_steps()
        send(*numbers)
        assert (requests.status, requests.received) == (status, received)
    assert capsys.readouterr().err == ""


def test_ignored_sighup_stays_ignored():
    """nohup starts processes so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            requests.begin_steps()
            send(signal.SIGHUP)
            assert requests.status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_sigint_exits_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequests() as requests:
        requests.begin_steps()
        send(signal.SIGINT, signal.SIGINT)


def test_signals_to_forked_child_are_not_recorded():
    reader, writer = os.pipe()
    with StopRequests() as requests:
        child = os.fork()
        if not child:
            try:
                os.write(writer, b"forked")
                time.sleep(60)
            finally:
                os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert requests.received is None
    os.close(reader)
    os.close(writer)
