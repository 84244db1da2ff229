"""Runs the application under uvicorn on the loopback interface."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from errors import InteropError
from interop.server.app import Limits, make_app
from interop.server.engine import Engine
from interop.server.served_run import ServedRun
from run_directory.console import Console

HOST = "127.0.0.1"
SEND_BUFFER = 1 << 16  # bytes of a response that the system stores for a client that does not read
GRACE = 1  # seconds for open responses after Ctrl-C

__all__ = ["Limits", "ServedRun", "make_server", "serve"]


class Server(uvicorn.Server):
    """A server that ends its open responses at a signal, before it waits for their connections."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine.stop()
        super().handle_exit(sig, frame)


def make_server(served: ServedRun, limits: Limits) -> Server:
    """The server of a run, to be run with a list of sockets."""
    app = make_app(served, limits)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        timeout_keep_alive=30,
        server_header=False,
    )
    return Server(config, app.state.engine)


def bind(port: int) -> socket.socket:
    """A listening socket on the loopback interface. Raises InteropError if the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
    try:
        listener.bind((HOST, port))
        listener.listen()  # clients may connect as soon as the address is printed
    except OSError as error:
        listener.close()
        raise InteropError(
            f"port {port} cannot be used ({error.strerror}); choose another --port"
        ) from error
    return listener


def serve(served: ServedRun, limits: Limits, port: int, console: Console) -> None:
    """Serve until Ctrl-C. Raises InteropError if the port is taken."""
    listener = bind(port)
    with listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        console.info(
            f"serving {served.name} on {address} (page) and {address}/v1 (OpenAI API); Ctrl-C stops"
        )
        make_server(served, limits).run([listener])
