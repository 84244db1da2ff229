"""Saves a run while it trains: at once, or in a thread beside the steps."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from training.average import Average
from training.checkpoint import save_image
from training.checkpoint_settings import CheckpointSettings
from training.exits import INTERRUPTED
from training.group import ALONE, Group, as_one
from training.image import Image, capture
from training.retention import prune


class Saver:
    """Checkpoints of one run by its policy.

    An asynchronous save copies tensors to the host and returns; files are written by a thread, one save at a
    time. What goes wrong there is raised by the next call of `save` or `wait`. All processes of the group are
    to call these after the same step, and where one fails, all do. Leaving the block waits for the last.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, train_length: int, group: Group = ALONE):
        self.folder, self.settings, self.train_length, self.group = folder, settings, train_length, group
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._thread:
            if error is None:
                self.wait()
            else:  # one error is told; the checkpoint under way is finished if it can be
                with suppress(Exception):
                    self.wait()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict,
        average: Average | None = None,
        wait: bool = False,
    ) -> None:
        """Save the run after `step` updates; `wait` until it is on the disk in any case."""
        self.wait()
        with as_one(self.group, "save"):
            image = capture(model, optimizer, average, copied=self.settings.asynchronous)
        if self.settings.asynchronous:
            self._writing = self._thread.submit(self._write, step, image, state)
            if wait:
                self.wait()
        else:
            self._write(step, image, state)

    @property
    def status(self) -> int:
        """The exit status to ask all processes for where a save has failed, so that they stop after the same
        step and hear of it there; else 0."""
        writing = self._writing
        failed = writing is not None and writing.done() and writing.exception() is not None
        return INTERRUPTED if failed else 0

    def wait(self) -> None:
        """Until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, image: Image, state: dict) -> None:
        save_image(self.folder, step, image, state, self.group)
        with as_one(self.group, "save"):
            if self.group.rank == 0:
                prune(self.folder, step, self.settings, self.train_length)
