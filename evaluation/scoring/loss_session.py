"""Cells of an evaluation, one for each method and length: reused if they are on disk, forecast,
measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.evaluated_model import EvaluatedModel
from evaluation.ranks import EvaluationRanks
from evaluation.scoring.cells import CellStore, cell_key
from evaluation.scoring.forecast import (
    ForecastRow,
    choose_batch,
    forecast_line,
    forecast_table,
    measure_pace,
    memory_budget,
    memory_needed,
)
from evaluation.scoring.methods import TRAINED, Method
from evaluation.scoring.scoring import CellFailed, ModelScorer
from evaluation.scoring.windows import TargetWindows
from model import ModelError, Transformer
from run_directory.console import Console


@dataclass(kw_only=True)
class MeasuredCells:
    """The part of a result that every evaluation by cells has; keys are (label of the method,
    length)."""

    settings: Any
    subject: EvaluatedModel
    methods: list[Method]
    schemes: dict[str, dict]  # label -> position settings as evaluated
    facts: dict
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    # cells that cannot exist, and why
    absent: dict[tuple[str, int], str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # "method@length" -> file of the cell


@dataclass(frozen=True, eq=False)
class EvaluationCell:
    """A method at a declared length."""

    method: Method
    length: int
    key: dict  # everything that determines the numbers; the batch size does not
    inputs: np.ndarray  # (n,) tokens that the model reads in each window or item
    keep: int  # outputs of a window that are scored
    chunk: int  # tokens of one pass
    answers: int = 0  # tokens of the candidates, read after each item
    role: str = ""  # "sample": for the precision of bfloat16; "truncated": by-position's baseline
    windows: TargetWindows | None = None

    @property
    def where(self) -> tuple[str, int]:
        return self.method.label, self.length

    @property
    def label(self) -> str:
        return self.role if self.role == "truncated" else self.method.label

    @property
    def tokens(self) -> int:
        return int(self.inputs.sum())


class CellSession(ABC):
    """The state of one evaluation: the loaded model, the memory budget, the cells."""

    counted = "windows"  # what a cell consists of, in the forecast
    caches = 1  # copies of the key/value cache at one time
    budget = 0  # bytes

    def __init__(
        self,
        result: Any,
        cells: Path,
        console,
        ranks: EvaluationRanks,
    ):
        self.result = result
        self.settings = result.settings
        self.subject = result.subject
        self.store = CellStore(cells)
        self.console = console
        self.ranks = ranks
        self.device = ranks.device(self.settings.device)
        self.context = getattr(self.settings, "context", 1)
        # By file, as methods with equal keys share a cell: the numbers, and (bytes without the
        # weights, windows per batch).
        self._values: dict[str, np.ndarray] = {}
        self._batches: dict[str, tuple[int, int]] = {}

    @abstractmethod
    def cells(self) -> list[EvaluationCell]:
        """All cells in the order in which they are measured."""

    @abstractmethod
    def score(
        self, cell: EvaluationCell, model: Transformer, batch: int, advance: Callable[[float], None]
    ) -> np.ndarray:
        """Measure one cell; `advance` receives the share that is done. Raises CellFailed."""

    @abstractmethod
    def keep(self, cell: EvaluationCell, values: np.ndarray) -> None:
        """Add the numbers of a cell to the result."""

    @abstractmethod
    def title(self) -> str:
        """Of the forecast."""

    def run(self):
        """Measure the cells that are not on disk yet; returns the result."""
        _, missing = self._known_and_missing()
        if not missing:
            return self.result
        self._plan_batches(missing)
        if getattr(self.settings, "minutes", None) is None:  # else the time is known
            self._print_forecast(missing)
        tokens = {id(cell): cell.tokens for cell in self._distinct(missing)}
        console = self.console or Console(quiet=True)
        with console.bar("evaluating", total=sum(tokens.values()), unit="tokens") as progress:

            def advance(cell: EvaluationCell, share: float) -> None:
                progress.advance(share * tokens.get(id(cell), 0))

            self.measure_cells(missing, advance)
        return self.result

    def measure_cells(
        self, missing: list[EvaluationCell], advance: Callable[[EvaluationCell, float], None]
    ) -> None:
        """Measure the missing cells; `advance` receives the share of a cell that was done."""
        for cell in missing:
            self._measure(cell, partial(advance, cell))

    def forecast(self) -> None:
        """Print every cell with its size, and the memory and time of those that are not on disk
        yet."""
        cells, missing = self._known_and_missing()
        self._plan_batches(missing)
        if self.console is None:
            return
        rows = []
        for cell in cells:
            label = f"{cell.label} (float32 sample)" if cell.role == "sample" else cell.label
            peak, _ = self._batches.get(self.store.name(cell.key), (None, 0))
            rows.append(ForecastRow(label, cell.length, len(cell.inputs), cell.tokens, peak))
        self.console.table(self.title(), *forecast_table(rows, self.result.absent, self.counted))
        if missing:
            self._print_forecast(missing)

    def key(self, method: Method, length: int, dtype: str | None = None) -> dict:
        """The part of a cell's key that every kind of evaluation has."""
        label = TRAINED if method.truncates else method.label
        return cell_key(
            self.subject,
            self.result.schemes[label],
            length,
            dtype=dtype or self.settings.dtype,
            chunk=self.settings.chunk,
            device=self.device.type,
        )

    def of_main(self, read: Callable[[], Any]) -> Any:
        """Broadcast what rank 0 reads."""
        return self.ranks.collect(read() if self.ranks.main else None)[0]

    def model(self, cell: EvaluationCell) -> Transformer:
        """The model under the cell's method; valid until the next call."""
        return self.subject.under(cell.method.overrides, cell.key["dtype"])

    def _known_and_missing(self) -> tuple[list[EvaluationCell], list[EvaluationCell]]:
        """All cells, and those that are not on disk; the others are added to the result."""
        cells = self.cells()
        missing = []
        # Only rank 0 reads, so that all ranks agree.
        known = self.of_main(lambda: [self.store.load(cell.key) for cell in cells])
        for cell, values in zip(cells, known, strict=True):
            if values is None:
                missing.append(cell)
            else:
                self._add(cell, values)
        if self.console and len(missing) < len(cells):
            self.console.info(
                f"{len(cells) - len(missing)} of {len(cells)} cells are already done and reused"
            )
        older = sum(self.store.is_older(cell.key) for cell in self._distinct(missing))
        if self.console and older:
            self.console.info(
                f"{older} cells were measured by an earlier version and are measured again"
            )
        return cells, missing

    def _distinct(self, cells: list[EvaluationCell]) -> list[EvaluationCell]:
        """One cell for each file."""
        distinct: dict[str, EvaluationCell] = {}
        for cell in cells:
            distinct.setdefault(self.store.name(cell.key), cell)
        return list(distinct.values())

    def _add(self, cell: EvaluationCell, values: np.ndarray) -> None:
        name = self.store.name(cell.key)
        self._values[name] = values
        if cell.role != "sample":
            self.result.files[f"{cell.label}@{cell.length}"] = name
        self.keep(cell, values)

    def fail(self, cell: EvaluationCell, error: str) -> None:
        """Leave a cell out of the result."""
        self.result.failed[cell.where] = error
        if self.console:
            self.console.warn(
                f"{cell.method.label} at {cell.length}: {error}; this cell is skipped"
            )

    def _measure(
        self,
        cell: EvaluationCell,
        advance: Callable[[float], None],
    ) -> None:
        values = self._values.get(self.store.name(cell.key))
        if values is None:
            _, batch = self._batches[self.store.name(cell.key)]
            try:
                values = self.score(cell, self.model(cell), batch, advance)
            except (CellFailed, ModelError) as error:
                return self.fail(cell, str(error))
            if self.ranks.main:
                self.store.save(cell.key, values)
        self._add(cell, values)

    def _plan_batches(self, missing: list[EvaluationCell]) -> None:
        """Set the peak memory and the batch of each cell. Raises EvaluationError if one does not
        fit."""
        if not missing:
            return
        budget = memory_budget(self.settings.memory, self.device)
        if self.device.type == "cpu":
            budget //= self.ranks.local_world
        # Equal on every rank: it determines the batches, and these the last bits.
        self.budget = int(min(self.ranks.collect(budget)))
        # The longest first, so that an error names it.
        for cell in sorted(self._distinct(missing), key=lambda cell: -cell.length):
            model = self.model(cell)
            inputs = int(cell.inputs.max())
            fitting = choose_batch(
                model,
                inputs,
                cell.keep,
                chunk=cell.chunk,
                device=self.device,
                budget=self.budget // self.caches,
                context=self.context,
            )
            batch = self.settings.batch or fitting
            peak = memory_needed(model, inputs, cell.keep, batch, cell.chunk, self.context)
            self._batches[self.store.name(cell.key)] = peak, batch

    def _print_forecast(self, missing: list[EvaluationCell]) -> None:
        if self.console is None:
            return
        missing = self._distinct(missing)
        model = self.model(missing[0])
        scorer = ModelScorer(model, device=self.device, chunk=self.settings.chunk)
        lengths = [int(cell.inputs.max()) for cell in missing]
        pace = measure_pace(
            scorer, model, min(lengths), max(lengths), min(missing[0].keep, *lengths)
        )
        seconds = sum(pace.seconds(cell.inputs + cell.answers) for cell in missing)
        seconds /= max(self.ranks.world, self.context)
        tokens = sum(cell.tokens for cell in missing)
        peak = max(peak for peak, _ in self._batches.values())
        self.console.info(forecast_line(model, len(missing), tokens, seconds, peak, self.budget))
