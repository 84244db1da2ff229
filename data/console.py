"""A console without output, the default for library calls."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any


class NullConsole:
    """A console with the methods of the scripts' console and no output."""

    def info(self, text: str) -> None:
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
