"""Cells of an evaluation, one for each method and length. Stored cells are loaded, the others
measured.

A stored cell is a file of per-target NLL, named by a hash of its key. The key contains everything
that determines the numbers.
"""

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.files import atomic, canonical_hash, read_arrays
from errors import EvaluationError
from evaluation.evaluated_model import EvaluatedModel
from evaluation.methods import TRAINED, Method, MethodAndLength
from evaluation.ranks import EvaluationRanks
from evaluation.scoring.batch_size import choose_batch, memory_needed
from model import ModelError, Transformer
from model.devices import free_memory
from run_directory.console import Console

# Version of the keys of stored cells; after a change, stored cells are measured again.
KEY_FORMAT = 2
# Settings of a scheme that were added later: keys contain them only if they are set, so that cells
# stored earlier are still found.
LATER = {"weights": "softmax", "shifted_keys": 0.0}
PARTIAL_EVERY = 30.0  # seconds between two saves of an unfinished cell

Advance = Callable[[float], None]  # receives the share of a cell that was done


class CellFailed(EvaluationError):
    """One cell (method × length) cannot be measured; the others continue."""


@dataclass(frozen=True, eq=False)
class EvaluationCell:
    """A method at a declared length."""

    method: Method
    length: int
    key: dict  # everything that determines the numbers, which excludes the batch size
    inputs: np.ndarray  # (n,) tokens that the model reads in each window or item
    keep: int  # number of outputs of a window that are scored
    chunk: int  # tokens per pass
    role: str = ""  # distinguishes cells of equal method and length
    windows: Any = None  # (n, 4) as in evaluation_plan.py, for text that is read in windows

    @property
    def where(self) -> MethodAndLength:
        return self.method.label, self.length

    @cached_property
    def file(self) -> str:
        return cell_file(self.key)

    @property
    def label(self) -> str:
        return f"{self.method.label} ({self.role})" if self.role else self.method.label

    @property
    def tokens(self) -> int:
        return int(self.inputs.sum())


def cell_file(key: dict) -> str:
    """The name of the file of a cell."""
    return f"{canonical_hash(key)[:24]}.npz"


def position_key(position: dict) -> dict:
    """The part of a key for position settings as JSON."""
    return {
        name: position_key(value) if isinstance(value, dict) else value
        for name, value in position.items()
        if name not in LATER or value != LATER[name]
    }


class CellStore:
    """The stored cells of one run."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._saved = time.monotonic()

    def load(self, key: dict) -> np.ndarray | None:
        """Per-target NLL of a finished cell; None if it is missing or damaged."""
        return _read(self.folder / cell_file(key), key)

    def load_partial(self, cell: EvaluationCell) -> np.ndarray | None:
        """Losses of an interrupted cell from all ranks; NaN for targets not scored yet."""
        parts = [_read(path, cell.key) for path in self.folder.glob(f"partial-*-{cell.file}")]
        readable = [part for part in parts if part is not None]
        return np.fmax.reduce(readable) if readable else None

    def save(self, key: dict, nll: np.ndarray) -> None:
        """Save a finished cell and remove its parts."""
        file = cell_file(key)
        _write(self.folder / file, key, nll)
        for part in self.folder.glob(f"partial-*-{file}"):
            part.unlink(missing_ok=True)

    def save_partial(self, cell: EvaluationCell, nll: np.ndarray, rank: int, now: bool) -> None:
        """Save a rank's part of an unfinished cell, at most every 30 s unless `now`."""
        if now or time.monotonic() - self._saved > PARTIAL_EVERY:
            _write(self.folder / f"partial-{rank}-{cell.file}", cell.key, nll)
            self._saved = time.monotonic()


def _write(path: Path, key: dict, nll: np.ndarray) -> None:
    with atomic(path) as file:
        np.savez(file, nll=nll, key=np.array(json.dumps(key, sort_keys=True)))


def _read(path: Path, key: dict) -> np.ndarray | None:
    """The losses in a file; None if it is missing or damaged, or has another key."""
    arrays = read_arrays(path)
    is_intact = str(arrays.get("key")) == json.dumps(key, sort_keys=True)
    return arrays["nll"] if is_intact and "nll" in arrays else None


