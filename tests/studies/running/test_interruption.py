"""A study that is killed, stopped or run concurrently gives the same results."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from errors import StudyError
from studies.running.commands import KEPT_BYTES, CommandRunner, last_error, truncate_log
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


def test_a_killed_study_resumes_to_the_same_results(
    whole, forked_commands, write_study, monkeypatch, tmp_path
):
    file = write_study(tokens=TOKENS)
    folder = tmp_path / "killed"
    arguments = [file, "--only", CELL]
    expected = 0.15 * written(whole)
    (tmp_path / "log").touch()
    argv = [str(ROOT / "study.py"), *map(str, arguments), "--run-dir", str(folder)]
    # its commands are forks of it, and in its group
    child = forked(argv, tmp_path / "log", group=True)
    wait_until(lambda: written(folder) >= expected)
    os.killpg(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (folder / "results.json").exists() or results(folder)["cells"][0]["status"] != "done"
    assert call(monkeypatch, *arguments, "--run-dir", folder) == 0
    assert lasting(results(folder)) == lasting(results(whole))
    attempts = [
        cell["timing"]["attempts"] for cell in results(folder)["cells"] if cell["status"] == "done"
    ]
    assert len(attempts) == 1 and sum(attempts) > 1  # the training was killed


@pytest.mark.slow
def test_a_study_killed_ten_times_resumes_to_the_same_results(write_study, tmp_path):
    """Whole processes, SIGKILL for the group of the study; its commands, each in a session of its own, die
    with it."""
    file = write_study(tokens=6 * TOKENS)
    whole = tmp_path / "whole"
    folder = tmp_path / "killed"

    def start(place: Path) -> subprocess.Popen:
        line = command(file, "--run-dir", place, "--jobs", "2")
        return subprocess.Popen(
            line,
            env=environment(),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start(whole).wait() == 0
    total = written(whole)
    rng = random.Random(11)
    kills = 0
    for _ in range(10):
        expected = written(folder) + total * rng.uniform(0.01, 0.12)
        with start(folder) as process:
            wait_until(
                lambda expected=expected, p=process: (
                    written(folder) >= expected or p.poll() is not None
                )
            )
            time.sleep(rng.uniform(0, 0.5))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
        assert not commands_of(folder)
    assert kills >= 5
    with start(folder) as process:
        assert process.wait() == 0
    assert lasting(results(folder)) == lasting(results(whole))
    # trainings were hit too
    assert sum(cell["timing"]["attempts"] for cell in results(folder)["cells"]) > 4


def commands_of(folder: Path) -> list[str]:
    """Processes that still work on a study after a moment."""
    deadline = time.monotonic() + 30
    while True:
        lines = [line for line in listed() if str(folder) in line]
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.05)


def listed() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


HELD = (
    "import sys, time; print('begun', flush=True); open(sys.argv[1], 'w').close(); time.sleep(60)"
)


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel ties a command to its parent on Linux only"
)
def test_commands_exit_with_the_study(tmp_path):
    code = (
        "import os, pathlib, sys; from studies.running.commands import CommandRunner; "
        f"CommandRunner().run(['-c', {HELD!r}, sys.argv[1]], pathlib.Path(sys.argv[2]), dict(os.environ))"
    )
    mark = tmp_path / "mark"
    line = [sys.executable, "-c", code, str(mark), str(tmp_path / "log")]
    with subprocess.Popen(line, cwd=ROOT, env=environment()) as process:
        wait_until(mark.exists)
        assert any(str(mark) in text and "CommandRunner" not in text for text in listed())
        process.kill()
    assert not commands_of(mark)


def test_stop_sends_sigint_and_kill_sends_sigkill(tmp_path):
    commands = CommandRunner()
    mark = tmp_path / "mark"
    log = tmp_path / "log"
    deaf = (
        "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True)); "
        "open(sys.argv[1], 'w').close(); time.sleep(60); time.sleep(60)"
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


def test_a_study_interrupted_by_a_signal_resumes_to_the_same_results(
    whole, forked_commands, write_study, monkeypatch, tmp_path
):
    file = write_study(tokens=TOKENS)
    folder = tmp_path / "stopped"
    arguments = [file, "--only", CELL]
    argv = [*map(str, command(*arguments, "--run-dir", folder)[1:])]
    child = forked(argv, tmp_path / "log", group=True)
    wait_until(lambda: written(folder) > 0)
    os.killpg(
        child, signal.SIGINT
    )  # the terminal's Ctrl-C: to the study, and to the commands which it forked
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGINT
    message = (tmp_path / "log").read_text()
    assert "stopping" in message and "python study.py" in message
    assert results(folder)["cells"][0]["status"] == "pending"
    assert call(monkeypatch, *arguments, "--run-dir", folder) == 0
    assert lasting(results(folder)) == lasting(results(whole))


def test_a_study_directory_is_locked(tmp_path):
    with lock_study(tmp_path), pytest.raises(StudyError, match="in use"), lock_study(tmp_path):
        pass
    task, other = (lock_study(tmp_path, shared=True) for _ in range(2))  # of an array
    with task, other, pytest.raises(StudyError, match="in use"), lock_study(tmp_path):
        pass
    with lock_study(tmp_path):
        pass


def test_logs_are_truncated_and_contain_the_error(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 3 * KEPT_BYTES + b"\nerror: no room\nbye\n")
    truncate_log(log)
    text = log.read_text()
    assert len(text) < KEPT_BYTES + 100 and text.startswith("first\n") and text.endswith("bye\n")
    assert "bytes removed" in text
    assert last_error(log) == "no room"
    log.write_text("Traceback\nKeyError: 3\n\n")
    assert last_error(log) == "KeyError: 3"
    # A killed process prints no error, and the log of an earlier call is not the reason.
    assert last_error(log, -9).startswith("ended by SIGKILL")
    assert last_error(log, 2) == "KeyError: 3"
