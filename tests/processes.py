"""Processes of tests: forks of this process, and scripts run in forks that have already imported
them."""

import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.files import ROOT


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until(condition: Callable[[], object], seconds: float = 120) -> float:
    """Seconds until the condition holds; raises TimeoutError after too many."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError
        time.sleep(0.01)
    return time.monotonic() - begun


def computed_once(
    factory: pytest.TempPathFactory, name: str, work: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """A folder, and what `work(folder)` gives as JSON, which one of pytest's workers computes for
    all."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / name
    result = root / f"{name}.json"
    with FileLock(root / f"{name}.lock"):
        if not result.exists():
            folder.mkdir()
            result.write_text(json.dumps(work(folder)), encoding="utf-8")
        return folder, json.loads(result.read_text(encoding="utf-8"))


def together(world: int, work: Callable[[], Any], seconds: float = 240) -> list[Any]:
    """`work()` in `world` forked processes that know of each other as a launcher's would; what it
    gives, or the exception that it raises, by rank."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = free_port()

    def one(rank: int) -> None:
        here = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update({name: str(number) for name, number in here.items()} | where)
        try:
            answers.put((rank, work()))
        except BaseException as error:
            answers.put((rank, error))
        answers.close()
        answers.join_thread()
        os._exit(0)

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    found = {}
    end = time.monotonic() + seconds
    while len(found) < world:
        try:
            rank, answer = answers.get(timeout=1)
            found[rank] = answer
            continue
        except queue.Empty:
            gone = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
        if set(gone) <= found.keys() and time.monotonic() < end:
            continue
        for process in processes:
            process.kill()
        raise AssertionError(f"ranks {gone} ended; answers by rank: {found}")
    for process in processes:
        process.join()
    return [found[rank] for rank in range(world)]


@cache
def server():
    """Starts the process that has imported the scripts, once for all tests of this process."""
    context = multiprocessing.get_context("forkserver")
    # Optimizers import torch._dynamo when the first one is made.
    modules = ["train", "evaluate", "generate", "scripts.prepare", "tests.processes"]
    context.set_forkserver_preload([*modules, "torch._dynamo"])
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), paths]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if paths is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = paths
    return context


def afresh(function: Callable, *arguments: Any) -> Any:
    """What a function of a module gives in a process that has imported torch and run nothing."""
    with ProcessPoolExecutor(1, mp_context=server()) as pool:
        return pool.submit(function, *arguments).result()


class ScriptProcess:
    """A script of the repository in a process of its own that need not import torch again;
    otherwise as subprocess.Popen. `out`, `err`: files its streams are written to; None: the stream
    is closed."""

    def __init__(
        self,
        script: str,
        words: list[str],
        cwd: Path,
        out: Path | str | None,
        err: Path | str | None,
        environment: Mapping[str, str] = {},
    ):
        arguments = (script, words, str(cwd), out and str(out), err and str(err), dict(environment))
        self._process = server().Process(target=_run_script, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, seconds)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run_script(script, words, cwd, out, err, environment) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in ((1, out), (2, err)):
        if name is None:
            os.close(number)
        else:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (
        name
        and io.TextIOWrapper(
            io.FileIO(number, "w"), encoding, "backslashreplace", line_buffering=True
        )
        for number, name in ((1, out), (2, err))
    )  # None where the stream is closed, as at the start of Python
    sys.__stdout__ = sys.stdout
    sys.__stderr__ = sys.stderr
    sys.argv = [script, *words]
    runpy.run_path(str(ROOT / script), run_name="__main__")
