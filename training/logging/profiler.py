"""Traces of training steps with torch.profiler, written to the run directory."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from run_directory.training_settings import ProfileSettings
from training.logging.console import Console


class Profiler:
    """Traces the steps of the settings, one file per rank; settings None: no trace."""

    def __init__(self, settings: ProfileSettings | None, folder: Path, rank: int, console: Console):
        self.settings = settings
        self.folder = folder / "profile"
        self.rank = rank
        self.console = console
        self._running: profile | None = None
        self._first = self._last = -1

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Start or stop the trace before update `step` (0, 1, ...)."""
        if self.settings is None:
            return
        first = self.settings.start
        after = self.settings.start + self.settings.steps
        if step == after:
            self._stop()
        elif self._running is None and first <= step < after:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._first = step
            self._running.start()
        self._last = step

    def _stop(self) -> None:
        if (trace := self._running) is None:
            return
        self._running = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels launched before the end belong to the trace
        trace.stop()
        name = f"steps-{self._first + 1}-{self._last + 1}-rank{self.rank}.json"
        self.folder.mkdir(exist_ok=True)
        draft = self.folder / f".writing-{name}"
        trace.export_chrome_trace(str(draft))
        os.replace(draft, self.folder / name)
        self.console.info(
            f"trace of steps {self._first + 1} to {self._last + 1}: {self.folder / name}"
        )
