"""Calls of study.py in this process and in another one."""

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import study
import train
from data.files import write_json
from studies import cell_pool, study_report
from tests.files import ROOT
from tests.processes import ScriptProcess, server, wait_until

FORK = multiprocessing.get_context("fork")


def noted(results: dict, folder: Path) -> tuple[None, list[str]]:
    """Stands in for the report, whose figures take seconds: what it was asked to report."""
    write_json(folder / "report.html", results)
    return None, []


def call(monkeypatch, *arguments: object, report=noted) -> int:
    """study.py in this process."""
    monkeypatch.setattr("studies.study_report.write_report", report)
    return study.main([*map(str, arguments)])


def start(log: Path, *arguments: object) -> ScriptProcess:
    """study.py in a process of its own."""
    return ScriptProcess("study.py", [*map(str, arguments)], ROOT, log, log)


def fork(log: Path, *arguments: object) -> BaseProcess:
    """study.py in a process of its own, and its workers in forks of that, whose third step of
    training lasts until a signal."""
    process = server().Process(target=_run, args=(log, [*map(str, arguments)]))
    process.start()
    return process


def _run(log: Path, arguments: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    cell_pool.start_server = lambda: FORK
    work = cell_pool.work

    def work_and_end(*given: object) -> None:
        """Without waiting for the threads of the study, which this process has not."""
        try:
            work(*given)
        except SystemExit as end:
            os._exit(end.code)

    cell_pool.work = work_and_end
    study_report.write_report = noted
    step = train.train_step

    def lasting(state, batch, parallel, settings, requests):
        if state.step == 2:
            wait_until(lambda: requests.status)
        return step(state, batch, parallel, settings, requests)

    train.train_step = lasting
    sys.exit(study.main(arguments))
