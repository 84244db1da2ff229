"""Processes that do something together: what fails on one of them fails on all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from training.errors import TrainingError

PATIENCE = timedelta(hours=24)  # of a collective; the watch notices lost processes long before
T = TypeVar("T")


class Group(Protocol):
    """Processes, and the link over which they hear of each other."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...


class Alone:
    """One process that has nobody to hear of."""

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


@contextmanager
def as_one(group: Group, what: str) -> Iterator[None]:
    """Some or all processes of a group do their part in the block; none goes on before the others, or where
    one failed to `what`.

    Never one within another, unless one of the two groups is of this process alone: who fails between them
    speaks over the outer link while the others listen on the inner one, for ever.

    Raises on a process that failed its own error, on the others TrainingError with its words.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is: the others wait to hear of it
        failed = error
    said = group.gather(None if failed is None else str(failed) or type(failed).__name__)
    if failed is not None:
        raise failed
    for rank, words in enumerate(said):
        if words is not None:
            raise TrainingError(f"process {rank} could not {what}: {words}")


def on_all(group: Group, what: str, work: Callable[[], T]) -> list[T]:
    """What `work` gives each process of the group, by rank; fails as in `as_one`."""
    with as_one(group, what):
        found = work()
    return group.gather(found)
