"""The source text of the running Python's standard library."""

import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.sources.base import Document, decoded
from data.text_settings import StdlibSource

# site-packages differs between machines; encodings and pydoc_data are tables, not prose or code.
LEFT_OUT = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class Stdlib:
    label = "stdlib"

    def __init__(self, settings: StdlibSource, place: str, folder: Path | None = None):
        self.place = place
        self.folder = folder or Path(sysconfig.get_paths()["stdlib"])
        self._files: list[str] | None = None

    def files(self) -> list[str]:
        """Sorted file paths relative to the library folder."""
        if self._files is None:
            found = []
            for root, folders, files in os.walk(self.folder):
                folders[:] = [name for name in folders if name not in LEFT_OUT]
                inside = Path(root).relative_to(self.folder)
                found += [(inside / name).as_posix() for name in files if name.endswith(".py")]
            if not found:
                raise DataError(
                    f"{self.folder} holds no Python files: this Python keeps its standard library elsewhere; "
                    f"give {self.place}.name=files and {self.place}.path=FOLDER"
                )
            self._files = sorted(found)
        return self._files

    def check(self) -> None:
        self.files()

    def fingerprint(self) -> str:
        listing = [f"{name} {(self.folder / name).stat().st_size}" for name in self.files()]
        return hashlib.sha256("\n".join([platform.python_version(), *listing]).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        for name in itertools.islice(self.files(), start, None):
            yield decoded(name, (self.folder / name).read_bytes())
