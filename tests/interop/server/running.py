"""A server in a thread of this process."""

import contextlib
import threading
import time

from interop.server.serving import Limits, ServedRun, bind, make_server


@contextlib.contextmanager
def serving(loaded, limits=None, max_length=2048):
    """(address, engine) of a running server."""
    server = make_server(ServedRun(loaded, max_length=max_length), limits or Limits(rows=8))
    with bind(0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server.engine
        finally:
            server.should_exit = True
            thread.join()
