"""A tokenizing process: `python -m data.preparation.worker FOLDER`.

It reads chunk names from standard input and writes one line of JSON for each. Forks are unsafe with threads,
and the spawn method of `multiprocessing` would import the calling script again, so workers are separate
interpreters. They exit when standard input closes, even within a chunk: chunks are written atomically.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from data.errors import DataError
from data.preparation.encoding import EncodingJob

PATIENCE = 0.3  # seconds between the interrupt and the forced exit


def stdin_lines() -> SimpleQueue[str]:
    """A queue with the lines of standard input.

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


def main() -> None:
    lines = stdin_lines()
    job = EncodingJob(Path(sys.argv[1]))
    while True:
        line = lines.get()
        spool, number = line.split()
        try:
            job.run(spool, int(number))
            answer = {"done": line.strip()}
        except DataError as error:
            answer = {"error": str(error), "kind": "data"}
        except OSError as error:
            answer = {"error": f"{error.strerror} ({error.filename})", "kind": "os", "errno": error.errno}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # the parent process has ended
        main()
