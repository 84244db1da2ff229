"""Text of a finished preparation, decoded from its tokens."""

import itertools
from pathlib import Path

from data.sources.text_source import Source, checked
from data.store import TokenStore
from data.text_settings import PreparedSource
from data.tokenizers import load_tokenizer
from errors import DataError


class PreparedText(Source):
    settings: PreparedSource

    def __init__(self, settings: PreparedSource, place: str):
        super().__init__(settings, place)
        self.folder = Path(settings.path).expanduser()
        self.label = self.folder.name

    def check(self):
        if not (self.folder / "prepared.json").is_file():
            raise DataError(
                f"{self.place}.path: {self.folder} has no prepared.json; set it to a folder of "
                "scripts/prepare.py"
            )

    def fingerprint(self):
        self.check()
        return self._store().hash

    def _store(self) -> TokenStore:
        return TokenStore(self.folder / self.settings.split)

    def documents(self, start=0):
        store = self._store()
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        names = store.names
        clusters = store.clusters
        for i in itertools.islice(range(store.n_documents), start, None):
            yield checked(
                names[i],
                tokenizer.decode(store.document(i).tolist()),
                clusters[i],
            )
