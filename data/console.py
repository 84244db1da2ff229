"""What the package says while it works, when nobody listens."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any


class Silent:
    """Stands in for the console of the calling script; same methods, no output."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, label: str, total: int, unit: str = "it"):
        yield self

    def advance(self, n: int = 1) -> None:
        pass

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass
