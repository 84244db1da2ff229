"""The interface of text sources: a lazy, repeatable sequence of documents."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data.files import canonical_hash
from data.tasks import is_for
from data.text_settings import RecordSource

KEYS_SHOWN = 12  # keys that the message about a record without text lists


class Document(NamedTuple):
    """One document. If it is unusable, `fault` gives the reason and `text` is empty."""

    name: str
    text: str
    cluster: str | None = None
    fault: str | None = None


class Source(ABC):
    """Base class of sources.

    Args:
        settings: settings of the source.
        place: the setting that specifies it, for messages: data.source, data.mixture.0.source.
    """

    label: str  # short name for folders and messages

    def __init__(self, settings: Any, place: str):
        self.settings = settings
        self.place = place

    def check(self) -> None:  # noqa: B027
        """Raise DataError if a local input is missing. Reads no text."""

    def fingerprint(self) -> str:
        """A hash that changes when the documents may have changed. Reads no text."""
        return canonical_hash(self.settings.model_dump())

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from index `start` on, always in the same order. Unusable documents
        are included.
        """

    def haystacks(self, purpose: str) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of the documents that task items for `purpose` may use."""
        for document in self.documents():
            if document.fault is None and is_for(document.name, purpose):
                yield document.name, document.text


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def listing(files: Iterable[tuple[str, Path]]) -> list[str]:
    """Name, size and time of the last change of each file."""
    status = [(name, path.stat()) for name, path in files]
    return [f"{name} {file.st_size} {file.st_mtime_ns}" for name, file in status]


def utf8(name: str) -> str:
    """Escape the characters of a name that UTF-8 cannot represent (file names in another
    encoding)."""
    return name.encode(errors="backslashreplace").decode()


def checked(
    name: str,
    text: str,
    cluster: object = None,
) -> Document:
    """Build a document, or the reason why the text is unusable."""
    if not text.strip():
        return Document(name, "", fault="empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows unpaired surrogates, which UTF-8 cannot represent
        return Document(name, "", fault="invalid Unicode")
    return Document(name, text, None if cluster is None else utf8(str(cluster)))


def from_record(
    settings: RecordSource,
    name: str,
    record: Mapping[str, Any],
) -> Document:
    """Build a document from a record. `name` is used if the settings have no key for it, or the
    record has no value."""
    if settings.name_key is not None and (given := record.get(settings.name_key)) is not None:
        name = utf8(str(given))
    text = record.get(settings.text_key)
    if not isinstance(text, str):
        keys = utf8(", ".join(map(str, itertools.islice(record, KEYS_SHOWN))))
        fault = f"no text under the key {settings.text_key!r}"
        return Document(f"{name}, which has the keys {keys}", "", fault=fault)
    cluster = record.get(settings.cluster_key) if settings.cluster_key else None
    return checked(name, text, cluster)


def decoded(
    name: str,
    raw: bytes | bytearray,
    cluster: str | None = None,
) -> Document:
    """Build a document from the bytes of a file. Text files contain no NUL, so a NUL marks a binary
    file."""
    if b"\0" in raw:
        return Document(name, "", fault="binary")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return Document(name, "", fault="not UTF-8")
    return checked(name, text, cluster)
