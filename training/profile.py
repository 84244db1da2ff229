"""A trace of some steps, written into the run folder by torch.profiler."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from training.console import Console
from training.telling_settings import ProfileSettings


class Tracer:
    """Traces the steps that the settings name, every rank into a file of its own; None traces nothing."""

    def __init__(self, settings: ProfileSettings | None, folder: Path, rank: int, console: Console):
        self.settings, self.folder, self.rank, self.console = settings, folder / "profile", rank, console
        self._running: tuple[int, profile, ExitStack] | None = None
        self._last = -1

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begin or end the trace, where update `step` (0, 1, ...) is the first in it or after it."""
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
            torch.cuda.synchronize()  # what was asked for before the end belongs to the trace
        stack.close()
        name = f"steps-{first + 1}-{self._last + 1}-rank{self.rank}.json"
        self.folder.mkdir(exist_ok=True)
        building = self.folder / f".writing-{name}"
        found.export_chrome_trace(str(building))
        os.replace(building, self.folder / name)
        self.console.say(f"trace of steps {first + 1} to {self._last + 1}: {self.folder / name}")
