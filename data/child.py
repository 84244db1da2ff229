"""What processes that this package starts have in common: they end with whoever started them."""

import os
import signal
import sys
import threading
import time
from queue import SimpleQueue

PATIENCE = 0.3  # seconds


def lines_of_starter() -> "SimpleQueue[str]":
    """The lines that come on standard input.

    When that closes the main thread gets a KeyboardInterrupt, so that it takes away what it has half written;
    where it is in a library and does not hear it, the process just ends.
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
