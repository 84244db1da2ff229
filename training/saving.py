"""Saves a run while it trains: at once, or in a thread beside the steps."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from training.average import Average
from training.checkpoint import Image, capture, save_image
from training.checkpoint_settings import CheckpointSettings
from training.errors import TrainingError
from training.retention import prune
from training.sharded import ALONE, Group


class Saver:
    """Checkpoints of one run by its policy.

    An asynchronous save copies tensors to the host and returns; files are written by a thread, one save at a
    time. What goes wrong there is raised by the next call of a method. Leaving the block waits for the last.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, train_length: int, group: Group = ALONE):
        if settings.asynchronous and group.world > 1:
            raise TrainingError(
                "training.checkpoint.asynchronous: the processes of a sharded model save it together, at "
                "once; leave it out"
            )
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
        image = capture(model, optimizer, average, copied=self.settings.asynchronous)
        if self.settings.asynchronous:
            self._writing = self._thread.submit(self._write, step, image, state)
            if wait:
                self.wait()
        else:
            self._write(step, image, state)

    def check(self) -> None:
        """Raise what went wrong in a save that has ended."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, image: Image, state: dict) -> None:
        save_image(self.folder, step, image, state, group=self.group)
        if self.group.rank == 0:
            prune(self.folder, self.settings, self.train_length)
