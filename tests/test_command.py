"""The command `sextant` runs the scripts, and is declared for an editable install."""

import os
import subprocess
import sys
import tomllib

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


def test_a_command_starts_its_script(tmp_path):
    command = [sys.executable, "sextant.py", "runs", str(tmp_path)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 2
    assert str(tmp_path) in ended.stderr


def test_an_installed_wheel_refuses_to_run(monkeypatch, tmp_path, call):
    monkeypatch.setattr(sextant, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="pip install -e"):
        call(sextant.main, "train")
    for function in (sextant.train, sextant.load, sextant.evaluate, sextant.generate):
        with pytest.raises(ImportError, match="pip install -e"):
            function("runs/x")


def test_importing_it_imports_no_torch():
    code = "import sys, sextant; assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def test_models_import_no_compiler():
    """It takes as long to import as half of torch."""
    code = "import sys, train; assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def test_command_is_declared_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"sextant": "sextant:main"}
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
    assert {name.removesuffix("*") for name in packages} == folders


def cpu_seconds(*command: str) -> tuple[float, int]:
    """CPU seconds and exit status of a command."""
    before = os.times()
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, timeout=600)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system, ended.returncode


@pytest.fixture(scope="module")
def limit() -> float:
    """4 seconds, more on a machine whose cores are shared: three times the import of torch."""
    # The first process of a new clone compiles all files to bytecode.
    cpu_seconds("study.py", "--help")
    return max(4, 3 * cpu_seconds("-c", "import torch")[0])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("train.py training.token=5", 2),
        ("evaluate.py --help", 0),
        ("generate.py --help", 0),
        ("study.py --help", 0),
        ("sextant.py train --help rope", 0),
    ],
)
def test_help_and_typos_take_under_four_seconds_of_cpu(arguments, status, limit):
    seconds, ended = cpu_seconds(*arguments.split())
    assert ended == status
    assert seconds < limit
