"""Processes of a test that share something: forks of this one, whose imports are paid for once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def together(world: int, work: Callable[[], Any], seconds: float = 240) -> list[Any]:
    """`work()` in `world` forked processes that know of each other as a launcher's would; what it gives, or
    the exception that it raises, by rank."""
    context = multiprocessing.get_context("fork")
    answers, port = context.Queue(), free_port()

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
    found, end = {}, time.monotonic() + seconds
    while len(found) < world:
        try:
            rank, answer = answers.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            for process in processes:
                process.kill()
            raise AssertionError(f"only ranks {sorted(found)} answered") from None
        found[rank] = answer
    for process in processes:
        process.join()
    return [found[rank] for rank in range(world)]
