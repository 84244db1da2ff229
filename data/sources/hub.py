"""Data sets through the `datasets` library, map-style or streaming."""

import hashlib
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from data.errors import DataError
from data.files import canonical
from data.sources.base import Document, as_list, checked
from data.text_settings import HubSource

FORMATS = {"arrow", "csv", "json", "parquet", "text"}  # values of `path` that name a format, not a data set


class Hub:
    def __init__(self, settings: HubSource, place: str):
        self.settings, self.place = settings, place
        self.label = "-".join(
            part for part in (settings.path.split("/")[-1].lower(), settings.subset) if part
        )

    def check(self) -> None:
        """Check local files of a format. Files on the hub are not checked, because that requires
        the network.
        """
        files = as_list(self.settings.data_files or []) if self.settings.path in FORMATS else []
        for file in files:
            if "://" not in file and not has_magic(file) and not Path(file).expanduser().exists():
                raise DataError(f"{self.place}.data_files: {file} does not exist; give existing files")

    def fingerprint(self) -> str:
        # The newest commit is not queried, because that requires the network on every call; `revision` pins
        # it.
        return hashlib.sha256(canonical(self.settings.model_dump())).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        import datasets  # imported here: takes two seconds that other sources do not need
        from datasets.exceptions import DatasetsError

        s = self.settings
        try:
            rows = datasets.load_dataset(
                s.path,
                name=s.subset,
                split=s.split,
                revision=s.revision,
                data_files=s.data_files,
                streaming=s.streaming,
            )
        except (OSError, ValueError, DatasetsError) as error:
            raise DataError(
                f"{self.place}: cannot load {s.path!r} (split {s.split!r}): {_first_line(error)}; "
                "check path, subset, split, data_files and the network"
            ) from error
        # Read only the text column from Arrow: other columns can be large (embeddings, images).
        keys = [key for key in (s.text_key, s.name_key, s.cluster_key) if key is not None]
        if rows.column_names is not None:
            missing = [key for key in keys if key not in rows.column_names]
            if missing:
                raise DataError(
                    f"{self.place}: {s.path!r} has no column {missing[0]!r}; its columns are "
                    f"{', '.join(rows.column_names)}"
                )
            rows = rows.select_columns(keys)
        if isinstance(rows, datasets.Dataset) and start >= len(rows):
            return  # skipping all rows of a map-style data set raises an error
        if start:
            rows = rows.skip(start)
        for number, row in enumerate(rows, start=start):
            name = str(row[s.name_key]) if s.name_key else f"{s.split}#{number}"
            cluster = row.get(s.cluster_key) if s.cluster_key else None
            yield checked(name, row.get(s.text_key), cluster, s.text_key)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
