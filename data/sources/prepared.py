"""Text of a finished preparation, decoded from its tokens."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.sources.base import Document, checked
from data.store import TokenStore
from data.text_settings import PreparedSource
from data.tokenizer import load_tokenizer


def finished_folder(path: str, setting: str) -> Path:
    """The prepared folder that `setting` specifies. Raises DataError if it is not a finished preparation."""
    folder = Path(path).expanduser()
    if not (folder / "prepared.json").is_file():
        raise DataError(
            f"{setting}: {folder} holds no finished preparation (no prepared.json); give a folder that "
            "scripts/prepare.py has made"
        )
    return folder


class PreparedText:
    def __init__(self, settings: PreparedSource, place: str):
        self.place = place
        self.folder, self.split = Path(settings.path).expanduser(), settings.split
        self.label = self.folder.name

    def check(self) -> None:
        finished_folder(str(self.folder), f"{self.place}.path")

    def fingerprint(self) -> str:
        self.check()
        return TokenStore(self.folder / self.split).hash

    def documents(self, start: int = 0) -> Iterator[Document]:
        store, tokenizer = TokenStore(self.folder / self.split), load_tokenizer(self.folder / "tokenizer")
        names, clusters = store.names, store.clusters
        for i in itertools.islice(range(store.n_documents), start, None):
            yield checked(names[i], tokenizer.decode(store.document(i).tolist()), clusters[i])
