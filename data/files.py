"""Atomic file writes (to a temporary name, flushed, then renamed), JSON files, file locks and
hashes."""

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import psutil
from filelock import FileLock, Timeout

from errors import DataError, TrainingError

LONGEST_NAME = 200  # bytes of a file name; the longer name of its draft must fit into 255


@contextmanager
def damage_reported(path: Path, fix: str) -> Iterator[None]:
    """Raise DataError with `path` and `fix` if the content of the file is invalid."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is damaged; {fix}") from error


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for binary writing. The file appears only if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{_host()}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        if error.errno is None:  # raised by numpy after an incomplete write
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)} ({error})",
                str(path),
            ) from error
        if error.filename is None:  # a full disk: add the file name
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)
    # Sync the rename, so that after a power failure no manifest exists without its shards.
    sync(path.parent)


def path_problem(path: Path) -> str:
    """The reason why no file or folder can be created or used at `path`; "" if it can. Check it
    before work whose result is written there."""
    path = path.absolute()
    if max(len(os.fsencode(part)) for part in path.parts) > LONGEST_NAME:
        return f"has a name of more than {LONGEST_NAME} bytes; choose a shorter one"
    if path.is_symlink() and not path.exists():
        return "is a link to a file that does not exist; remove it or choose another name"
    parent = next(parent for parent in path.parents if os.path.lexists(parent))
    if not parent.is_dir():
        return f"cannot be created, because {parent} is not a folder; choose another place"
    if not os.access(parent, os.W_OK):
        return f"cannot be created, because {parent} is not writable; choose another place"
    return ""


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk; Windows cannot flush folders."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file atomically."""
    with atomic(path) as file:
        np.save(file, array)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name; {} if the file is missing, or damaged according to the
    checksums of zip."""
    # RuntimeError and OSError are raised for damaged zip headers.
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (BadZipFile, KeyError, ValueError, EOFError, RuntimeError, OSError):
        return {}


def _host() -> str:
    """The host name, used in file names because process ids are unique only per machine."""
    return re.sub(r"\W", "-", socket.gethostname())


def remove_drafts(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder or its subfolders. Files of
    running processes and of other machines are kept."""
    for draft in folder.rglob(f".*.{_host()}.*.tmp"):
        process = draft.name.split(".")[-2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, allow_nan: bool = True) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=allow_nan) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_object(path: Path, needed: Mapping[str, type] | None = None) -> dict:
    """Read the object in a JSON file of a run or study, and check that it has the `needed` keys.

    Raises TrainingError with the name of the file or key that is missing or invalid.
    """
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise TrainingError(f"{path} is missing; restore it") from None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{path}: not readable as JSON ({error})") from None
    return with_keys(path, value, needed or {})


def with_keys(where: object, value: object, needed: Mapping[str, type]) -> dict:
    """Check that `value` is an object with these keys of these types, and return it."""
    if not isinstance(value, dict):
        raise TrainingError(f"{where}: not a JSON object; restore it")
    for key, kind in needed.items():
        if not isinstance(value.get(key), kind):
            state = "is of the wrong type" if key in value else "is missing"
            raise TrainingError(f"{where}: {key} {state}; restore the file")
    return value


def sha256_of(content: Path | str | bytes | memoryview) -> str:
    """sha256, hex, of a file, a text or bytes."""
    if isinstance(content, Path):
        with open(content, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def canonical_hash(value: Any) -> str:
    """sha256, hex, of a JSON value. It does not depend on the order of keys."""
    return sha256_of(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


@contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock `file` until the block or this process ends, for any reason. If another process
    holds the lock and `wait` is False, the value is False and the lock is not held."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
