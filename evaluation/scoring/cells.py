"""Finished cells on disk: one file of per-target NLL for each (checkpoint, targets, method,
length), named by a hash of its key: everything that determines the numbers."""

import hashlib
import json
import time
import zipfile
from functools import reduce
from pathlib import Path

import numpy as np

from data.files import atomic

# Of the keys of stored cells. Raised when numbers or keys change: older cells are measured again.
KEY_FORMAT = 2
# Settings of a scheme that were added later: keys contain them only where they are set, so that
# cells stored before are still found.
LATER = {"weights": "softmax", "shifted_keys": 0.0}
PARTIAL_EVERY = 30.0  # seconds between two saves of an unfinished cell


def content_hash(record) -> str:
    """SHA-256 of a JSON record."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def cell_file(key: dict) -> str:
    """The name of the file of a cell."""
    return f"{content_hash(key)[:24]}.npz"


def position_key(position: dict) -> dict:
    """The part of a key for position settings as JSON."""
    return {
        name: position_key(value) if isinstance(value, dict) else value
        for name, value in position.items()
        if name not in LATER or value != LATER[name]
    }


class CellStore:
    """The cells of one run."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._saved = time.monotonic()

    def load(self, key: dict) -> np.ndarray | None:
        """Per-target NLL of a finished cell; None if it is missing or damaged."""
        return _read(self.folder / cell_file(key), key)

    def is_older(self, key: dict) -> bool:
        """Whether the cell was stored under the same key of the format before."""
        return (self.folder / cell_file(key | {"format": KEY_FORMAT - 1})).is_file()

    def load_partial(self, key: dict) -> np.ndarray | None:
        """Losses of an interrupted cell from all ranks; NaN where nothing was scored yet."""
        known = [_read(path, key) for path in self._partials(key)]
        parts = [part for part in known if part is not None]
        return reduce(lambda a, b: np.where(np.isnan(a), b, a), parts) if parts else None

    def _partials(self, key: dict) -> list[Path]:
        return sorted(self.folder.glob(f"partial-*-{cell_file(key)}"))

    def save(self, key: dict, nll: np.ndarray) -> Path:
        path = self.folder / cell_file(key)
        _write(path, key, nll)
        for partial in self._partials(key):
            partial.unlink(missing_ok=True)
        return path

    def save_partial(self, key: dict, nll: np.ndarray, rank: int = 0, *, now: bool = False) -> None:
        """Save a rank's part of an unfinished cell, at most every 30 s unless `now`."""
        if now or time.monotonic() - self._saved > PARTIAL_EVERY:
            _write(self.folder / f"partial-{rank}-{cell_file(key)}", key, nll)
            self._saved = time.monotonic()


def _write(path: Path, key: dict, nll: np.ndarray) -> None:
    with atomic(path) as file:
        np.savez(file, nll=nll, key=np.array(json.dumps(key, sort_keys=True)))


def _read(path: Path, key: dict) -> np.ndarray | None:
    # A damaged file (detected by the zip checksums) or one with another key counts as missing.
    # RuntimeError and OSError are raised for damaged zip headers.
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as record:
            if str(record["key"]) != json.dumps(key, sort_keys=True):
                return None
            return np.asarray(record["nll"], dtype=np.float64)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, RuntimeError, OSError):
        return None
