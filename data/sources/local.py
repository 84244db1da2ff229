"""Local folders and files: plain text, code, jsonl (plain, gz, zst), parquet."""

import fnmatch
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow
import pyarrow.parquet

from data.errors import DataError
from data.sources.base import Document, as_list, checked, decoded, utf8
from data.text_settings import FilesSource

BLOCK = 1 << 20
LARGEST = 1 << 28  # default limit on the bytes of a document
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
CODECS = {".gz": "gzip", ".zst": "zstd"}
TOO_LARGE = object()  # replaces a record that is too large
T = TypeVar("T")


class Files:
    def __init__(self, settings: FilesSource, place: str):
        self.settings, self.place = settings, place
        self.paths = [Path(p).expanduser() for p in as_list(settings.path)]
        self.label = utf8(self.paths[0].resolve().name.split(".")[0]) or "files"
        self.most = settings.max_document_bytes or LARGEST
        self._files: list[tuple[str, Path]] | None = None

    def files(self) -> list[tuple[str, Path]]:
        """(name, path) of each file, in the order of the given paths and sorted by name within
        each folder.
        """
        if self._files is None:
            found: dict[Path, str] = {}
            for path in self.paths:
                if not path.exists():
                    raise DataError(
                        f"{self.place}.path: {path} does not exist; give an existing folder or file"
                    )
                if path.is_file():
                    found.setdefault(path, utf8(path.name))
                else:
                    prefix = f"{path.name}/" if len(self.paths) > 1 else ""
                    for name in self._inside(path):
                        found.setdefault(path / name, utf8(prefix + name))
            if not found:
                raise DataError(
                    f"no file in {', '.join(map(str, self.paths))} matches "
                    f"{', '.join(self.settings.patterns)}; give another {self.place}.path or patterns"
                )
            self._files = [(name, path) for path, name in found.items()]
        return self._files

    def check(self) -> None:
        self.files()
        if (manifest := self._manifest()) is not None and not manifest.is_file():
            raise DataError(f"{self.place}.manifest: {manifest} does not exist; give a jsonl file or null")

    def _manifest(self) -> Path | None:
        return None if self.settings.manifest is None else Path(self.settings.manifest).expanduser()

    def _inside(self, folder: Path) -> list[str]:
        names = set()
        for pattern in self.settings.patterns:
            for path in folder.glob(pattern):
                inside = path.relative_to(folder)
                if path.is_file() and not any(part.startswith(".") for part in inside.parts):
                    names.add(inside.as_posix())
        out = self.settings.exclude
        return sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in out))

    def fingerprint(self) -> str:
        listing = []
        for name, path in self.files():
            status = path.stat()
            listing.append(f"{name} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(listing).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        # A folder of plain files can be read from any file on; record files are read from the start and
        # skipped.
        if self.settings.separator is None and all(_records(path) is None for _, path in self.files()):
            return self._read(self.files()[start:])
        return itertools.islice(self._read(self.files()), start, None)

    def _read(self, files: list[tuple[str, Path]]) -> Iterator[Document]:
        clusters = self._clusters()
        for name, path in files:
            reader = _records(path)
            if reader is not None:
                records = reader(path, self._columns(), self.place, self.most)
                for number, record in enumerate(_sound(path, records)):
                    yield self._document(f"{name}#{number}", record)
            elif self.settings.separator is not None:
                parts = _parts(path, self.settings.separator.encode(), self.most)
                for number, part in enumerate(_sound(path, parts)):
                    yield self._text(f"{name}#{number}", part, clusters.get(path.name))
            else:
                raw = path.read_bytes() if path.stat().st_size <= self.most else None
                yield self._text(name, raw, clusters.get(path.name))

    def _text(self, name: str, raw: bytes | bytearray | None, cluster: str | None) -> Document:
        return self._too_large(name) if raw is None else decoded(name, raw, cluster)

    def _too_large(self, name: str) -> Document:
        return Document(name, "", fault=f"larger than {self.place}.max_document_bytes ({self.most:,})")

    def _columns(self) -> list[str]:
        keys = (self.settings.text_key, self.settings.name_key, self.settings.cluster_key)
        return [key for key in keys if key is not None]

    def _document(self, name: str, record: object) -> Document:
        if record is TOO_LARGE:
            return self._too_large(name)
        if not isinstance(record, dict):
            return Document(name, "", fault="not a JSON object")
        if self.settings.name_key is not None:
            name = utf8(str(record.get(self.settings.name_key, name)))
        cluster = record.get(self.settings.cluster_key) if self.settings.cluster_key else None
        text = record.get(self.settings.text_key)
        if isinstance(text, str) and len(text.encode(errors="surrogatepass")) > self.most:
            return self._too_large(name)
        return checked(name, text, cluster, self.settings.text_key)

    def _clusters(self) -> dict[str, str]:
        path, key = self._manifest(), self.settings.cluster_key
        if path is None:
            return {}
        self.check()
        table = {}
        for line, record in enumerate(_json_lines(path, [], self.place, self.most), start=1):
            if not isinstance(record, dict) or not isinstance(record.get("file"), str) or key not in record:
                raise DataError(f"{path} line {line}: no JSON object with the keys 'file' and {key!r}")
            table[record["file"]] = str(record[key])
        return table


def _records(path: Path):
    """Return the reader of a record file, or None for plain text."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_rows
    for ending in CODECS:
        name = name.removesuffix(ending)
    return _json_lines if name.endswith(JSON_ENDINGS) else None


def _sound(path: Path, records: Iterator[T]) -> Iterator[T]:
    """Raise an error if a compressed or columnar file is truncated, so that a partial corpus is never
    accepted.
    """
    try:
        yield from records
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the file
            raise
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again") from error


def _parts(path: Path, mark: bytes, most: int) -> Iterator[bytearray | None]:
    """Yield the parts of a file between separators, decompressed incrementally; None for a part above `most`
    bytes.
    """
    codec = CODECS.get(path.suffix.lower())
    with open(path, "rb") as raw:
        file = raw if codec is None else pyarrow.CompressedInputStream(raw, codec)
        rest, searched, is_large = bytearray(), 0, False
        while block := file.read(BLOCK):
            rest += block
            while (end := rest.find(mark, searched)) >= 0:
                yield None if is_large or end > most else rest[:end]
                del rest[: end + len(mark)]
                searched, is_large = 0, False
            searched = max(0, len(rest) - len(mark) + 1)  # the separator may cross a block edge
            if is_large or searched > most:
                del rest[:searched]
                searched, is_large = 0, True
        if is_large or len(rest) > most:
            yield None
        elif rest.strip():  # no further part after a separator at the end of the file
            yield rest


def _json_lines(path: Path, columns: list[str], place: str, most: int) -> Iterator[object]:
    for line in _parts(path, b"\n", most):
        if line is None:
            yield TOO_LARGE
        elif line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # malformed, not UTF-8, or nested too deeply
                yield None


def _parquet_rows(path: Path, columns: list[str], place: str, most: int) -> Iterator[object]:
    with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}; its columns are {', '.join(file.schema_arrow.names)}: "
                f"set {place}.text_key"
            )
        for batch in file.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()
