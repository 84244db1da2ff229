"""A child process that exits with this process, to prepare groups of text.

Forks are unsafe with threads, and the spawn method of `multiprocessing` would import the calling script
again, so the child is a separate interpreter. It exits when its standard input closes, even in the middle of
a file: files are written atomically.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 0.3  # seconds between the interrupt and the forced exit


def start_child(module: str, folder: Path, request: str) -> subprocess.Popen:
    """Run `main()` of a module with `folder` as its argument and `request` as the first line of its input.

    The child has its own session, so that Ctrl-C reaches only this process.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", f"import {module} as module; module.main()", str(folder)],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has died; the caller sees its exit code
        child.stdin.write(request + "\n")
        child.stdin.flush()
    return child


def stop_child(child: subprocess.Popen) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    child.wait()


def stdin_lines() -> SimpleQueue[str]:
    """In the child: a queue with the lines of standard input.

    When standard input closes, because the parent process has ended, the main thread gets a KeyboardInterrupt
    to remove incomplete files. If a library call blocks the interrupt, the process exits shortly after.
    """
    lines: SimpleQueue[str] = SimpleQueue()
    main = threading.main_thread()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    return lines
