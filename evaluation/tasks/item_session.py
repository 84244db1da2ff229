"""Exact match of one checkpoint on task items on symbols, under every method at every length."""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data.sampling.items import ItemRows, SymbolItems, place_items
from data.sampling.positions import IGNORED, PLAIN, PositionedTokens
from data.tasks import SymbolTask
from data.tokenizers import SymbolTokenizer
from errors import DataError, EvaluationError
from evaluation.evaluated_model import EvaluatedRun
from evaluation.scoring.methods import TRUNCATE, CellPlace, Method
from evaluation.scoring.scoring import CellFailed
from evaluation.scoring.session import Advance, CellSession, EvaluationCell, MeasuredCells
from evaluation.tasks.item_scoring import answer_items, by_item
from evaluation.tasks.task_settings import TaskEvaluationSettings
from model import Transformer


class DrawnLength(NamedTuple):
    """The items of one length: of problems from `shortest` to `longest`."""

    shortest: int
    longest: int
    rows: ItemRows
    placed: PositionedTokens

    @property
    def hash(self) -> str:
        """Hash of every token, target and position."""
        digest = hashlib.sha256()
        for array in (*self.rows, self.placed.position):
            if array is not None:
                digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def position_end(self) -> int:
        return 1 + int(np.ceil(self.placed.position.max()))

    def chance(self, choices: int) -> float:
        """Mean probability that guesses among `choices` symbols are right for all of an item; the
        place of `<end>` is no guess."""
        symbols = (self.rows.targets != IGNORED) & (self.rows.targets != SymbolTokenizer.eos_id)
        return float(np.mean(float(choices) ** -symbols.sum(axis=1)))


@dataclass(kw_only=True)
class ItemResult(MeasuredCells):
    """Everything measured: `answers[method, longest]` (n, 3), in the order of the items, as
    `by_item` returns it."""

    settings: TaskEvaluationSettings
    task: SymbolTask
    drawn: dict[int, DrawnLength]  # by longest problem
    answers: dict[CellPlace, np.ndarray] = field(default_factory=dict)


def draw_lengths(settings: TaskEvaluationSettings, run: EvaluatedRun) -> dict[int, DrawnLength]:
    """The items of every length. Raises EvaluationError for a length without problems, another
    vocabulary than the run's, or positions that do not reach the length."""
    data = run.model.settings.data
    source = data.symbol_source
    assert isinstance(run.tokenizer, SymbolTokenizer)
    task = settings.task or source.task
    if not isinstance(task, SymbolTask) or task.alphabet != run.tokenizer.symbols:
        raise EvaluationError(
            f"task.name={task.name}: its symbols are not those of {run.folder}, which was trained "
            f"on {source.task.name}; change settings of that task only, such as task.ignore"
        )
    drawn = {}
    for shortest, longest in settings.ranges(source.bounds):
        try:
            items = SymbolItems(
                task,
                (shortest, longest),
                purpose="evaluation",
                seed=settings.seed,
                bos=data.bos,
            )
            positions = PLAIN if settings.positions is None else data.positions
            positions.check(items.width)
        except DataError as error:
            raise EvaluationError(f"lengths: {error}") from error
        except ValueError as error:
            raise EvaluationError(f"positions={settings.positions}: {error}") from error
        index = np.arange(settings.items)
        rows = items.rows(index, int(items.count(index).max()))
        drawn_by = index if settings.positions == "redrawn" else np.zeros_like(index)
        placed = place_items(rows, positions, settings.seed, 0, drawn_by)
        drawn[longest] = DrawnLength(shortest, longest, rows, placed)
    return drawn


class ItemSession(CellSession):
    """The cells of one evaluation by task items on symbols.

    Raises EvaluationError before any compute for a method or a length that cannot work.
    """

    counted = "items"
    result: ItemResult

    def __init__(
        self,
        settings: TaskEvaluationSettings,
        run: EvaluatedRun,
        methods: list[Method],
        console=None,
    ):
        # An item without its beginning is no problem of the task.
        methods = [method for method in methods if method.label != TRUNCATE]
        self.drawn = draw_lengths(settings, run)
        task = settings.task or run.model.settings.data.symbol_source.task
        assert isinstance(task, SymbolTask)  # or `draw_lengths` raises
        result = ItemResult(
            settings=settings,
            subject=run.model,
            task=task,
            drawn=self.drawn,
            methods=methods,
            facts={"task": task.name, "tokenizer_hash": run.tokenizer.hash},
        )
        lengths = {longest: drawn.position_end for longest, drawn in self.drawn.items()}
        super().__init__(result, lengths, run.cells, console)
        self.title = f"{settings.items} items of the task {task.name}"

    def cells(self) -> list[EvaluationCell]:
        return [self._cell(method, self.drawn[length]) for method, length in self.places()]

    def _cell(self, method: Method, drawn: DrawnLength) -> EvaluationCell:
        inputs = drawn.rows.inputs.shape[1]
        key = self.key(method, inputs)
        key |= {"kind": "items", "items": drawn.hash}
        return EvaluationCell(
            method,
            drawn.longest,
            key,
            inputs=np.full(len(drawn.rows.inputs), inputs),
            keep=inputs,
            chunk=inputs,
        )

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> np.ndarray:
        drawn = self.drawn[cell.length]
        n = len(drawn.rows.inputs)
        nll, hits = answer_items(
            model,
            drawn.rows,
            drawn.placed,
            length=int(cell.inputs[0]),
            batch=batch,
            device=self.device,
            after_batch=lambda done: advance(done / n),
        )
        if not np.isfinite(nll).all():
            raise CellFailed(f"the loss is not finite at length {cell.length}")
        return by_item(drawn.rows, hits)

    def keep(self, cell: EvaluationCell, values: np.ndarray) -> None:
        self.result.answers[cell.where] = values
        self.result.files[f"{cell.method.label}@{cell.length}"] = cell.file
