"""Invalid command lines."""

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path

from settings.script import run_main
from tests.faults.fault import Fault, Result, call
from tests.training.conftest import ROOT

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


def refused(
    name: str, script: str, *overrides: str, names: tuple[str, ...], tiny: bool = False
) -> Fault:
    """A command line that must be refused; `tiny`: with the overrides of a tiny run before them."""

    def run(folder: Path, settings: list[str]) -> Result:
        for name in ("file", "configs/tiny.yaml", "runs/quick/manifest.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
        for name in ("dangling", "loop"):
            (folder / name).symlink_to("nowhere" if name == "dangling" else name)
        return inside(script, *(settings if tiny else ()), *overrides, cwd=folder)

    return Fault(name, run, names=names)


def prepare_words_around_an_option(folder: Path, overrides: list[str]) -> Result:
    done = inside("scripts.prepare", *overrides[:-1], "--workers", "1", overrides[-1], cwd=folder)
    assert Path(done.out.splitlines()[-1]).is_dir()
    return done


TYPED = {  # what people type, and what the message names
    "an option cut short": ("generate", "run", "--temp", "0.5", "--temperature"),
    "a setting as an option": ("train", "--lr", "1e-3", "training.optimizer.lr=VALUE"),
    "another codebase's option": ("train", "--learning-rate", "1e-3", "training.optimizer.lr="),
    "a configuration by its name": ("train", "tiny", "did you mean configs/tiny.yaml?"),
    "a list with spaces": ("evaluate", "run", "lengths=[256,", "1024]", "'lengths=[256, 1024]'"),
    "a prompt without its option": ("generate", "run", "def f(", "--prompt 'def f('"),
    "a run by its name": ("generate", "quick", "--prompt", "a", "did you mean runs/quick?"),
    "bytes with a unit": (
        "train",
        "data.source={name: files, max_document_bytes: 5MB}",
        "write 5M",
    ),
}

FAULTS = [
    Fault(
        "unknown setting",
        lambda folder, overrides: call("train.py", *overrides, "training.token=5", cwd=folder),
        names=("training.token", "training.tokens"),
    ),
    refused(
        "dashes before a setting",
        "train",
        "--training.tokens=10",
        names=("without dashes: training.tokens=10",),
    ),
    refused("unknown option", "train", "--resume", names=("--resume", "train.py --help")),
    refused("steps in place of tokens", "train", "training.steps=5", names=("training.tokens",)),
    refused(
        "a scheme's other name",
        "train",
        "model.position.name=rotary",
        names=("did you mean rope?",),
    ),
    refused("a scheme's other file", "train", str(POSITIONS / "nope.yaml"), names=("none.yaml?",)),
    *(
        refused(
            f"run directory {place[:9]!r}",
            "train",
            "--run-dir",
            place,
            names=("--run-dir=", repr(place)[1:-1]),
            tiny=True,
        )
        for place in ("file", "file/x", "dangling", "loop", "loop/x", "a\nb", "x" * 500)
    ),
    *(
        refused(name, script, *words, names=(expected,))
        for name, (script, *words, expected) in TYPED.items()
    ),
    refused("generate without a run", "generate", names=("RUN",)),
    *(
        refused(
            f"generate on {device}",
            "generate",
            "run",
            "--device",
            device,
            names=(device, "auto, cpu"),
        )
        for device in ("gpu", "cuda:99", "meta")
    ),
    *(
        refused(
            f"{overrides[0]} without a device",
            "evaluate",
            "run",
            *overrides,
            names=("cuda:99", "auto, cpu"),
        )
        for overrides in (
            ("seed=1", "device=cuda:99"),
            ("protocol=tasks", "device=cuda:99"),
            ("protocol=attention", "device=cuda:99"),
            ("protocol=generation", "device=cuda:99"),
        )
    ),
    refused("evaluate without a run", "evaluate", "lengths=[256]", names=("RUN", "lengths=[256]")),
    refused("evaluate no such run", "evaluate", "runs/none", "seed=1", names=("runs/none",)),
    refused("half a token", "evaluate", "run", "lengths=[256.5]", names=("256.5", "whole number")),
    refused("a word for an option", "scripts.prepare", "--workers", "x", names=("--workers",)),
    Fault("settings after an option", prepare_words_around_an_option, status=0),
]
