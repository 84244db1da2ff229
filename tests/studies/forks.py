"""A study whose commands run as forks of this process, so that imports happen once."""

import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import evaluate
import study
import train
from data.files import write_json
from studies.running.commands import CommandRunner

HEAVY = (evaluate, train)  # imported here, so that no fork has to


def run(self: CommandRunner, overrides, log: Path, environment: dict[str, str]) -> int | None:
    """`CommandRunner.run` without a new interpreter."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with self._lock:
        if self.stopping.is_set():
            return None
        child = forked(list(overrides), log, environment)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(
    overrides: list[str], log: Path, environment: dict[str, str] | None = None, group: bool = False
) -> int:
    """Run a script in a fork, its output in `log`; the fork's number. `group`: in a group of its
    own."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.seed()  # as a new process has it: by chance
        if group:
            os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
        os.environ.update(environment or {})
        sys.argv = overrides
        runpy.run_path(overrides[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def noted(results: dict, folder: Path) -> list[Path]:
    """Stands in for the report, whose figures take seconds: what it was asked to report."""
    write_json(folder / "report.html", results)
    return [folder / "report.html"]


def call(monkeypatch, *overrides: object, report=noted) -> int:
    """study.py in this process, its commands in forks."""
    monkeypatch.setattr(CommandRunner, "run", run)
    monkeypatch.setattr("studies.report.study_report.write_report", report)
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, overrides)])
    return study.main()


def wait_until(true, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.03)