class Measurement(ABC):
    """The cells of one run under its methods, their numbers and the memory budget.

    Args:
        positions_needed: number of positions that each length requires.
        facts: entries of results.json.
        cells: folder of stored cells; None if this kind of evaluation stores none.

    Attributes:
        schemes: position settings as evaluated, by the label of a method.
        absent: cells that cannot exist, with the reason.
        failed: cells whose measurement failed, with the reason.
        values_by_role: the numbers of the cells of each role, by (method, length).
        files: names of the stored cells' files, by "method@length".
        rounding_error: mean NLL in half precision minus mean NLL in float32, in nats.
        notes: caveats.

    Raises EvaluationError for an illegal method, and for a length that no method supports unless
    the settings allow a dash.
    """

    title: str  # title of the forecast
    counted = "windows"  # the word for the parts of a cell in the forecast
    caches = 1  # copies of the key/value cache at one time
    budget = 0  # bytes

    def __init__(
        self,
        settings: Any,
        subject: EvaluatedModel,
        methods: list[Method],
        positions_needed: Mapping[int, int],
        *,
        facts: dict,
        cells: Path | None = None,
        console: Any = None,
        ranks: EvaluationRanks | None = None,
    ):
        self.settings = settings
        self.subject = subject
        self.methods = methods
        self.lengths = list(positions_needed)
        self.facts = facts
        self.store = None if cells is None else CellStore(cells)
        self.console = console or Console(quiet=True)
        self.ranks = ranks or EvaluationRanks()
        self.device = self.ranks.device(settings.device)
        self.schemes = subject.schemes(methods)
        refuse = getattr(settings, "unreachable", "refuse") == "refuse"
        self.absent = subject.absent_cells(methods, positions_needed, refuse=refuse)
        self.failed: dict[MethodAndLength, str] = {}
        self.values_by_role: dict[str, dict[MethodAndLength, Any]] = defaultdict(dict)
        self.files: dict[str, str] = {}
        self.rounding_error: dict[MethodAndLength, float] = {}
        self.notes: list[str] = []
        # By file, as methods with equal keys share a cell: the numbers or the reason why there are
        # none; and (bytes without the weights, windows per batch).
        self.values_by_file: dict[str, Any] = {}
        self.batches: dict[str, tuple[int, int]] = {}

    @abstractmethod
    def cells(self) -> list[EvaluationCell]:
        """All cells in the order in which they are measured."""

    @abstractmethod
    def score(self, cell: EvaluationCell, model: Transformer, batch: int, advance: Advance) -> Any:
        """Measure one cell; `advance` receives each share that was done. Raises CellFailed."""

    def places(self) -> Iterator[tuple[Method, int]]:
        """The methods and lengths that can be measured."""
        for method in self.methods:
            for length in self.lengths:
                if (method.label, length) not in self.absent:
                    yield method, length

    def run(self) -> Self:
        """Measure the cells that are not on disk yet; returns `self`."""
        cells = self.cells()
        missing = self._missing(cells)
        if missing:
            self._plan_batches(missing)
            total = sum(cell.tokens for cell in missing)
            with self.console.bar("evaluating", total=total, unit="tokens") as progress:
                for cell in missing:
                    self._measure(cell, lambda share, n=cell.tokens: progress.advance(share * n))
        for cell in cells:
            values = self.values_by_file[cell.file]
            if isinstance(values, Exception):
                self.failed[cell.where] = str(values)
                self.warn(f"{cell.method.label} at {cell.length}: {values}; this cell is skipped")
                continue
            self.values_by_role[cell.role][cell.where] = values
            if self.store:
                self.files[f"{cell.label}@{cell.length}"] = cell.file
        return self

    def _measure(self, cell: EvaluationCell, advance: Advance) -> None:
        """Measure and store one cell; `advance` receives each share that was done."""
        _, batch = self.batches[cell.file]
        try:
            values = self.score(cell, self.model(cell), batch, advance)
        except (CellFailed, ModelError) as error:
            self.values_by_file[cell.file] = error
            return
        self.values_by_file[cell.file] = values
        if self.store and self.ranks.main:
            self.store.save(cell.key, values)

    def forecast(self) -> None:
        """Print every cell with its size, and the memory of those that are not on disk yet."""
        cells = self.cells()
        missing = self._missing(cells)
        if missing:
            self._plan_batches(missing)
        rows = []
        for cell in cells:
            memory = "measured"
            if cell.file in self.batches:
                memory = f"{self.batches[cell.file][0] / 2**30:.2f}"
            sizes = [cell.length, len(cell.inputs), cell.tokens]
            rows.append([cell.label, *(f"{size:,}" for size in sizes), memory])
        for (method, length), reason in self.absent.items():
            rows.append([method, f"{length:,}", "—", "—", reason])
        columns = ["method", "length", self.counted, "input tokens", "memory, GiB"]
        self.console.table(f"{self.subject.name}: {self.title}", columns, rows)

    def key(self, method: Method, length: int, dtype: str | None = None) -> dict:
        """The part of a cell's key that every kind of evaluation has.

        If the position settings of a method change nothing, such as `factor: auto` up to the
        original length, the method shares the cell of the trained model.
        """
        subject = self.subject
        position = self.schemes[TRAINED if method.truncates else method.label]
        trained = subject.position(())
        if subject.reduced(position, length) == subject.reduced(trained, length):
            position = trained
        return {
            "format": KEY_FORMAT,
            "checkpoint": subject.checkpoint_hash,
            "position": position_key(position),
            "train_length": subject.trained_length,
            "original_length": subject.original_length,
            "length": length,
            "dtype": dtype or self.settings.dtype,
            "chunk": self.settings.chunk,
            "device": self.device.type,
        }

    def model(self, cell: EvaluationCell) -> Transformer:
        """The model under the cell's method; valid until the next call."""
        return self.subject.under(cell.method.overrides, cell.key["dtype"])

    def warn(self, text: str) -> None:
        if self.ranks.main:
            self.console.warn(text)

    def _missing(self, cells: list[EvaluationCell]) -> list[EvaluationCell]:
        """The cells that are not on disk, one for each file. Adds the numbers of the other cells to
        `values_by_file`."""
        distinct: dict[str, EvaluationCell] = {}
        for cell in cells:
            distinct.setdefault(cell.file, cell)
        if self.store is not None:
            load = self.store.load
            # Only rank 0 reads, so that all ranks agree.
            stored = self.ranks.from_main(lambda: [load(cell.key) for cell in distinct.values()])
            pairs = zip(distinct, stored, strict=True)
            self.values_by_file |= {file: values for file, values in pairs if values is not None}
        if done := sum(cell.file in self.values_by_file for cell in cells):
            self.console.info(f"{done} of {len(cells)} cells are already done and reused")
        return [cell for file, cell in distinct.items() if file not in self.values_by_file]

    def _plan_batches(self, missing: list[EvaluationCell]) -> None:
        """Set the peak memory and the batch size of each cell, and print the total cost. Raises
        EvaluationError if a cell does not fit."""
        for cell in {cell.key["dtype"]: cell for cell in missing}.values():
            self.model(cell)  # its cast copy takes memory: make it before free memory is measured
        limit = self.settings.memory
        budget = limit * 2**30 if limit else 0.8 * free_memory(self.device)
        if self.device.type == "cpu":
            budget /= self.ranks.local_world
        # Equal on every rank: the budget determines the batches, and the batches the last bits.
        self.budget = int(min(self.ranks.collect(budget)))
        for cell in sorted(missing, key=lambda cell: -cell.length):  # errors name the longest
            model = self.model(cell)
            size = {
                "length": int(cell.inputs.max()),
                "keep": cell.keep,
                "chunk": cell.chunk,
                "context": getattr(self.settings, "context", 1),
            }
            fitting = choose_batch(model, **size, budget=self.budget // self.caches)
            batch = getattr(self.settings, "batch", None) or fitting
            self.batches[cell.file] = memory_needed(model, **size, batch=batch), batch
        weights = sum(weight.nbytes for weight in self.model(missing[0]).parameters())
        peak = weights + max(peak for peak, _ in self.batches.values())
        self.console.info(
            f"forecast: {len(missing)} cells, {sum(cell.tokens for cell in missing) / 1e6:.2f}M "
            f"input tokens, peak memory about {peak / 2**30:.2f} GiB in addition to the program "
            f"(budget {self.budget / 2**30:.1f} GiB)"
        )
