"""Writing files so that a kill, a power cut or a full disk never leaves half of one under its name."""

import errno
import hashlib
import json
import os
from pathlib import Path

from training.errors import TrainingError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left; safetensors says it in words only."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(number) in str(error) for number in _FULL)


def write_text(file: Path, text: str) -> None:
    """Put a whole text under a name at once: written beside it, forced to the disk, renamed."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise TrainingError(f"{file}: cannot be written: {error.strerror}") from error
    sync(file.parent)


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


def sha256_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
