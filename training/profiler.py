"""Traces of training steps with torch.profiler, written to the run directory."""

import os

import torch
from torch.profiler import ProfilerActivity, profile

from training.setup import TrainingRun


class Profiler:
    """Traces the steps that training.profile names, one file per rank; none without that
    setting."""

    def __init__(self, run: TrainingRun):
        self.settings = run.settings.training.profile
        self.folder = run.folder / "profile"
        self.rank = run.parallel.rank
        self.console = run.console
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
