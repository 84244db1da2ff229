"""The cells of one evaluation, measured in turn: reused where they are known, forecast, then scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.cells import Cells
from evaluation.forecast import choose_batch, measure_pace, memory_free, memory_needed
from evaluation.plan import truncation_step
from evaluation.protocols import Windows
from evaluation.ranks import Ranks
from evaluation.rules import TRAINED, TRUNCATE, Rule
from evaluation.scoring import CellFailed, ModelScorer, batches, gather, measure
from evaluation.text import Text
from model import ModelError, Transformer

if TYPE_CHECKING:
    from evaluation.matrix import Result

PRECISION_SAMPLE = 32  # windows scored again in float32 beside bfloat16


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a model rule, what it is told the length is, and the windows."""

    rule: Rule
    length: int
    windows: Windows
    key: dict
    sample: bool = False  # a few windows in float32, to check bfloat16
    baseline: bool = False  # by-position's truncation baseline


class Session:
    """The state of one `evaluate` call: which model is loaded, how much memory there is."""

    def __init__(self, result: Result, text: Text, cells: Cells, console, ranks: Ranks):
        self.result, self.text, self.cells, self.console = result, text, cells, console
        self.settings, self.subject, self.plan = result.settings, result.subject, result.plan
        self.ranks, self.device = ranks, ranks.device(self.settings.device)
        self.loaded: tuple[tuple, Transformer] | None = None
        self.budget = 0
        self.samples: dict[tuple[str, int], np.ndarray] = {}  # float32 beside bfloat16

    def run(self) -> None:
        todo = self._cells()
        missing = []
        # Rank 0 looks: by the time another rank did, there could be more.
        for cell, found in zip(
            todo, self._of_main(lambda: [self.cells.load(c.key) for c in todo]), strict=True
        ):
            if found is None:
                missing.append(cell)
            else:
                self._keep(cell, found)
        if self.console and len(missing) < len(todo):
            self.console.say(
                f"{len(todo) - len(missing)} of {len(todo)} cells were measured before and are reused"
            )
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
            if any(rule.truncates for rule in self.result.rules):
                self.result.nll.update({(TRUNCATE, length): baseline for length in self.plan.lengths})

    def _of_main(self, read: Callable[[], Any]) -> Any:
        """What rank 0 reads, on every rank."""
        return self.ranks.collect(read() if self.ranks.main else None)[0]

    def _cells(self) -> list[Cell]:
        out = []
        for rule in (rule for rule in self.result.rules if not rule.truncates):
            lengths = [n for n in self.plan.lengths if (rule.label, n) not in self.result.absent]
            for length in lengths:
                windows = self.plan.windows[length]
                out.append(Cell(rule, length, windows, self._key(rule, length, self.settings.dtype)))
            for length in lengths if self.settings.dtype == "bfloat16" else []:
                few = evenly_spread(self.plan.windows[length], PRECISION_SAMPLE)
                key = self._key(rule, length, "float32") | {"sample": PRECISION_SAMPLE}
                out.append(Cell(rule, length, few, key, sample=True))
        if self.plan.protocol == "by-position":
            trained = next(rule for rule in self.result.rules if rule.label == TRAINED)
            length = self.subject.trained_length
            step = truncation_step(self.settings, length)
            key = self._key(trained, length, self.settings.dtype) | {"truncated": True, "step": step}
            out.append(Cell(trained, length, self.plan.truncated, key, baseline=True))
        return out

    def _key(self, rule: Rule, length: int, dtype: str) -> dict:
        """Everything that decides a cell's numbers; the batch size is not among it."""
        key = {
            "format": 1,
            "checkpoint": self.subject.checkpoint_hash,
            "targets": self.plan.hash,
            "protocol": self.plan.protocol,
            "position": self.result.schemes[rule.label],
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

    def _measure(self, missing: list[Cell]) -> None:
        model = self._model(missing[0])
        limit = self.settings.memory
        budget = limit * 2**30 if limit else 0.8 * memory_free(self.device)
        if self.device.type == "cpu":
            budget /= self.ranks.beside
        # The same on every rank, for it decides the batches and these the last bits.
        self.budget = int(min(self.ranks.collect(budget)))
        # The longest first, so that a refusal names the length that decides.
        ordered = sorted(missing, key=lambda cell: -cell.length)
        peak = max(self._batch(model, cell)[0] for cell in ordered)
        self._forecast(model, missing, peak)
        costs = [cell.windows.n_inputs * model.flops_per_token(cell.length) / 3e9 for cell in missing]
        if self.console is None:
            for cell in missing:
                self._score(cell, lambda share: None)
            return
        with self.console.bar("evaluating", total=sum(costs), unit="GFLOP") as bar:
            for cell, cost in zip(missing, costs, strict=True):
                self._score(cell, lambda share, cost=cost: bar.advance(share * cost))

    def _score(self, cell: Cell, advance: Callable[[float], None]) -> None:
        """Measure this rank's windows of a cell and join them with the others'. `advance` is told shares of
        the cell: what this rank has done of its own stands for all."""
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
            self.cells.save_partial(cell.key, out, rank, now=True)  # the wait for the others may be cut short
        # What was known before is rank 0's.
        mine = out if self.ranks.main else np.where(np.isnan(known), out, np.nan)
        errors, parts = zip(*self.ranks.collect((error, mine)), strict=True)
        if any(errors):
            error = next(filter(None, errors))
            self.result.failed[cell.rule.label, cell.length] = error
            if self.console:
                self.console.warn(f"{cell.rule.label} at {cell.length}: {error}; this cell is left out")
            return
        nll = gather(list(parts))
        if self.ranks.main:
            self.cells.save(cell.key, nll)
        self._keep(cell, nll)

    def _keep(self, cell: Cell, nll: np.ndarray) -> None:
        where = cell.rule.label, cell.length
        if cell.baseline:
            self.result.truncated = nll
        elif cell.sample:
            self.samples[where] = nll
            return
        else:
            self.result.nll[where] = nll
        label = "truncated" if cell.baseline else cell.rule.label
        self.result.files[f"{label}@{cell.length}"] = self.cells.name(cell.key)

    def _model(self, cell: Cell) -> Transformer:
        dtype = cell.key["dtype"]
        wanted = (cell.rule.words, dtype)
        if self.loaded is None or self.loaded[0] != wanted:
            self.loaded = None  # the old weights go before the new ones come
            self.loaded = wanted, self.subject.load(cell.rule.words, dtype)
        return self.loaded[1]

    def _batch(self, model: Transformer, cell: Cell) -> tuple[int, int]:
        """(bytes, windows at once) for a cell."""
        inputs, keep = int(cell.windows.inputs.max()), int(cell.windows.keep.max())
        how = {"chunk": self.settings.chunk}
        batch = choose_batch(model, inputs, keep, device=self.device, budget=self.budget, **how)
        batch = self.settings.batch or batch
        return memory_needed(model, inputs, keep, batch, self.settings.chunk), batch

    def _forecast(self, model: Transformer, missing: list[Cell], peak: int) -> None:
        if self.console is None:
            return
        scorer = ModelScorer(model, device=self.device, chunk=self.settings.chunk)
        lengths = [cell.length for cell in missing]
        keep = min(int(missing[0].windows.keep.max()), min(lengths))
        pace = measure_pace(scorer, model, min(lengths), max(lengths), keep)
        seconds = sum(pace.seconds(cell.windows) for cell in missing) / self.ranks.world
        tokens = sum(cell.windows.n_inputs for cell in missing)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.console.say(
            f"forecast: {len(missing)} cells, {tokens / 1e6:.2f}M input tokens, about {_duration(seconds)}, "
            f"peak memory about {(peak + weights) / 2**30:.2f} GiB beside the program "
            f"({self.budget / 2**30:.1f} GiB may be used)"
        )


def _chosen(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def evenly_spread(windows: Windows, count: int) -> Windows:
    """At most `count` windows, evenly spread."""
    rows = _chosen(len(windows), count)
    return Windows(windows.document[rows], windows.end[rows], windows.inputs[rows], windows.keep[rows])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
