"""The cells of one evaluation: reused if they are on disk, forecast, then scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.ranks import EvaluationRanks
from evaluation.scoring.cells import CellStore
from evaluation.scoring.forecast import (
    ForecastRow,
    choose_batch,
    forecast_line,
    forecast_table,
    measure_pace,
    memory_budget,
    memory_needed,
)
from evaluation.scoring.methods import TRAINED, TRUNCATE, Method
from evaluation.scoring.plan import truncation_step
from evaluation.scoring.protocols import TargetWindows
from evaluation.scoring.scoring import CellFailed, ModelScorer, batches, gather, measure
from evaluation.scoring.text import EvaluationText
from model import ModelError, Transformer

if TYPE_CHECKING:
    from evaluation.scoring.evaluate import EvaluationResult

PRECISION_SAMPLE = 32  # windows scored again in float32 for comparison with bfloat16


@dataclass(frozen=True)
class EvaluationCell:
    """A method, the declared length, and the windows to score."""

    method: Method
    length: int
    windows: TargetWindows
    key: dict
    sample: bool = False  # a few windows in float32, to check bfloat16
    baseline: bool = False  # by-position's truncation baseline


class EvaluationSession:
    """The state of one evaluation: the loaded model, the memory budget, the cells."""

    def __init__(
        self,
        result: EvaluationResult,
        text: EvaluationText,
        cells: CellStore,
        console,
        ranks: EvaluationRanks,
    ):
        self.result, self.text, self.cells, self.console = result, text, cells, console
        self.settings, self.subject, self.plan = result.settings, result.subject, result.plan
        self.ranks, self.device = ranks, ranks.device(self.settings.device)
        self.loaded: tuple[tuple, Transformer] | None = None
        self.budget = 0
        self.samples: dict[tuple[str, int], np.ndarray] = {}  # float32 reference for bfloat16

    def run(self) -> EvaluationResult:
        """Score the cells that are not on disk yet."""
        _, missing = self._known_and_missing()
        if missing:
            self._measure(missing)
        for where, exact in self.samples.items():
            if where in self.result.nll:
                windows = self.plan.windows[where[1]]
                of_window = np.repeat(np.arange(len(windows)), windows.keep)
                here = np.isin(of_window, _chosen(len(windows), PRECISION_SAMPLE))
                self.result.precision[where] = float((self.result.nll[where][here] - exact).mean())
        kept = self.result.screening.kept
        self.result.nll = {where: nll[kept] for where, nll in self.result.nll.items()}
        if self.result.truncated is not None:
            self.result.truncated = self.result.truncated[kept]
        baseline = self.result.nll.get((TRAINED, self.subject.trained_length))
        if self.plan.protocol != "by-position" and baseline is not None:
            self.result.truncated = baseline
            if any(method.truncates for method in self.result.methods):
                self.result.nll.update({(TRUNCATE, length): baseline for length in self.plan.lengths})
        return self.result

    def forecast(self) -> None:
        """Print every cell with its size, and the memory and time of those that are not on disk yet."""
        cells, missing = self._known_and_missing()
        peaks = self._peaks(missing)
        if self.console is None:
            return
        rows = [
            ForecastRow(
                "truncated" if cell.baseline else f"{cell.method.label}{' (float32 sample)' * cell.sample}",
                cell.length,
                len(cell.windows),
                cell.windows.n_inputs,
                peaks.get(id(cell)),
            )
            for cell in cells
        ]
        title = f"{self.subject.name}: {self.plan.n_targets:,} targets"
        self.console.table(title, *forecast_table(rows, self.result.absent))
        if missing:
            self._forecast(self._model(missing[0]), missing, max(peaks.values()))

    def _known_and_missing(self) -> tuple[list[EvaluationCell], list[EvaluationCell]]:
        """All cells, and those that are not on disk; the others are loaded."""
        cells, missing = self._cells(), []
        # Only rank 0 reads, so that all ranks agree.
        for cell, found in zip(
            cells, self._of_main(lambda: [self.cells.load(c.key) for c in cells]), strict=True
        ):
            if found is None:
                missing.append(cell)
            else:
                self._keep(cell, found)
        if self.console and len(missing) < len(cells):
            self.console.info(
                f"{len(cells) - len(missing)} of {len(cells)} cells were measured before and are reused"
            )
        return cells, missing

    def _of_main(self, read: Callable[[], Any]) -> Any:
        """Broadcast what rank 0 reads."""
        return self.ranks.collect(read() if self.ranks.main else None)[0]

    def _cells(self) -> list[EvaluationCell]:
        out = []
        for method in (method for method in self.result.methods if not method.truncates):
            lengths = [n for n in self.plan.lengths if (method.label, n) not in self.result.absent]
            for length in lengths:
                windows = self.plan.windows[length]
                out.append(
                    EvaluationCell(method, length, windows, self._key(method, length, self.settings.dtype))
                )
            for length in lengths if self.settings.dtype == "bfloat16" else []:
                few = evenly_spread(self.plan.windows[length], PRECISION_SAMPLE)
                key = self._key(method, length, "float32") | {"sample": PRECISION_SAMPLE}
                out.append(EvaluationCell(method, length, few, key, sample=True))
        if self.plan.protocol == "by-position":
            trained = next(method for method in self.result.methods if method.label == TRAINED)
            length = self.subject.trained_length
            step = truncation_step(self.settings, length)
            key = self._key(trained, length, self.settings.dtype) | {"truncated": True, "step": step}
            out.append(EvaluationCell(trained, length, self.plan.truncated, key, baseline=True))
        return out

    def _key(self, method: Method, length: int, dtype: str) -> dict:
        """Everything that determines the numbers of a cell; the batch size does not."""
        key = {
            "format": 1,
            "checkpoint": self.subject.checkpoint_hash,
            "targets": self.plan.hash,
            "protocol": self.plan.protocol,
            "position": self.result.schemes[method.label],
            "train_length": self.subject.trained_length,
            "original_length": self.subject.original_length,
            "length": length,
            "dtype": dtype,
            "chunk": self.settings.chunk,
            "device": self.device.type,
        }
        if self.plan.protocol == "sliding":
            key["stride"] = self.settings.stride or max(1, length // 8)
        return key

    def _peaks(self, missing: list[EvaluationCell]) -> dict[int, int]:
        """Bytes of each cell without the weights, by its id; sets the budget. Raises if one does not fit."""
        if not missing:
            return {}
        model = self._model(missing[0])
        budget = memory_budget(self.settings.memory, self.device)
        if self.device.type == "cpu":
            budget //= self.ranks.beside
        # Equal on every rank: it determines the batches, and these the last bits.
        self.budget = int(min(self.ranks.collect(budget)))
        # The longest first, so that an error names it.
        ordered = sorted(missing, key=lambda cell: -cell.length)
        return {id(cell): self._batch(model, cell)[0] for cell in ordered}

    def _measure(self, missing: list[EvaluationCell]) -> None:
        peak = max(self._peaks(missing).values())
        model = self._model(missing[0])
        self._forecast(model, missing, peak)
        costs = [cell.windows.n_inputs * model.flops_per_token(cell.length) / 3e9 for cell in missing]
        if self.console is None:
            for cell in missing:
                self._score(cell, lambda share: None)
            return
        with self.console.bar("evaluating", total=sum(costs), unit="GFLOP") as bar:
            for cell, cost in zip(missing, costs, strict=True):
                self._score(cell, lambda share, cost=cost: bar.advance(share * cost))

    def _score(self, cell: EvaluationCell, advance: Callable[[float], None]) -> None:
        """Score this rank's windows of a cell and gather those of the others. `advance` receives the share of
        the cell that is done, estimated from this rank."""
        rank, world = self.ranks.rank, self.ranks.world
        model = self._model(cell)
        scorer = ModelScorer(model, device=self.device, chunk=self.settings.chunk, length=cell.length)
        known = self._of_main(lambda: self.cells.load_partial(cell.key))
        if known is None:
            known = np.full(cell.windows.n_targets, np.nan)
        batch, out = self._batch(model, cell)[1], known.copy()
        total = sum(cell.windows.inputs[m].sum() for m in batches(cell.windows, batch)[rank::world])

        def after(inputs: int, out: np.ndarray) -> None:
            advance(inputs / total)
            self.cells.save_partial(cell.key, out, rank)

        error = ""
        try:
            measure(
                scorer,
                self.text,
                cell.windows,
                batch=batch,
                rank=rank,
                world=world,
                out=out,
                after_batch=after,
            )
        except KeyboardInterrupt:
            self.cells.save_partial(cell.key, out, rank, now=True)
            raise
        except (CellFailed, ModelError) as failure:
            error = str(failure)
        if world > 1 and not error:
            self.cells.save_partial(
                cell.key, out, rank, now=True
            )  # the process may end while waiting for the others
        # Losses from an earlier call belong to rank 0.
        mine = out if self.ranks.main else np.where(np.isnan(known), out, np.nan)
        errors, parts = zip(*self.ranks.collect((error, mine)), strict=True)
        if any(errors):
            error = next(filter(None, errors))
            self.result.failed[cell.method.label, cell.length] = error
            if self.console:
                self.console.warn(f"{cell.method.label} at {cell.length}: {error}; this cell is left out")
            return
        nll = gather(list(parts))
        if self.ranks.main:
            self.cells.save(cell.key, nll)
        self._keep(cell, nll)

    def _keep(self, cell: EvaluationCell, nll: np.ndarray) -> None:
        where = cell.method.label, cell.length
        if cell.baseline:
            self.result.truncated = nll
        elif cell.sample:
            self.samples[where] = nll
            return
        else:
            self.result.nll[where] = nll
        label = "truncated" if cell.baseline else cell.method.label
        self.result.files[f"{label}@{cell.length}"] = self.cells.name(cell.key)

    def _model(self, cell: EvaluationCell) -> Transformer:
        dtype = cell.key["dtype"]
        wanted = (cell.method.words, dtype)
        if self.loaded is None or self.loaded[0] != wanted:
            self.loaded = None  # free the old weights before loading the new ones
            self.loaded = wanted, self.subject.load(cell.method.words, dtype)
        return self.loaded[1]

    def _batch(self, model: Transformer, cell: EvaluationCell) -> tuple[int, int]:
        """(bytes, windows per batch) of a cell."""
        inputs, keep = int(cell.windows.inputs.max()), int(cell.windows.keep.max())
        how = {"chunk": self.settings.chunk}
        batch = choose_batch(model, inputs, keep, device=self.device, budget=self.budget, **how)
        batch = self.settings.batch or batch
        return memory_needed(model, inputs, keep, batch, self.settings.chunk), batch

    def _forecast(self, model: Transformer, missing: list[EvaluationCell], peak: int) -> None:
        if self.console is None:
            return
        scorer = ModelScorer(model, device=self.device, chunk=self.settings.chunk)
        lengths = [cell.length for cell in missing]
        keep = min(int(missing[0].windows.keep.max()), min(lengths))
        pace = measure_pace(scorer, model, min(lengths), max(lengths), keep)
        seconds = sum(pace.seconds(cell.windows.inputs) for cell in missing) / self.ranks.world
        tokens = sum(cell.windows.n_inputs for cell in missing)
        self.console.info(forecast_line(model, len(missing), tokens, seconds, peak, self.budget))


def _chosen(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def evenly_spread(windows: TargetWindows, count: int) -> TargetWindows:
    """At most `count` windows, evenly spread."""
    rows = _chosen(len(windows), count)
    return TargetWindows(windows.document[rows], windows.end[rows], windows.inputs[rows], windows.keep[rows])
