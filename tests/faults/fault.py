"""One row of the fault table: what is broken, which command meets it, and what a user must see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.training.conftest import ROOT, environment


@dataclass(frozen=True)
class Result:
    """What a command left: its exit status and its two streams."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Fault:
    """A fault and its expected outcome.

    Attributes:
        name: the test's id.
        run: injects the fault in an empty folder with the overrides of a tiny run (12 steps, about a second)
            and returns the command's result.  It asserts what is special about this fault (files left behind,
            steps saved).
        status: the expected exit status.
        names: substrings that standard error must contain: the file, setting or line at fault, and the fix.
    """

    name: str
    run: Callable[[Path, list[str]], Result]
    status: int = 2
    names: tuple[str, ...] = ()


def call(script: str, *words: str, cwd: Path, **env: str) -> Result:
    """A top-level script in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, words)],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
