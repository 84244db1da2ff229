"""Local files (plain text, code, jsonl, parquet), the files of the Python standard library, and
prepared text."""

import fnmatch
import itertools
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from data.files import sha256_of
from data.sources.text_source import (
    Document,
    Source,
    as_list,
    checked,
    decoded,
    from_record,
    listing,
    utf8,
)
from data.store import TokenStore
from data.text_settings import FilesSource, PreparedSource, RecordSource
from data.tokenizers import load_tokenizer
from errors import DataError

BLOCK = 1 << 20
LARGEST = 1 << 28  # default limit on the bytes of a document
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
CODECS = {".gz": "gzip", ".zst": "zstd"}
# site-packages differs between machines; encodings and pydoc_data are tables, not prose or code.
EXCLUDED = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class Files(Source):
    settings: FilesSource

    def __init__(self, settings: FilesSource, place: str):
        super().__init__(settings, place)
        self.paths = [Path(p).expanduser() for p in as_list(settings.path)]
        self.label = utf8(self.paths[0].resolve().name.split(".")[0]) or "files"
        self.most = settings.max_document_bytes or LARGEST

    @cached_property
    def files(self) -> list[tuple[str, Path]]:
        """(name, path) of each file, in the order of the given paths, and by name within each
        folder."""
        names: dict[Path, str] = {}
        for path in self.paths:
            if not path.exists():
                raise DataError(
                    f"{self.place}.path: {path} does not exist; set an existing folder or file"
                )
            prefix = f"{path.name}/" if len(self.paths) > 1 else ""
            if path.is_file():
                names.setdefault(path, utf8(path.name))
                continue
            for name in self._inside(path):
                names.setdefault(path / name, utf8(prefix + name))
        if not names:
            raise DataError(
                f"{self.place}: no file in {', '.join(map(str, self.paths))} matches "
                f"{', '.join(self.settings.patterns)}; set another path or patterns"
            )
        return [(name, path) for path, name in names.items()]

    def _inside(self, folder: Path) -> list[str]:
        names = set()
        for pattern in self.settings.patterns:
            for path in folder.glob(pattern):
                inside = path.relative_to(folder)
                if path.is_file() and not any(part.startswith(".") for part in inside.parts):
                    names.add(inside.as_posix())
        out = self.settings.exclude
        return sorted(
            name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in out)
        )

    def check(self):
        len(self.files)  # raises DataError if there are none
        if (manifest := self._manifest()) is not None and not manifest.is_file():
            raise DataError(
                f"{self.place}.manifest: {manifest} does not exist; set a jsonl file or null"
            )

    def _manifest(self) -> Path | None:
        return None if self.settings.manifest is None else Path(self.settings.manifest).expanduser()

    def fingerprint(self):
        self.check()
        manifest = self._manifest()
        clusters = [] if manifest is None else [sha256_of(manifest)]
        return sha256_of("\n".join([*listing(self.files), *clusters]))

    def documents(self, start=0):
        # A folder of plain files can be read from any file on; record files are read from the start
        # and skipped.
        s = self.settings
        is_whole = s.separator is None and s.split_bytes is None
        if is_whole and not any(_has_records(path) for _, path in self.files):
            return self._read(self.files[start:])
        documents = self._read(self.files)
        if s.split_bytes is not None:
            documents = _in_spans(documents, s.split_bytes)
        return itertools.islice(documents, start, None)

    def _read(self, files: list[tuple[str, Path]]) -> Iterator[Document]:
        clusters = self._clusters()
        for name, path in files:
            with _damage_reported(path):
                for own_name, content in self._contents(name, path):
                    yield self._document(own_name, content, clusters.get(path.name))

    def _contents(self, name: str, path: Path) -> Iterator[tuple[str, object]]:
        """Names and contents of the documents of a file: bytes, or records."""
        mark = self.settings.separator
        if _is_parquet(path):
            parts = self._rows(path)
        elif _has_records(path):
            parts = _json_lines(path, self.most)
        elif mark is not None:
            parts = _parts(path, mark.encode(), self.most)
        else:
            with open(path, "rb") as file:
                yield name, file.read(self.most + 1)
            return
        for number, part in enumerate(parts):
            yield f"{name}#{number}", part

    def _document(self, name: str, content: object, cluster: str | None) -> Document:
        if isinstance(content, dict):
            document = from_record(self.settings, name, content)
            size = len(document.text.encode())
        elif isinstance(content, bytes):
            size = len(content)
            document = decoded(name, content, cluster) if size <= self.most else Document(name, "")
        else:
            return Document(name, "", fault="not a JSON object")
        if size <= self.most:
            return document
        fault = f"larger than {self.place}.max_document_bytes ({self.most:,})"
        return Document(document.name, "", fault=fault)

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        columns = self.settings.columns
        with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            check_columns(self.settings, file.schema_arrow.names, str(path), self.place)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()

    def _clusters(self) -> dict[str, str]:
        path = self._manifest()
        key = self.settings.cluster_key
        if path is None:
            return {}
        self.check()
        table = {}
        for line, record in enumerate(_json_lines(path, self.most), start=1):
            named = record if isinstance(record, dict) else {}
            if not isinstance(named.get("file"), str) or key not in named:
                raise DataError(
                    f"{path} line {line}: no JSON object with the keys 'file' and {key!r}"
                )
            if named[key] is not None:
                table[named["file"]] = str(named[key])
        return table


