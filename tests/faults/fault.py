"""One row of the fault table: what is broken, the command that meets it, and the expected
output."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ScriptProcess


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
        run: injects the fault in an empty folder with the overrides of a tiny run (12 steps, about
            a second) and returns the command's result.  It asserts what is special about this fault
            (files left behind, steps saved).
        status: the expected exit status.
        names: substrings that standard error must contain: the file, setting or line at fault, and
            the fix.
    """

    name: str
    run: Callable[[Path, list[str]], Result]
    status: int = 2
    names: tuple[str, ...] = ()
    is_slow: bool = False


def call(script: str, *overrides: object, cwd: Path, **env: str) -> Result:
    """A script in a process of its own."""
    out = cwd.with_name(f"{cwd.name}.out")
    err = cwd.with_name(f"{cwd.name}.err")
    process = ScriptProcess(script, [str(word) for word in overrides], cwd, out, err, env)
    try:
        status = process.wait(120)
    finally:
        process.kill()
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in (out, err))
    return Result(status, *texts)
