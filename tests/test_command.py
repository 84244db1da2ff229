"""The command `sextant` runs the scripts, and is declared for an editable install."""

import json
import subprocess
import sys
import tomllib
from unittest.mock import Mock

import pytest

import sextant
from tests.files import ROOT


def test_the_commands_are_listed(call, capsys):
    for arguments in ((), ("--help",)):
        call(sextant.main, *arguments)
        listed = capsys.readouterr().out
        assert all(f"  {name}" in listed for name in sextant.SCRIPTS)
    assert all((ROOT / script).is_file() for script, _ in sextant.SCRIPTS.values())


def test_an_unknown_command_names_the_nearest(call):
    with pytest.raises(SystemExit, match=r"trian.*train\?"):
        call(sextant.main, "trian")


def test_a_command_starts_its_script(call, monkeypatch):
    started = Mock()
    monkeypatch.setattr("os.execv", started)
    call(sextant.main, "runs", "folder")
    script = str(ROOT / "scripts/runs.py")
    started.assert_called_once_with(sys.executable, [sys.executable, script, "folder"])


def test_an_installed_wheel_refuses_to_run(monkeypatch, tmp_path, call):
    monkeypatch.setattr(sextant, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="pip install -e"):
        call(sextant.main, "train")
    for function in (sextant.train, sextant.load, sextant.evaluate, sextant.generate):
        with pytest.raises(ImportError, match="pip install -e"):
            function("runs/x")


def test_command_is_declared_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"sextant": "sextant:main"}
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
    assert {name.removesuffix("*") for name in packages} == folders


# Runs commands in one process; prints the slow packages that are imported, and statuses and errors.
COMMANDS = """
import contextlib, io, json, runpy, sys
import sextant

slow, *commands = json.loads(sys.argv[1])
assert not {"torch", "numpy", *slow} & set(sys.modules), "by sextant"
ended = []
for command in commands:
    sys.argv = command.split()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            ended.append((end.code, errors.getvalue()))
assert "torch" in sys.modules
print(json.dumps([sorted(set(slow) & set(sys.modules)), *ended]))
"""
# Dynamo takes as long to import as half of torch.
SLOW = ["torch._dynamo", "torch._inductor", "sympy", "triton", "matplotlib", "pandas", "scipy"]
SLOW += ["transformers", "datasets", "huggingface_hub", "tensorboard", "wandb"]


def test_help_and_errors_import_no_slow_package(tmp_path):
    commands = {
        "train.py training.token=5": (2, "training.tokens"),
        "evaluate.py --help": (0, ""),
        "generate.py --help": (0, ""),
        "study.py --help": (0, ""),
        "train.py --help rope": (0, ""),
        f"scripts/runs.py {tmp_path}": (2, str(tmp_path)),
    }
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([SLOW, *commands])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    imported, *found = json.loads(ended.stdout)
    assert imported == []
    for (status, error), (expected, part) in zip(found, commands.values(), strict=True):
        assert status == expected
        assert part in error
