"""Answers of one checkpoint to one task, under every method at every length; no cell is computed
twice."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.cells import Advance, CellSession, EvaluationCell, MeasuredCells
from evaluation.scoring.methods import CellPlace, Method
from evaluation.tasks.drawn_items import DrawnItems
from evaluation.tasks.task_scoring import TaskAnswers, TaskScorer, read_items
from evaluation.tasks.task_settings import TaskEvaluationSettings
from model import Transformer


@dataclass(kw_only=True)
class TaskResult(MeasuredCells):
    """Everything measured: `answers[method, length]`, in the order of the items."""

    settings: TaskEvaluationSettings
    drawn: DrawnItems
    answers: dict[CellPlace, TaskAnswers] = field(default_factory=dict)


class TaskSession(CellSession):
    """The cells of one evaluation by tasks.

    Raises EvaluationError before any compute for a method or a length that cannot work. A cell
    whose losses are not finite is left out of the result and named in `failed`.
    """

    counted = "items"
    caches = 2  # the prompt's, and a copy while a candidate is read
    result: TaskResult

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
    ):
        result = TaskResult(
            settings=settings,
            subject=subject,
            drawn=drawn,
            methods=methods,
            facts=facts,
        )
        lengths = {length: length for length in drawn.lengths}
        super().__init__(result, lengths, cells, console)
        self.title = f"{drawn.count} items of {drawn.candidates} candidates"
        self.drawn = drawn

    def cells(self) -> list[EvaluationCell]:
        return [self._cell(method, length) for method, length in self.places()]

    def _cell(self, method: Method, length: int) -> EvaluationCell:
        inputs = min(length, self.subject.trained_length) if method.truncates else length
        key = self.key(method, length)
        key |= {"kind": "tasks", "items": self.drawn.hash_at(length), "cut": inputs < length}
        return EvaluationCell(
            method,
            length,
            key,
            inputs=np.full(self.drawn.count, inputs),
            keep=min(inputs, 64),
            chunk=max(1, inputs // 2),
        )

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> np.ndarray:
        inputs = int(cell.inputs[0])
        n = self.drawn.count
        answers = read_items(
            TaskScorer(model, self.device, self.settings.chunk, self.drawn.vocab_size),
            self.drawn.items[cell.length],
            cell.length,
            bos=self.drawn.bos,
            batch=batch,
            cut=inputs if inputs < cell.length else None,
            after_batch=lambda done: advance(done / n),
        )
        return np.concatenate([answers.nll, answers.exact[:, None]], axis=1)

    def keep(self, cell: EvaluationCell, values: np.ndarray) -> None:
        self.result.answers[cell.where] = TaskAnswers(values[:, :-1], values[:, -1] > 0)
        self.result.files[f"{cell.method.label}@{cell.length}"] = cell.file
