"""Processes that share a run: exchange of values, and errors that are raised on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from errors import TrainingError


class ProcessGroup:
    """Processes that exchange Python objects. This base class is a single process."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank."""
        return [value]

    def agree(self, value: Any, what: str, fix: str) -> None:
        """Raise TrainingError on every process if `value` differs between processes."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise TrainingError(
                    f"{what} is {other} on process {rank} and {values[0]} on process 0: {fix}"
                )


ALONE = ProcessGroup()


@contextmanager
def error_barrier(group: ProcessGroup, what: str) -> Iterator[None]:
    """Wait for all processes of the group at the end of the block, and raise if it failed on any.

    A process raises its own error; the others raise TrainingError with its message. Do not nest
    barriers, unless one of the groups is a single process: a process that fails between the two
    would wait at the outer barrier while the others wait at the inner one.

    Args:
        what: the action of the block in the message, e.g. "save".
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # any error: the others wait at the barrier
        failed = error
    messages = group.gather(None if failed is None else str(failed) or type(failed).__name__)
    if failed is not None:
        raise failed
    for rank, message in enumerate(messages):
        if message is not None:
            raise TrainingError(f"process {rank} could not {what}: {message}")
