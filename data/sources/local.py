"""Folders and files of this machine: plain text, code, jsonl (plain, gz, zst), parquet."""

import fnmatch
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pyarrow
import pyarrow.parquet
import zstandard

from data.errors import DataError
from data.sources.base import Document, as_list, checked, decoded
from data.text_settings import FilesSource

BLOCK = 1 << 20
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")


class Files:
    def __init__(self, settings: FilesSource, place: str):
        self.settings, self.place = settings, place
        self.paths = [Path(p).expanduser() for p in as_list(settings.path)]
        self.label = self.paths[0].resolve().name.split(".")[0] or "files"
        self._files: list[tuple[str, Path]] | None = None

    def files(self) -> list[tuple[str, Path]]:
        """(name, path) of each file, in the order of the paths given and sorted by name inside each."""
        if self._files is None:
            found: dict[Path, str] = {}
            for path in self.paths:
                if not path.exists():
                    raise DataError(
                        f"{self.place}.path: {path} does not exist; give an existing folder or file"
                    )
                if path.is_file():
                    found.setdefault(path, path.name)
                else:
                    prefix = f"{path.name}/" if len(self.paths) > 1 else ""
                    for name in self._inside(path):
                        found.setdefault(path / name, prefix + name)
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
        # A folder of plain files can be entered at any file; record files are read again and skipped over.
        if self.settings.separator is None and all(_records(path) is None for _, path in self.files()):
            return self._read(self.files()[start:])
        return itertools.islice(self._read(self.files()), start, None)

    def _read(self, files: list[tuple[str, Path]]) -> Iterator[Document]:
        clusters = self._clusters()
        for name, path in files:
            reader = _records(path)
            if reader is not None:
                for number, record in enumerate(_sound(path, reader(path, self._columns(), self.place))):
                    yield self._document(name, number, record)
            elif self.settings.separator is None:
                yield decoded(name, path.read_bytes(), clusters.get(path.name))
            else:
                yield from self._cut(name, path, self.settings.separator, clusters.get(path.name))

    def _columns(self) -> list[str]:
        keys = (self.settings.text_key, self.settings.name_key, self.settings.cluster_key)
        return [key for key in keys if key is not None]

    def _document(self, file: str, number: int, record: object) -> Document:
        name = f"{file}#{number}"
        if not isinstance(record, dict):
            return Document(name, "", fault="not a JSON object")
        if self.settings.name_key is not None:
            name = str(record.get(self.settings.name_key, name))
        cluster = record.get(self.settings.cluster_key) if self.settings.cluster_key else None
        return checked(name, record.get(self.settings.text_key), cluster, self.settings.text_key)

    def _cut(self, name: str, path: Path, separator: str, cluster: str | None) -> Iterator[Document]:
        """The parts of one file, read in blocks so that its size does not matter."""
        mark = separator.encode()
        number, rest = 0, b""
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                *parts, rest = (rest + block).split(mark)
                for part in parts:
                    yield decoded(f"{name}#{number}", part, cluster)
                    number += 1
        if rest.strip():  # text after the last separator; a file that ends with one has no further document
            yield decoded(f"{name}#{number}", rest, cluster)

    def _clusters(self) -> dict[str, str]:
        path, key = self._manifest(), self.settings.cluster_key
        if path is None:
            return {}
        self.check()
        table = {}
        for line, record in enumerate(_json_lines(path, [], self.place), start=1):
            if not isinstance(record, dict) or "file" not in record or key not in record:
                raise DataError(f"{path} line {line}: no JSON object with the keys 'file' and {key!r}")
            table[record["file"]] = str(record[key])
        return table


def _records(path: Path):
    """The reader of a record file, None for plain text."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_rows
    bare = name.removesuffix(".gz").removesuffix(".zst")
    return _json_lines if bare.endswith(JSON_ENDINGS) else None


def _sound(path: Path, records: Iterator[object]) -> Iterator[object]:
    """A compressed or columnar file that ends too early is an error: half a corpus must not pass for one."""
    try:
        yield from records
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again") from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "rb") as raw:
        if path.name.endswith(".gz"):
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        elif path.name.endswith(".zst"):
            yield io.BufferedReader(_Frames(raw), BLOCK)
        else:
            yield raw


class _Frames(io.RawIOBase):
    """The content of zstd frames, end to end; zstandard's own reader is silent about a truncated frame."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.frame, self.ready, self.rest = raw, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        while not self.ready:
            block = self.rest or self.raw.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("a zstd frame without its end")
                return 0
            self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
            self.ready, self.rest = self.frame.decompress(block), b""
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        n = min(len(target), len(self.ready))
        target[:n], self.ready = self.ready[:n], self.ready[n:]
        return n


def _json_lines(path: Path, columns: list[str], place: str) -> Iterator[object]:
    with _opened(path) as file:
        for line in file:
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError:  # malformed JSON or bytes that are no UTF-8
                yield None


def _parquet_rows(path: Path, columns: list[str], place: str) -> Iterator[object]:
    with pyarrow.parquet.ParquetFile(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}; its columns are {', '.join(file.schema_arrow.names)}: "
                f"set {place}.text_key"
            )
        for batch in file.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()
