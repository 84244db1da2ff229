"""A study that is killed, stopped or run concurrently gives the same results."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data.files import locked
from run_directory.checkpoints import steps_of
from run_directory.console import Console
from run_directory.run import HOLDER
from run_directory.run_settings import RunSettings
from studies import cell_pool
from studies.cell_pool import CellPool, add_time, errors_of, read_times, threads_of
from studies.planned_cells import PlannedCell
from tests.files import results_of
from tests.processes import wait_until
from tests.studies.forks import FORK, call, fork, start
from tests.studies.test_study import lasting
from tests.training.tiny import logged_steps

TOKENS = 7680  # 40 steps, a checkpoint every 3
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


def test_a_killed_study_resumes_to_the_same_results(whole, write_study, monkeypatch, tmp_path):
    folder = tmp_path / "study"
    arguments = [write_study(tokens=TOKENS), "--only", CELL, "--run-dir", folder]
    process = start(tmp_path / "log", *arguments)
    wait_until(lambda: written(folder) >= 0.1 * written(whole))
    process.send_signal(signal.SIGKILL)
    assert process.wait(600) == -signal.SIGKILL
    assert not (folder / "results.json").exists()
    check_resumed(monkeypatch, arguments, whole)


def test_a_killed_cell_and_an_interrupted_one_resume(whole, write_study, monkeypatch, tmp_path):
    """The killed cell does not stop the other, which saves a checkpoint when it is interrupted."""
    folder = tmp_path / "study"
    arguments = [write_study(tokens=TOKENS), "--run-dir", folder, "--only"]
    process = fork(tmp_path / "log", *arguments, "scheme=rope*")
    wait_until(lambda: logged_steps(folder / "runs" / CELL) > 0)
    _, worker, *_ = (folder / "runs" / CELL / HOLDER).read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    other = folder / "runs" / "scheme=rope,seed=1"
    wait_until(lambda: logged_steps(other) > 0)
    os.kill(process.pid, signal.SIGINT)
    process.join(600)
    assert process.exitcode == 128 + signal.SIGINT
    cells = results_of(folder)["cells"]
    assert [cell["status"] for cell in cells[:2]] == ["failed", "pending"]
    assert "ended by SIGKILL" in cells[0]["error"]
    assert steps_of(other)[-1] == logged_steps(other)
    check_resumed(monkeypatch, [*arguments, CELL], whole)


def check_resumed(monkeypatch, arguments: list, whole: Path) -> None:
    """The rest of a study gives the results of one that was not interrupted."""
    folder = arguments[arguments.index("--run-dir") + 1]
    assert call(monkeypatch, *arguments) == 0
    results = results_of(folder)
    assert lasting(results) == lasting(results_of(whole))
    assert results["cells"][0]["timing"]["attempts"] > 1


def deaf(cell: PlannedCell, folder: Path, jobs: int, device: str | None) -> None:
    """A worker that ignores the first signal."""
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: (folder / "asked").write_text(""))
    (folder / "deaf").write_text("")
    for _ in range(600):
        time.sleep(0.1)


def unready(cell: PlannedCell, folder: Path, jobs: int, device: str | None) -> None:
    """A worker that was just forked: it does not lead its group and ignores signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / "unready").write_text("")
    time.sleep(60)
    (folder / "ended").write_text("")


def broken(cell: PlannedCell, folder: Path, jobs: int, device: str | None) -> None:
    """A worker that fails before its first command."""
    raise MemoryError


def run_worker(worker: Callable, folder: Path) -> None:
    """A study of one cell with another main function of its worker."""
    cell = PlannedCell({"scheme": "a"}, (), RunSettings(), folder)
    cell_pool.work = worker
    cell_pool.start_server = lambda: FORK
    pool = CellPool(folder, {"scheme=a": 1.0}, set(), 1, Console())
    pool.run([cell], None)
    sys.exit(pool.report(""))


def test_a_second_signal_kills_workers(tmp_path):
    process = FORK.Process(target=run_worker, args=(deaf, tmp_path))
    process.start()
    for name in ("deaf", "asked"):
        wait_until((tmp_path / name).exists)
        os.kill(process.pid, signal.SIGINT)
    process.join(600)
    assert process.exitcode == 128 + signal.SIGINT


def test_the_first_signal_ends_workers_that_have_not_begun(tmp_path):
    process = FORK.Process(target=run_worker, args=(unready, tmp_path))
    process.start()
    wait_until((tmp_path / "unready").exists)
    os.kill(process.pid, signal.SIGINT)
    process.join(600)
    assert process.exitcode == 128 + signal.SIGINT
    assert not (tmp_path / "ended").exists()


def test_a_worker_that_fails_before_its_first_command_is_reported(tmp_path):
    process = FORK.Process(target=run_worker, args=(broken, tmp_path))
    process.start()
    process.join(600)
    assert process.exitcode == 1
    assert "training: ended with status 1" in errors_of(read_times(tmp_path))["scheme=a"]


def test_workers_share_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert [threads_of(jobs) for jobs in (3, 16)] == [2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_of(3) == 5


def test_errors_of_a_cell_are_those_of_the_last_runs_of_its_commands(tmp_path):
    for line in [("a", "x", "1"), ("b", "y", "2"), ("a", "x", ""), ("b", "z", "3"), ("c", "x", "")]:
        add_time(tmp_path, *line)
    assert errors_of(read_times(tmp_path)) == {"b": "2; 3"}


def test_cells_that_do_not_fit_into_the_time_are_left(
    whole, write_study, tmp_path, monkeypatch, capsys
):
    """By the rate of the cells that are done."""
    folder = tmp_path / "study"
    shutil.copytree(whole, folder)
    (folder / "times.jsonl").unlink()
    add_time(folder, CELL, "training", "", wall=7200, cpu=1)
    words = [write_study(tokens=TOKENS), "--run-dir", folder, "--hours", 1]
    assert call(monkeypatch, *words) == 0
    assert "1 done, 3 left for later" in capsys.readouterr().err
    states = [cell["status"] for cell in results_of(folder)["cells"]]
    assert states == ["done"] + 3 * ["pending"]


def test_a_cell_that_another_process_works_on_is_tried_again(write_study, tmp_path, monkeypatch):
    folder = tmp_path / "study"
    other = "scheme=rope,seed=1"
    (folder / "runs").mkdir(parents=True)
    is_done = folder / "runs" / other / "evaluation" / "held-out" / "results.json"

    def work_elsewhere() -> None:
        with locked(folder / "runs" / f"{CELL}.lock"):
            has_begun.set()
            wait_until(is_done.exists)

    has_begun = threading.Event()
    elsewhere = threading.Thread(target=work_elsewhere)
    elsewhere.start()
    has_begun.wait()
    assert call(monkeypatch, write_study(), "--run-dir", folder, "--only", "scheme=rope*") == 0
    elsewhere.join()
    assert [cell["status"] for cell in results_of(folder)["cells"]] == ["done"] * 2 + [
        "pending"
    ] * 2
