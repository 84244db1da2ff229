"""Who may work on a study folder: one runner, or any number of tasks that work on one cell each."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from studies.errors import StudyError


@contextmanager
def alone(folder: Path, shared: bool = False) -> Iterator[None]:
    """Hold the study folder until the end, or until this process dies; `shared` with other tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(
                f"{folder} is in use by another process; wait for it, end it, or give another --folder"
            ) from None
        except OSError:
            pass  # some network file systems have no locks; the run folders are then all that is held
        yield
