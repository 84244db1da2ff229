"""Text that has been prepared already, read back from its tokens."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from data.sources.base import Document, checked
from data.store import Store
from data.text_settings import PreparedSource
from data.tokenizer import load_tokenizer


class PreparedText:
    def __init__(self, settings: PreparedSource):
        self.folder, self.split = Path(settings.path).expanduser(), settings.split
        self.label = self.folder.name

    def fingerprint(self) -> str:
        return Store(self.folder / self.split).hash

    def documents(self, start: int = 0) -> Iterator[Document]:
        store, tokenizer = Store(self.folder / self.split), load_tokenizer(self.folder / "tokenizer")
        names, clusters = store.names, store.clusters
        for i in itertools.islice(range(store.n_documents), start, None):
            yield checked(names[i], tokenizer.decode(store.document(i).tolist()), clusters[i])
