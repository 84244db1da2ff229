"""Answers of one checkpoint to one task, under every method at every length; no cell is computed twice."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evaluation.scoring.cells import CellStore
from evaluation.scoring.evaluate import EvaluatedModel, absent_cells, resolve_all
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
from evaluation.scoring.scoring import CellFailed, ModelScorer
from evaluation.tasks.items import DrawnItems
from evaluation.tasks.scoring import Reader, TaskAnswers, TaskScorer, read_items
from evaluation.tasks.settings import TaskEvaluationSettings
from model import ModelError, Transformer, find_device


@dataclass
class TaskResult:
    """Everything measured: `answers[method, length]`, in the order of the items."""

    settings: TaskEvaluationSettings
    subject: EvaluatedModel
    drawn: DrawnItems
    methods: list[Method]
    schemes: dict[str, dict]  # label -> position settings as evaluated
    facts: dict
    answers: dict[tuple[str, int], TaskAnswers] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # "method@length" -> file of every candidate's NLL


class TaskSession:
    """The cells of one evaluation by tasks: reused where they are on disk, else forecast or scored.

    Raises EvaluationError before any compute for a method or a length that cannot work. A cell whose losses
    are not finite is left out of the result and named in `failed`.
    """

    def __init__(
        self,
        settings: TaskEvaluationSettings,
        subject: EvaluatedModel,
        drawn: DrawnItems,
        methods: list[Method],
        *,
        cells: Path,
        facts: dict,
        console=None,
        reader: Callable[[Transformer], Reader] | None = None,
    ):
        self.device, self.console, self.store = find_device(settings.device), console, CellStore(cells)
        self.read = reader or (lambda model: TaskScorer(model, self.device, settings.chunk))
        schemes = resolve_all(methods, subject)
        absent = absent_cells(methods, drawn.lengths, subject, settings.unreachable == "refuse")
        self.result = TaskResult(settings, subject, drawn, methods, schemes, facts, absent=absent)
        self.budget = memory_budget(settings.memory, self.device)
        self.loaded: tuple[tuple[str, ...], Transformer] | None = None
        places = [(method, length) for method in methods for length in drawn.lengths]
        self.cells = [
            (method, length, self._key(method, length))
            for method, length in places
            if (method.label, length) not in absent
        ]
        self.missing = [cell for cell in self.cells if not self._reuse(*cell)]
        known = len(self.cells) - len(self.missing)
        if console and known:
            console.info(f"{known} of {len(self.cells)} cells were measured before and are reused")

    def forecast(self) -> None:
        """Print every cell with its memory, and the time of those that are not on disk yet."""
        if self.console is None:
            return
        drawn, rows, seconds = self.result.drawn, [], 0.0
        lengths = [self._inputs(method, length) for method, length, _ in self.missing]
        pace = None
        if self.missing:
            model = self._model(self.missing[0][0])
            scorer = ModelScorer(model, device=self.device, chunk=self.result.settings.chunk)
            pace = measure_pace(scorer, model, min(lengths), max(lengths), 1)
        for method, length, key in self.cells:
            inputs, peak = self._inputs(method, length), None
            if pace is not None and (method, length, key) in self.missing:
                model = self._model(method)
                peak = memory_needed(model, inputs, min(inputs, 64), *self._batch(model, inputs))
                # Candidates are read after the cached prompt: about their own tokens in addition.
                item = drawn.items[length][0]
                answers = sum(map(len, (item.answer, *item.others)))
                seconds += pace.seconds(np.full(drawn.count, inputs + answers))
            rows.append(ForecastRow(method.label, length, drawn.count, drawn.count * inputs, peak))
        title = f"{self.result.subject.name}: {drawn.count} items of {drawn.candidates} candidates"
        self.console.table(title, *forecast_table(rows, self.result.absent, "items"))
        if self.missing:
            model, peak = self._model(self.missing[0][0]), max(row.peak or 0 for row in rows)
            tokens = drawn.count * sum(lengths)
            self.console.info(forecast_line(model, len(self.missing), tokens, seconds, peak, self.budget))

    def run(self) -> TaskResult:
        """Score the missing cells."""
        if not self.missing:
            return self.result
        drawn, task = self.result.drawn, self.result.facts["task"]
        cost = {self.store.name(key): self._inputs(method, n) for method, n, key in self.missing}
        total = drawn.count * sum(cost.values())
        if self.console:
            self.console.info(
                f"{len(cost)} cells: {drawn.count} items of {drawn.candidates} candidates at lengths "
                f"{', '.join(map(str, drawn.lengths))}; {total / 1e6:.2f}M input tokens"
            )
        bar = self.console.bar(f"answering {task}", total=total, unit="tokens") if self.console else None
        with bar or nullcontext() as progress:
            for method, length, key in self.missing:
                # Truncated to a length it does not exceed, a cell is the same as the one as trained.
                if not self._reuse(method, length, key):
                    self._score(method, length, key, progress.advance if progress else lambda tokens: None)
        return self.result

    def _score(self, method: Method, length: int, key: dict, advance: Callable[[int], None]) -> None:
        result, inputs = self.result, self._inputs(method, length)
        model = self._model(method)
        try:
            answers = read_items(
                self.read(model),
                result.drawn.items[length],
                length,
                bos=result.drawn.bos,
                batch=self._batch(model, inputs)[0],
                cut=inputs if inputs < length else None,
                after_batch=lambda done: advance(done * inputs),
            )
        except (CellFailed, ModelError) as error:
            result.failed[method.label, length] = str(error)
            if self.console:
                self.console.warn(f"{method.label} at {length}: {error}; this cell is left out")
            return
        self.store.save(key, np.concatenate([answers.nll, answers.exact[:, None]], axis=1))
        self._reuse(method, length, key)

    def _reuse(self, method: Method, length: int, key: dict) -> bool:
        """Take a cell from disk; False if it is not there."""
        record = self.store.load(key)
        if record is None:
            return False
        self.result.answers[method.label, length] = TaskAnswers(record[:, :-1], record[:, -1] > 0)
        self.result.files[f"{method.label}@{length}"] = self.store.name(key)
        return True

    def _inputs(self, method: Method, length: int) -> int:
        """Input tokens that the model reads."""
        return min(length, self.result.subject.trained_length) if method.truncates else length

    def _model(self, method: Method) -> Transformer:
        if self.loaded is None or self.loaded[0] != method.words:
            self.loaded = None  # free the old weights before loading the new ones
            self.loaded = method.words, self.result.subject.load(method.words, self.result.settings.dtype)
        return self.loaded[1]

    def _batch(self, model: Transformer, inputs: int) -> tuple[int, int]:
        """(items per batch, tokens per chunk). The prompt's cache exists twice while a candidate is read."""
        chunk, keep = max(1, inputs // 2), min(inputs, 64)
        how = {"chunk": chunk, "device": self.device, "budget": self.budget // 2}
        return self.result.settings.batch or choose_batch(model, inputs, keep, **how), chunk

    def _key(self, method: Method, length: int) -> dict:
        """Everything that determines the numbers of a cell; the batch size does not."""
        s, subject, result = self.result.settings, self.result.subject, self.result
        cut = method.truncates and length > subject.trained_length
        return {
            "format": 1,
            "kind": "tasks",
            "checkpoint": subject.checkpoint_hash,
            "items": result.drawn.hash_at(length),
            "position": result.schemes[TRAINED if method.label == TRUNCATE else method.label],
            "train_length": subject.trained_length,
            "original_length": subject.original_length,
            "length": length,
            "cut": cut,
            "dtype": s.dtype,
            "chunk": s.chunk,
            "device": self.device.type,
        }
