"""Who may work on a study folder: one runner, or any number of tasks that work on one cell each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.locks import locked
from studies.errors import StudyError


@contextmanager
def alone(folder: Path, shared: bool = False) -> Iterator[None]:
    """Hold the study folder until the end, or until this process dies; `shared` with other tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        if locked(lock, shared=shared) is False:
            raise StudyError(
                f"{folder} is in use by another process; wait for it, end it, or give another --folder"
            )
        yield
