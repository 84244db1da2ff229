"""Metadata and tensors of a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import InteropError
from interop.checkpoint import StoredTensor
from interop.extras import load_extra
from interop.gguf.reading.header import TensorEntry, read_header

MAGIC = b"GGUF"
# Floats and those quantizations of llama.cpp that released files use; `gguf` dequantizes them exactly.
READABLE = (
    *("F64", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)


class GGUFFile:
    """An open GGUF file: its metadata, and its tensors, which are read on demand.

    Attributes:
        path: the file.
        architecture: `general.architecture`.
        tensors: shape, type and content of each tensor by its name in the file. Shapes are (out, in).

    Raises:
        InteropError: the file is missing, truncated, damaged or not a GGUF file, or contains a tensor whose
            quantization is not supported.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        check_kind(self.path)
        self._gguf = load_extra("gguf")
        header = read_header(self.path)
        self.metadata = header.metadata
        self.architecture: str = self.text("general.architecture")
        self.tensors = {entry.name: self._stored(entry) for entry in header.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, text or list; `default` if it is absent."""
        return self.metadata.get(key, default)

    def number(self, key: str, kind: type = int, *default: Any) -> Any:
        """A positive number of the metadata. A list of equal numbers, one per layer, counts as one."""
        value = self.get(key)
        if value is None and default:
            return default[0]
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        accepted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or not value > 0:
            what = "a whole number above 0" if kind is int else "a number above 0"
            shown = "different for each layer" if isinstance(value, list) else repr(value)
            raise InteropError(f"{self.path}: {key} must be {what}, but is {shown}")
        return kind(value)

    def text(self, key: str, *default: str | None) -> Any:
        """Text of the metadata."""
        value = self.get(key)
        if value is None and default:
            return default[0]
        if not isinstance(value, str):
            raise InteropError(f"{self.path}: {key} must be text, but is {value!r}")
        return value

    def items(self, key: str, kind: type) -> list:
        """A list of the metadata; empty if it is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise InteropError(f"{self.path}: {key} must be a list of {kind.__name__}")
        return value

    def named(self, name: str) -> StoredTensor:
        """A tensor by its name. Raises InteropError if the file has none."""
        if name not in self.tensors:
            raise InteropError(f"{self.path} has no tensor {name}, which its metadata require")
        return self.tensors[name]

    def _stored(self, entry: TensorEntry) -> StoredTensor:
        try:
            kind = self._gguf.GGMLQuantizationType(entry.kind)
            name = kind.name
        except ValueError:
            kind = None
            name = f"type {entry.kind}"
        if kind is None or name not in READABLE:
            raise InteropError(
                f"{self.path}: {entry.name} is stored as {name}, which cannot be read; use a file with "
                f"{', '.join(READABLE)}"
            )
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if not entry.shape or entry.shape[-1] % block:
            raise InteropError(
                f"{self.path}: {entry.name} of shape {entry.shape} cannot be stored as {name}"
            )
        rows = math.prod(entry.shape[:-1])
        columns = entry.shape[-1] // block * size
        if entry.offset + rows * columns > self.path.stat().st_size:
            raise InteropError(
                f"{self.path} is truncated: it ends before {entry.name}; download it again"
            )

        def read() -> Tensor:
            raw = np.memmap(self.path, np.uint8, "r", entry.offset, (rows, columns))
            if name == "F64":
                return torch.from_numpy(raw.view(np.float64).reshape(entry.shape).copy())
            return torch.from_numpy(self._gguf.dequantize(raw, kind).reshape(entry.shape).copy())

        return StoredTensor(self.path, entry.shape, name, read)


def check_kind(path: Path) -> None:
    """Raise InteropError for a path that is not a GGUF file."""
    if not path.is_file():
        raise InteropError(f"{path} is not a file; pass the path of a GGUF file")
    with open(path, "rb") as file:
        start = file.read(4)
    if start == MAGIC:
        return
    if start[:2] == b"PK" or start[:1] == b"\x80":
        raise InteropError(
            f"{path} is a pickle, which can run code and is never opened; convert the model with "
            "transformers' save_pretrained or llama.cpp's convert_hf_to_gguf.py"
        )
    raise InteropError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
