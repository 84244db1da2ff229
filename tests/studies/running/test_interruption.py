"""A study that is killed, stopped or run concurrently gives the same results."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from studies.running.cell_work import CellWork
from studies.running.children import start_child, value_of
from tests.files import results_of
from tests.processes import wait_until
from tests.studies.forks import call, exit_status, fork_call
from tests.studies.test_study import lasting

TOKENS = 3840  # 20 steps, a checkpoint every 3
CELL = "scheme=rope,seed=0"


def written(folder: Path) -> int:
    """Bytes that the trainings and evaluations of a study have left so far."""
    files = [*folder.glob("runs/*/metrics.jsonl"), *folder.glob("runs/*/evaluation/cells/*")]
    return sum(file.stat().st_size for file in files if file.exists())


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
    whole, write_study, monkeypatch, tmp_path, number
):
    arguments = [write_study(tokens=TOKENS), "--only", CELL, "--run-dir", tmp_path / "study"]
    expected = 0.15 * written(whole)
    child = fork_call(tmp_path / "log", *arguments)
    wait_until(lambda: written(tmp_path / "study") >= expected)
    os.kill(child, number)
    status = exit_status(child)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        assert not (tmp_path / "study" / "results.json").exists()
    else:
        assert status == 128 + signal.SIGINT
        assert results_of(tmp_path / "study")["cells"][0]["status"] == "pending"
    assert call(monkeypatch, *arguments) == 0
    assert lasting(results_of(tmp_path / "study")) == lasting(results_of(whole))
    assert results_of(tmp_path / "study")["cells"][0]["timing"]["attempts"] > 1


def fail(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("work", "status", "output"),
    [
        (lambda: print("hello") or 3, 3, "hello"),
        (lambda: fail(KeyError("gone")), 1, "KeyError"),
        (lambda: fail(KeyboardInterrupt()), 130, ""),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, ""),
    ],
)
def test_a_child_has_its_own_log_and_status(tmp_path, work, status, output):
    log = tmp_path / "logs" / "a.log"
    assert exit_status(start_child(work, log)) == status
    assert output in log.read_text()


def test_a_child_returns_a_value():
    assert value_of(lambda: {"a": 1.5}) == {"a": 1.5}
    with pytest.raises(RuntimeError):
        value_of(lambda: fail(KeyError("gone")))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl exists on Linux only")
def test_children_end_with_the_study(tmp_path):
    mark = tmp_path / "pid"

    def sleep() -> int:
        mark.write_text(f"{os.getpid()}")
        time.sleep(60)
        return 0

    def study() -> int:
        start_child(sleep, tmp_path / "inner.log")
        time.sleep(60)
        return 0

    child = start_child(study, tmp_path / "log")
    wait_until(lambda: mark.exists() and mark.read_text())
    os.kill(child, signal.SIGKILL)
    exit_status(child)
    wait_until(lambda: _is_gone(int(mark.read_text())), seconds=30)


def _is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_second_signal_kills_cells(write_study, tmp_path, monkeypatch):
    """A cell that ignores the first one."""

    def deaf(work: CellWork) -> int:
        signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
        print("deaf", flush=True)
        for _ in range(600):
            time.sleep(0.1)
        return 0

    monkeypatch.setattr(CellWork, "run", deaf)
    folder = tmp_path / "study"
    log = folder / "logs" / f"{CELL}.log"
    child = fork_call(tmp_path / "log", write_study(), "--only", CELL, "--run-dir", folder)
    for word in ("deaf", "asked"):
        wait_until(lambda word=word: log.exists() and word in log.read_text())
        os.kill(child, signal.SIGINT)
    assert exit_status(child) == 128 + signal.SIGINT


def test_a_cell_that_crashes_is_named(write_study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CellWork, "run", lambda work: os.kill(os.getpid(), signal.SIGKILL))
    words = [write_study(), "--only", CELL, "--run-dir", tmp_path]
    assert call(monkeypatch, *words) == 1
    assert f"{CELL} failed: ended by SIGKILL" in capsys.readouterr().err
    assert results_of(tmp_path)["cells"][0]["status"] == "failed"


def test_cells_that_do_not_fit_into_the_time_are_left(write_study, tmp_path, monkeypatch, capsys):
    words = [write_study(), "--run-dir", tmp_path, "--hours", 1e-5]
    assert call(monkeypatch, *words) == 0
    assert "4 left for later" in capsys.readouterr().err
    assert {cell["status"] for cell in results_of(tmp_path)["cells"]} == {"pending"}


def test_processes_divide_the_cells_of_a_study(write_study, tmp_path):
    folder = tmp_path / "study"
    arguments = [write_study(), "--run-dir", folder]
    children = [fork_call(tmp_path / f"log{i}", *arguments) for i in range(2)]
    assert [exit_status(child) for child in children] == [0, 0]
    cells = results_of(folder)["cells"]
    assert [cell["status"] for cell in cells] == ["done"] * 4
    assert [cell["timing"]["attempts"] for cell in cells] == [1] * 4
