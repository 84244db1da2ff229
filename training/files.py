"""Atomic files and validated JSON, with TrainingError as the error."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from data import files
from data.files import sha256_of
from errors import TrainingError

__all__ = ["is_disk_full", "read_json", "sha256_of", "sync", "with_keys", "write_json", "write_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk; safetensors reports this only in the message."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(number) in str(error) for number in _FULL)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically; raises TrainingError with the file's name."""
    try:
        files.write_text(file, text)
    except OSError as error:
        raise TrainingError(f"{file}: cannot be written: {error.strerror}") from error


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(file: Path, needed: Mapping[str, type] | None = None) -> dict:
    """Read the object in a JSON file and check that it has the `needed` keys of these types.

    Raises TrainingError with the name of the file or key that is missing or invalid.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"{file}: missing") from None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise TrainingError(f"{file}: not a JSON object")
    return with_keys(file, value, needed or {})


def with_keys(where: object, value: object, needed: Mapping[str, type]) -> dict:
    """Check that `value` is an object with these keys of these types, and return it."""
    if not isinstance(value, dict):
        raise TrainingError(f"{where}: not a JSON object; restore it")
    for key, kind in needed.items():
        if not isinstance(value.get(key), kind):
            state = "is of the wrong type" if key in value else "is missing"
            raise TrainingError(f"{where}: {key} {state}; restore the file")
    return value


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
