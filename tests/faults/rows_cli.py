"""Invalid command lines."""

import contextlib
import importlib
import io
import os
import shlex
import sys
from pathlib import Path

from settings.script import run_main
from tests.faults.fault import Fault, Result, call
from tests.files import ROOT, table

POSITIONS = ROOT / "configs" / "position"


def inside(script: str, *overrides: object, cwd: Path) -> Result:
    """A script called in this process, which saves seconds for each command line that is refused at
    once."""
    main = importlib.import_module(script).main
    argv = sys.argv
    here = os.getcwd()
    out = io.StringIO()
    err = io.StringIO()
    sys.argv = [f"{script.rpartition('.')[2]}.py", *map(str, overrides)]
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_main(main)
    except SystemExit as end:
        return Result(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = argv
        os.chdir(here)
    raise AssertionError("run_main returned")


def refused(name: str, line: str, names: list[str]) -> Fault:
    """A command line that must be refused."""

    def run(folder: Path, settings: list[str]) -> Result:
        for file in ("file", "configs/tiny.yaml", "runs/quick/manifest.json"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("")
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        text = line.replace("POSITIONS", str(POSITIONS)).replace("TINY", shlex.join(settings))
        script, *words = shlex.split(text)
        return inside(script, *words, cwd=folder)

    return Fault(name, run, names=tuple(names))


def prepare_words_around_an_option(folder: Path, overrides: list[str]) -> Result:
    done = inside("scripts.prepare", *overrides[:-1], "--workers", "1", overrides[-1], cwd=folder)
    assert Path(done.out.splitlines()[-1]).is_dir()
    return done


def unusable(place: str) -> Fault:
    """A run directory that cannot be made."""
    line = shlex.join(["train", "TINY", "--run-dir", place])
    return refused(f"run directory {place[:9]!r}", line, ["--run-dir=", repr(place)[1:-1]])


def misspelt(folder: Path, overrides: list[str]) -> Result:
    return call("train.py", *overrides, "training.token=5", cwd=folder)


LINES = table("faults/command_lines.yaml")
FAULTS = [
    Fault("unknown setting", misspelt, names=("training.token", "training.tokens")),
    Fault("settings after an option", prepare_words_around_an_option, status=0),
    *(refused(*line) for line in LINES),
    *map(unusable, ("file", "file/x", "dangling", "loop", "loop/x", "a\nb", "x" * 500)),
]
