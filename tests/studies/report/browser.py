"""A headless Chromium controlled over two pipes with the DevTools protocol."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium. `events` collects its unsolicited messages."""

    def __init__(self, program: str, profile: Path):
        # (read, write) of its output and its input
        ours = os.pipe()
        theirs = os.pipe()
        read = fcntl.fcntl(theirs[0], fcntl.F_DUPFD, 10)
        write = fcntl.fcntl(ours[1], fcntl.F_DUPFD, 10)
        os.close(theirs[0])
        os.close(ours[1])
        quiet = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        self.process = subprocess.Popen(
            [
                program,
                *quiet,
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(read, 3), os.dup2(write, 4)),
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self.reads = ours[0]
        self.writes = theirs[1]
        self.rest = b""
        self.events: list[dict] = []
        self.number = 0
        self.session = ""
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        joined = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = joined["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters) -> dict[str, Any]:
        """The answer to one command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while (message := self._next()).get("id") != self.number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, file: Path, width: int, height: int = 900) -> None:
        """Load a file at a size and wait until it is laid out."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.reads)
        os.close(self.writes)

    def _next(self, seconds: float = 120) -> dict:
        until = time.monotonic() + seconds
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, until - time.monotonic()))
            got = os.read(self.reads, 1 << 20) if ready else b""
            if not got:
                raise RuntimeError("the browser does not answer")
            self.rest += got
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)
