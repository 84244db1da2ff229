"""Forked children of a study: they have its modules, so nothing is imported again.

Fork from the main thread of a process that has no other thread, has run no parallel operation and
has not touched a GPU: neither OpenMP's threads nor a CUDA context exists in a child.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

STOPPED = (signal.SIGINT, signal.SIGTERM)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def prepare_parent(options: Namespace) -> None:
    """Keep this process fit to fork: one thread, and GPUs counted without a CUDA context. Sets the
    default of `options.jobs`: one per GPU, or one."""
    torch.set_num_threads(1)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    options.jobs = options.jobs or max(1, len(gpus()))


def gpus() -> list[str]:
    """The available GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(i) for i in range(torch.cuda.device_count())]


def start_child(work: Callable[[], int], log: Path) -> int:
    """Run `work` in a child that appends its output to `log` and exits with the status it returns.
    The id of the child.

    The child is in a session of its own: Ctrl-C reaches only the study, which passes it on. On
    Linux it is killed when the study dies, even by kill -9; otherwise two processes could train the
    same run. Elsewhere it continues and keeps its run directory locked.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # a signal between the fork and the child's own handlers waits for these
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED)
    try:
        child = os.fork()
        if not child:
            _run(work, log, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)
    return child


def _run(work: Callable[[], int], log: Path, parent: int) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(status)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout = _stream(1)
        sys.stderr = _stream(2)
        torch.seed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)
        status = work()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _stream(number: int) -> TextIO:
    return open(
        number,
        "w",
        buffering=1,
        encoding="utf-8",
        errors="backslashreplace",
        closefd=False,
    )


def value_of(work: Callable[[], Any]) -> Any:
    """What `work` returns in a child, as JSON. Raises RuntimeError if the child fails."""
    read, write = os.pipe()

    def report() -> int:
        with os.fdopen(write, "w") as end:
            json.dump(work(), end)
        return 0

    child = start_child(report, Path(os.devnull))
    os.close(write)
    with os.fdopen(read) as end:
        text = end.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a child of the study ended without a result")
    return json.loads(text)


def set_threads(jobs: int) -> None:
    """Give this child its share of the CPU cores, or what OMP_NUM_THREADS says."""
    share = max(1, (os.cpu_count() or 1) // jobs)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
