"""The header of a GGUF file, read within the bounds of the file (github.com/ggml-org/ggml,
docs/gguf.md).

Other readers allocate what the header declares; this one is run first and compares every declared
size with the size of the file.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InteropError
from interop.extras import load_extra

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of the data, unless general.alignment says otherwise
STRING = 8
ARRAY = 9
# types of values by their numbers in the file, as in `struct`
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and the table of tensors.

    Attributes:
        path: the file.
        metadata: values by key; of an array, its number of elements.
        shapes: sizes of each tensor by its name in the file, (out, in) for matrices.
    """

    path: Path
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer of the metadata.

        Raises:
            InteropError: it is absent without a default, or not a positive integer.
        """
        value = self.metadata.get(key, default)
        if type(value) is not int or value < 1:
            raise InteropError(f"{self.path}: {key} must be a positive integer, got {value!r}")
        return value


def read_header(path: Path) -> GGUFHeader:
    """Read everything but the content of the tensors.

    Raises:
        InteropError: not a GGUF file, or a damaged or truncated one.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InteropError(
                f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _HeaderParser(data, path).parse()
            except UnicodeDecodeError as error:
                raise InteropError(
                    f"{path} is damaged (text in its header is not UTF-8); download it again"
                ) from error


class _HeaderParser:
    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.position = len(MAGIC)

    def parse(self) -> GGUFHeader:
        version = self.scalar("I")
        if version not in VERSIONS:
            raise InteropError(
                f"{self.path} has version {version} of GGUF; versions 2 and 3 are read"
            )
        tensor_count = self.scalar("Q")
        key_count = self.scalar("Q")
        metadata = {}
        for _ in range(key_count):
            key = self.text()
            metadata[key] = self.value()
        shapes = {}
        end = 0
        for _ in range(tensor_count):
            name = self.text()
            dimensions = self.scalar("I")
            sizes = struct.unpack_from(
                f"<{dimensions}Q",
                self.data,
                self.take(dimensions, 8),
            )
            shapes[name] = tuple(reversed(sizes))
            size = self.stored_size(name, math.prod(sizes))
            end = max(end, self.scalar("Q") + size)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise self.damage(f"general.alignment = {alignment!r}")
        start = math.ceil(self.position / alignment) * alignment
        if len(metadata) < key_count or len(shapes) < tensor_count:
            raise self.damage("a key or a tensor occurs twice")
        if shapes and start + end > len(self.data):
            raise self.damage("it ends within its tensors")
        return GGUFHeader(self.path, metadata, shapes)

    def stored_size(self, name: str, elements: int) -> int:
        """Bytes of a tensor of the type that follows in the table."""
        gguf = load_extra("gguf")
        number = self.scalar("I")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        except (ValueError, KeyError) as error:
            raise InteropError(
                f"{self.path}: {name} is stored as type {number}, which the package gguf does not "
                f"know"
            ) from error
        return math.ceil(elements / block) * size

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self.damage(f"a value of the unknown type {kind}")
        inner = self.scalar("I")
        count = self.scalar("Q")
        if inner in SCALARS:
            self.take(count, struct.calcsize("<" + SCALARS[inner]))
        elif inner == STRING:
            for _ in range(count):
                self.take(self.scalar("Q"), 1)
        else:
            raise self.damage(f"an array of values of type {inner}")
        return count

    def scalar(self, code: str) -> Any:
        code = "<" + code
        return struct.unpack_from(code, self.data, self.take(1, struct.calcsize(code)))[0]

    def text(self) -> str:
        start = self.take(self.scalar("Q"), 1)
        return self.data[start : self.position].decode()

    def take(self, count: int, size: int) -> int:
        """Move past `count` items of `size` bytes; returns where they begin."""
        start = self.position
        if count * size > len(self.data) - start:
            raise self.damage("it ends within its header")
        self.position += count * size
        return start

    def damage(self, reason: str) -> InteropError:
        return InteropError(f"{self.path} is truncated or damaged ({reason}); download it again")
