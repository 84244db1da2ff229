"""The header of a GGUF file: metadata and the table of tensors (github.com/ggml-org/ggml, docs/gguf.md).

The reader of the package `gguf` keeps an array for every token, which takes seconds for large vocabularies,
and does not check lengths against the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from errors import InteropError

VERSIONS = (2, 3)
ALIGNMENT = 32  # of the data, unless general.alignment says otherwise
# Types of values, by their numbers in the file.
_SCALARS = dict(enumerate("BbHhIif?"))  # as in `struct`
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class TensorEntry:
    """A row of the table of tensors.

    Attributes:
        shape: sizes, the slowest first, as in torch.
        kind: the number of its type.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Metadata by key, and the tensors in the order of the file."""

    metadata: dict[str, Any]
    tensors: list[TensorEntry]


def read_header(path: Path) -> Header:
    """Read everything but the content of the tensors. Raises InteropError for a damaged file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Parser(data, path).header()


class _Parser:
    def __init__(self, data: mmap.mmap, path: Path):
        # after the magic number
        self.data = data
        self.path = path
        self.position = 4

    def header(self) -> Header:
        version = self.scalar("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise InteropError(
                f"{self.path} has version {version} of GGUF; versions {known} can be read"
            )
        tensors = self.scalar("Q")
        keys = self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in metadata:
                raise self.damage(f"metadata key {key} occurs twice")
            metadata[key] = self.value(self.scalar("I"))
        entries = [self.entry() for _ in range(tensors)]
        if len({entry.name for entry in entries}) < len(entries):
            raise self.damage("two tensors have the same name")
        step = metadata.get("general.alignment", ALIGNMENT)
        if type(step) is not int or step < 8 or step % 8:
            raise self.damage(f"general.alignment = {step!r} is not a multiple of 8")
        start = -(-self.position // step) * step
        placed = [TensorEntry(e.name, e.shape, e.kind, start + e.offset) for e in entries]
        return Header(metadata, placed)

    def entry(self) -> TensorEntry:
        name = self.text()
        count = self.scalar("I")
        if count > 4:
            raise self.damage(f"tensor {name} has {count} dimensions")
        sizes = self.array("Q", count)
        return TensorEntry(name, tuple(reversed(sizes)), self.scalar("I"), self.scalar("Q"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner = self.scalar("I")
            count = self.scalar("Q")
            if inner == _STRING:
                return [self.text() for _ in range(count)]
            if inner in _SCALARS:
                return self.array(_SCALARS[inner], count)
            raise self.damage(f"an array of values of type {inner}")
        if kind not in _SCALARS:
            raise self.damage(f"a value of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def scalar(self, code: str) -> Any:
        (found,) = struct.unpack_from(
            "<" + code, self.data, self.take(1, struct.calcsize("<" + code))
        )
        return found

    def array(self, code: str, count: int) -> list:
        dtype = np.dtype(code).newbyteorder("<")
        start = self.take(count, dtype.itemsize)
        return np.frombuffer(self.data[start : self.position], dtype=dtype).tolist()

    def text(self) -> str:
        start = self.take(self.scalar("Q"), 1)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.damage("text that is not UTF-8") from error

    def take(self, count: int, size: int) -> int:
        """Move past `count` items of `size` bytes; returns where they begin."""
        start = self.position
        if count * size > len(self.data) - start:
            raise self.damage("it ends within its header")
        self.position += count * size
        return start

    def damage(self, what: str) -> InteropError:
        return InteropError(f"{self.path} is truncated or damaged ({what}); download it again")
