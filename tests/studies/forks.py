"""A study whose cells run as forks of this process, so that imports happen once."""

import os
from pathlib import Path

import study
import train
from data.files import write_json
from studies.report.study_report import StudyReport
from studies.running.children import start_child

HEAVY = train  # imported here, so that no fork has to


def noted(results: dict, folder: Path) -> StudyReport:
    """Stands in for the report, whose figures take seconds: what it was asked to report."""
    write_json(folder / "report.html", results)
    return StudyReport([folder / "report.html"], None, [])


def call(monkeypatch, *arguments: object, report=noted) -> int:
    """study.py in this process."""
    monkeypatch.setattr("studies.report.study_report.write_report", report)
    return study.main([*map(str, arguments)])


def fork_call(log: Path, *arguments: object) -> int:
    """study.py in a child that leads a process group; the child's id."""
    return start_child(lambda: study.main([*map(str, arguments)]), log)


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
