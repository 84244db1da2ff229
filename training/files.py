"""Writing files so that a kill, a power cut or a full disk never leaves half of one under its name."""

import errno
import json
import os
from pathlib import Path

from data import files
from data.files import sha256_of
from training.errors import TrainingError

__all__ = ["is_disk_full", "read_json", "sha256_of", "sync", "write_json", "write_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left; safetensors says it in words only."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(number) in str(error) for number in _FULL)


def write_text(file: Path, text: str) -> None:
    """Put a whole text under a name at once; raises TrainingError naming the file where that fails."""
    try:
        files.write_text(file, text)
    except OSError as error:
        raise TrainingError(f"{file}: cannot be written: {error.strerror}") from error


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(file: Path) -> dict:
    """The object in a JSON file; raises TrainingError naming the file where it is missing or broken."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"{file}: missing") from None
    except ValueError as error:
        raise TrainingError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise TrainingError(f"{file}: not a JSON object")
    return value


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
