"""What a source of text is: a lazy, repeatable sequence of documents."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

GENERATED = "task:"  # how the names of documents begin that were made and not found


class Document(NamedTuple):
    """One document, or, where `fault` says why, one that cannot be used (`text` is then empty)."""

    name: str
    text: str
    cluster: str | None = None
    fault: str | None = None


class Source(Protocol):
    label: str  # short name for folders and messages
    place: str  # the setting that asks for it, for messages: data.source, data.mixture.0.source

    def check(self) -> None:
        """Raise DataError where something of this machine that it reads is not there; no text is read."""
        ...

    def fingerprint(self) -> str:
        """Changes when the documents may have changed; cheap (no text is read)."""
        ...

    def documents(self, start: int = 0) -> Iterator[Document]:
        """The documents from number `start` on, in the same order every time; faulty ones count."""
        ...


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def checked(name: str, text: object, cluster: object = None, key: str = "text") -> Document:
    """A document from whatever a record held under `key`."""
    if text is None or not isinstance(text, str):
        return Document(name, "", fault=f"no text under the key {key!r}")
    if not text.strip():
        return Document(name, "", fault="empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may spell half a surrogate pair, which no UTF-8 file can hold
        return Document(name, "", fault="invalid Unicode")
    return Document(name, text, None if cluster is None else str(cluster))


def decoded(name: str, raw: bytes, cluster: str | None = None) -> Document:
    """A document from the bytes of a file. Text files hold no NUL, so one marks a binary file."""
    if b"\0" in raw:
        return Document(name, "", fault="binary")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return Document(name, "", fault="not UTF-8")
    return checked(name, text, cluster)
