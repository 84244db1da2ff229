"""Finished cells on disk: one file of per-target NLL for each (checkpoint, targets, method,
length)."""

import json
import time
import zipfile
from functools import reduce
from pathlib import Path

import numpy as np

from data.files import atomic
from evaluation.scoring.targets import content_hash

PARTIAL_EVERY = 30.0  # seconds between two saves of an unfinished cell


class CellStore:
    """The cells of one run. A key is a JSON-serializable dict of everything that determines the
    numbers."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._saved = time.monotonic()

    def name(self, key: dict) -> str:
        return f"{content_hash(key)[:24]}.npz"

    def load(self, key: dict) -> np.ndarray | None:
        """Per-target NLL of a finished cell; None if it is missing or damaged."""
        return self._read(self.folder / self.name(key), key)

    def has_format(self, key: dict, number: int) -> bool:
        """Whether the cell was stored under the same key of another format."""
        return (self.folder / self.name(key | {"format": number})).is_file()

    def load_partial(self, key: dict) -> np.ndarray | None:
        """Losses of an interrupted cell from all ranks; NaN where nothing was scored yet."""
        found = [self._read(path, key) for path in self._partials(key)]
        parts = [part for part in found if part is not None]
        return reduce(lambda a, b: np.where(np.isnan(a), b, a), parts) if parts else None

    def _partials(self, key: dict) -> list[Path]:
        return sorted(self.folder.glob(f"partial-*-{self.name(key)}"))

    def save(self, key: dict, nll: np.ndarray) -> Path:
        path = self.folder / self.name(key)
        self._write(path, key, nll)
        for partial in self._partials(key):
            partial.unlink(missing_ok=True)
        return path

    def save_partial(
        self,
        key: dict,
        nll: np.ndarray,
        rank: int = 0,
        *,
        now: bool = False,
    ) -> None:
        """Save a rank's part of an unfinished cell, at most every 30 s unless `now`."""
        if now or time.monotonic() - self._saved > PARTIAL_EVERY:
            self._write(
                self.folder / f"partial-{rank}-{self.name(key)}",
                key,
                nll,
            )
            self._saved = time.monotonic()

    def _write(self, path: Path, key: dict, nll: np.ndarray) -> None:
        with atomic(path) as file:
            np.savez(
                file,
                nll=nll,
                key=np.array(json.dumps(key, sort_keys=True)),
            )

    def _read(self, path: Path, key: dict) -> np.ndarray | None:
        # A damaged file (detected by the zip checksums) or one with another key counts as missing.
        try:
            with np.load(path, allow_pickle=False) as record:
                if str(record["key"]) != json.dumps(key, sort_keys=True):
                    return None
                return np.asarray(record["nll"], dtype=np.float64)
        except (FileNotFoundError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
            return None