class Stdlib(Source):
    """The source files of the running Python's standard library."""

    label = "stdlib"

    folder = Path(sysconfig.get_paths()["stdlib"])

    @cached_property
    def files(self) -> list[str]:
        """Sorted file paths relative to the library folder."""
        names = []
        for root, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in EXCLUDED]
            inside = Path(root).relative_to(self.folder)
            names += [(inside / name).as_posix() for name in files if name.endswith(".py")]
        return sorted(names)

    def fingerprint(self):
        listing = [f"{name} {(self.folder / name).stat().st_size}" for name in self.files]
        return sha256_of("\n".join([platform.python_version(), *listing]))

    def documents(self, start=0):
        for name in itertools.islice(self.files, start, None):
            yield decoded(name, (self.folder / name).read_bytes())


class PreparedText(Source):
    """Text of a finished preparation, decoded from its tokens."""

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


def check_columns(settings: RecordSource, columns: list[str], where: str, place: str) -> None:
    """Raise DataError for a column of the settings that is not among `columns` of `where`."""
    for key in ("text_key", "name_key", "cluster_key"):
        name = getattr(settings, key)
        if name is not None and name not in columns:
            raise DataError(
                f"{where} has no column {name!r} ({place}.{key}); its columns are "
                f"{', '.join(columns)}: set {place}.{key} to one of them"
            )


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _has_records(path: Path) -> bool:
    name = path.name.lower()
    for ending in CODECS:
        name = name.removesuffix(ending)
    return _is_parquet(path) or name.endswith(JSON_ENDINGS)


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Raise DataError if a compressed or columnar file is truncated, so that a partial corpus is
    never accepted.
    """
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        # an error of the disk, not of the file
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path} is damaged or truncated ({error}); download it again") from error


def _parts(path: Path, mark: bytes, most: int) -> Iterator[bytes]:
    """Yield the parts of a file between separators, decompressed incrementally. A part of more than
    `most` bytes is cut, but stays longer than `most` bytes.
    """
    codec = CODECS.get(path.suffix.lower())
    kept = most + len(mark)
    with open(path, "rb") as raw:
        file = raw if codec is None else pyarrow.CompressedInputStream(raw, codec)
        rest = b""
        while block := file.read(BLOCK):
            rest += block
            *parts, rest = rest.split(mark)
            yield from parts
            if len(rest) > kept + len(mark):  # the separator may cross the edge of a block
                rest = rest[:kept] + rest[-len(mark) :]
        if rest.strip():  # no further part after a separator at the end of the file
            yield rest


def _in_spans(documents: Iterator[Document], most: int) -> Iterator[Document]:
    for document in documents:
        if document.fault is not None:
            yield document
        for number, text in enumerate(_split(document.text, most)):
            yield checked(f"{document.name}@{number}", text, document.cluster)


def _split(text: str, most: int) -> Iterator[str]:
    """Parts of at most `most` bytes, cut after a line break in their second half, or else after a
    space, if there is one."""
    start = 0
    while start < len(text):
        part = text[start : start + most].encode()[:most].decode(errors="ignore")
        if start + len(part) < len(text):
            ends = (part.rfind(mark, len(part) // 2) + 1 for mark in ("\n", " "))
            part = part[: next((end for end in ends if end), len(part))]
        yield part
        start += len(part)


def _json_lines(path: Path, most: int) -> Iterator[object]:
    """The value of each line of a file: bytes if the line is too large, None if it is not JSON."""
    for line in _parts(path, b"\n", most):
        if len(line) > most:
            yield line
        elif line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # malformed, not UTF-8, or nested too deeply
                yield None
