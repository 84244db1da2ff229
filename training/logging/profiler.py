"""Traces of training steps with torch.profiler, written to the run folder."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from training.config.trainer_settings import ProfileSettings
from training.logging.console import Console


class Profiler:
    """Traces the steps of the settings, one file per rank; settings None: no trace."""

    def __init__(self, settings: ProfileSettings | None, folder: Path, rank: int, console: Console):
        self.settings, self.folder, self.rank, self.console = settings, folder / "profile", rank, console
        self._running: tuple[int, profile, ExitStack] | None = None
        self._last = -1

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Start or stop the trace before update `step` (0, 1, ...)."""
        if self.settings is None:
            return
        first, after = self.settings.start, self.settings.start + self.settings.steps
        if step == after:
            self._stop()
        elif self._running is None and first <= step < after:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            stack = ExitStack()
            self._running = step, stack.enter_context(profile(activities=activities)), stack
        self._last = step

    def _stop(self) -> None:
        if self._running is None:
            return
        first, found, stack = self._running
        self._running = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels launched before the end belong to the trace
        stack.close()
        name = f"steps-{first + 1}-{self._last + 1}-rank{self.rank}.json"
        self.folder.mkdir(exist_ok=True)
        building = self.folder / f".writing-{name}"
        found.export_chrome_trace(str(building))
        os.replace(building, self.folder / name)
        self.console.info(f"trace of steps {first + 1} to {self._last + 1}: {self.folder / name}")
