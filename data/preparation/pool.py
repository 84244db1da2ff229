"""Run chunks in several processes. The output does not depend on the number of processes."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.preparation.encoding import EncodingJob

HOUSE = Path(__file__).resolve().parents[2]


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_chunks(folder: Path, tasks: list[tuple[str, int]], workers: int | None, console: Any) -> None:
    """Tokenize the chunks `tasks` = [(spool, number)], in this process if one worker is enough."""
    workers = min(workers or available_cores(), len(tasks))
    with console.bar("tokenising", len(tasks), unit="shards") as bar:
        if workers <= 1:
            job = EncodingJob(folder)
            for spool, number in tasks:
                job.run(spool, number)
                bar.advance()
        else:
            _run_parallel(folder, tasks, workers, bar)


def _run_parallel(folder: Path, tasks: list[tuple[str, int]], workers: int, bar: Any) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HOUSE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "data.preparation.worker", str(folder.resolve())]
    answers: queue.SimpleQueue[tuple[subprocess.Popen, str]] = queue.SimpleQueue()
    waiting = deque(tasks)
    processes = []
    try:
        for _ in range(workers):
            # A worker exits when its standard input closes, even if this process is killed. Each worker has
            # its own session, so that signals reach only this process, which decides how to handle them.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=HOUSE,
                start_new_session=True,
            )
            processes.append(process)
            threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
            _send(process, waiting)
        for _ in range(len(tasks)):
            process, line = answers.get()
            if not line:
                raise RuntimeError(
                    f"a tokenising worker ended with code {process.wait()}; its message is above"
                )
            answer = json.loads(line)
            if answer.get("kind") == "data":
                raise DataError(answer["error"])
            if answer.get("kind") == "os":
                raise OSError(answer["errno"], answer["error"])
            bar.advance()
            _send(process, waiting)
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait()
            process.stdout.close()


def _send(process: subprocess.Popen, waiting: deque[tuple[str, int]]) -> None:
    if waiting:
        spool, number = waiting.popleft()
        assert process.stdin is not None
        process.stdin.write(f"{spool} {number}\n")
        process.stdin.flush()


def _listen(process: subprocess.Popen, answers: queue.SimpleQueue) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put((process, line))
    answers.put((process, ""))
