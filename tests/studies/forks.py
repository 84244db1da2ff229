"""Calls of study.py in this process and in another one."""

import os
import subprocess
import sys
from pathlib import Path

import study
from data.files import write_json
from tests.files import ROOT


def noted(results: dict, folder: Path) -> tuple[None, list[str]]:
    """Stands in for the report, whose figures take seconds: what it was asked to report."""
    write_json(folder / "report.html", results)
    return None, []


def call(monkeypatch, *arguments: object, report=noted) -> int:
    """study.py in this process."""
    monkeypatch.setattr("studies.study_report.write_report", report)
    return study.main([*map(str, arguments)])


def start(log: Path, *arguments: object) -> subprocess.Popen:
    """study.py in a process of its own."""
    with open(log, "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, "study.py", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
        )
