"""A study that is killed, stopped or run concurrently gives the same results."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from errors import StudyError
from studies.running.commands import CommandRunner, last_error
from studies.running.runner import lock_study
from tests.studies.conftest import ROOT, command, environment
from tests.studies.forks import call, forked, run, wait_until
from tests.studies.test_study import lasting, results

TOKENS = 3840  # 20 steps, a checkpoint every 3
CELL = "scheme=rope,seed=0"


def written(folder: Path) -> int:
    """Bytes that the trainings and evaluations of a study have left so far."""
    files = [*folder.glob("runs/*/metrics.jsonl"), *folder.glob("runs/*/evaluation/cells/*")]
    return sum(file.stat().st_size for file in files if file.exists())


@pytest.fixture
def forked_commands(monkeypatch) -> None:
    """The commands of a study are forks of it, also where the study itself is one."""
    monkeypatch.setattr(CommandRunner, "run", run)


@pytest.fixture(scope="module")
def whole(write_study, tmp_path_factory) -> Path:
    """A study of one cell that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert (
            call(monkeypatch, write_study(tokens=TOKENS), "--only", CELL, "--run-dir", folder) == 0
        )
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_study_resumes_to_the_same_results(
    whole, forked_commands, write_study, monkeypatch, tmp_path, number
):
    """SIGINT is the terminal's Ctrl-C: to the study, and to the commands that it forked."""
    arguments = [write_study(tokens=TOKENS), "--only", CELL, "--run-dir", tmp_path / "study"]
    expected = 0.15 * written(whole)
    (tmp_path / "log").touch()
    argv = [*map(str, command(*arguments)[1:])]
    child = forked(argv, tmp_path / "log", group=True)
    wait_until(lambda: written(tmp_path / "study") >= expected)
    os.killpg(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL and not (tmp_path / "study" / "results.json").exists()
    else:
        assert status == 128 + signal.SIGINT
        assert results(tmp_path / "study")["cells"][0]["status"] == "pending"
    assert call(monkeypatch, *arguments) == 0
    assert lasting(results(tmp_path / "study")) == lasting(results(whole))
    assert results(tmp_path / "study")["cells"][0]["timing"]["attempts"] > 1


def processes_of(mark: Path) -> list[str]:
    """Command lines that name a file."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if str(mark) in line]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl exists on Linux only")
def test_commands_exit_with_the_study(tmp_path):
    mark = tmp_path / "mark"
    sleep = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"
    code = (
        "import os, pathlib, sys; from studies.running.commands import CommandRunner; "
        f"CommandRunner().run(['-c', {sleep!r}, *sys.argv[1:]], pathlib.Path(sys.argv[1] + "
        "'.log'), dict(os.environ))"
    )
    line = [sys.executable, "-c", code, str(mark)]
    with subprocess.Popen(line, cwd=ROOT, env=environment()) as process:
        wait_until(mark.exists)
        assert len(processes_of(mark)) == 2
        process.kill()
    wait_until(lambda: not processes_of(mark), seconds=30)


def test_stop_sends_sigint_and_kill_sends_sigkill(tmp_path):
    commands = CommandRunner()
    mark = tmp_path / "mark"
    log = tmp_path / "log"
    deaf = (
        "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: print('asked', "
        "flush=True)); open(sys.argv[1], 'w').close(); time.sleep(60); time.sleep(60)"
    )
    status = []
    thread = threading.Thread(
        target=lambda: status.append(commands.run(["-c", deaf, str(mark)], log, environment()))
    )
    thread.start()
    wait_until(mark.exists)
    commands.stop()
    wait_until(lambda: "asked" in log.read_text())
    assert thread.is_alive() and commands.run(["-c", "print(1)"], log, environment()) is None
    commands.stop(kill=True)
    thread.join(timeout=30)
    assert status == [-signal.SIGKILL]


def test_a_study_directory_is_locked(tmp_path):
    with lock_study(tmp_path), pytest.raises(StudyError, match="in use"), lock_study(tmp_path):
        pass
    task, other = (lock_study(tmp_path, shared=True) for _ in range(2))  # of an array
    with task, other, pytest.raises(StudyError, match="in use"), lock_study(tmp_path):
        pass
    with lock_study(tmp_path):
        pass


def test_the_error_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * (1 << 20) + b"\nerror: no room\nbye\n")
    assert last_error(log) == "no room"
    log.write_text("Traceback\nKeyError: 3\n\n")
    assert last_error(log) == last_error(log, 2) == "KeyError: 3"
    # A killed process prints no error, and the log of an earlier call is not the reason.
    assert last_error(log, -9).startswith("ended by SIGKILL")
