"""Files that are either complete or absent: written beside their place, flushed, then renamed."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 1 << 20


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for binary writing; it appears, whole, only if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        if error.filename is None:  # a full disk does not say which file it had no room for
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)
    # The rename itself must survive a power cut, else a manifest could outlive the shard it describes.
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1))


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def canonical(value: Any) -> bytes:
    """One byte string per JSON value, whatever the order of its keys: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
