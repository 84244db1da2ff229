"""The processes that hold a model together: how they hear of each other when they save it."""

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from training.errors import TrainingError
from training.files import is_disk_full

PATIENCE = timedelta(hours=24)  # of a collective; the watch notices lost processes long before
T = TypeVar("T")


class Group(Protocol):
    """The processes that hold the parts."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...


class Alone:
    """One process that holds everything."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


class Apart:
    """All processes of a run, over a link of their own: what a thread gathers beside the steps does not mix
    with what these sum. To be made by every process at the same point."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world
        self._link = dist.new_group(backend="gloo", timeout=PATIENCE)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._link)
        return found


def on_all(group: Group, work: Callable[[], T]) -> list[T]:
    """What `work` gives each process of the group; where it fails on one, it does on all.

    Raises OSError (no space left) where the disk of one is full, on the others TrainingError for anything
    else; a process whose own work failed raises that.
    """
    found, error = None, None
    try:
        found = work()
    except Exception as own:  # whatever it is: the others wait to hear of it
        error = own
    everyone = group.gather((found, None if error is None else (is_disk_full(error), str(error))))
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(everyone):
        if failed is not None and failed[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if failed is not None:
            raise TrainingError(f"process {rank} could not save: {failed[1]}")
    return [one for one, _ in everyone]
