"""Data sets through the `datasets` library, map-style or streaming."""

import os
from glob import glob
from pathlib import Path

from data.files import canonical_hash
from data.sources.local import check_columns
from data.sources.text_source import Source, as_list, from_record, listing
from data.text_settings import HubSource
from errors import DataError

# values of `path` that name a format, not a data set
FORMATS = {"arrow", "csv", "json", "parquet", "text"}


class Hub(Source):
    """The fingerprint includes the local files of a format, but not the newest commit of a data set
    on the hub, because reading it would require the network on every call; `revision` pins the
    commit."""

    settings: HubSource

    def __init__(self, settings: HubSource, place: str):
        super().__init__(settings, place)
        self.label = "-".join(filter(None, (settings.path.split("/")[-1].lower(), settings.subset)))

    def check(self):
        """Check local files of a format. Files on the hub are not checked, because that requires
        the network.
        """
        self._local_files()

    def _local_files(self) -> list[str]:
        """The local files of a format. Raises DataError if one does not exist."""
        files = as_list(self.settings.data_files or []) if self.settings.path in FORMATS else []
        found = []
        for file in files:
            if "://" in file:
                continue
            paths = sorted(glob(os.path.expanduser(file), recursive=True))
            if not paths:
                raise DataError(
                    f"{self.place}.data_files: {file} does not exist; set existing files"
                )
            found += paths
        return found

    def fingerprint(self):
        if not (files := self._local_files()):
            return super().fingerprint()
        changes = listing((path, Path(path)) for path in files)
        return canonical_hash([self.settings.model_dump(), changes])

    def documents(self, start=0):
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
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"{self.place}: cannot load {s.path!r} (split {s.split!r}): {reason}. Check path, "
                "subset, split, data_files and the network"
            ) from error
        # Read only the text column from Arrow: other columns can be large (embeddings, images).
        columns = rows.column_names  # None: known once the first row is read
        if columns is not None:
            check_columns(s, columns, repr(s.path), self.place)
            rows = rows.select_columns(s.columns)
        if isinstance(rows, datasets.Dataset) and start >= len(rows):
            return  # skipping all rows of a map-style data set raises an error
        for number, row in enumerate(rows.skip(start) if start else rows, start=start):
            if columns is None:
                columns = list(row)
                check_columns(s, columns, repr(s.path), self.place)
            yield from_record(s, f"{s.split}#{number}", row)
