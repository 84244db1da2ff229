"""The plan of a study: every cell with its validated settings and evaluations.

Planning loads settings, builds models on the meta device and checks that files exist; it prepares and trains
nothing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data import DataError, DataSettings, prepared_folder
from evaluation import EvaluationError, EvaluationSettings, resolve_methods
from evaluation.scoring.methods import TRAINED, Method
from evaluation.settings import MeasurementSettings
from model import ModelError
from studies.errors import StudyError
from studies.report.document import counted
from studies.running.grid import GridCell
from studies.settings import SCHEME, EvaluationEntry, StudySettings, matches
from training.config.load import differences, load_settings
from training.config.settings import RunSettings
from training.errors import TrainingError
from training.position_overrides import override
from training.run.checks import check_model
from training.run.directory import is_run, read_settings
from training.stages import last_trained

# Errors reported per cell; any other exception is a bug and keeps its traceback.
USER_ERRORS = (StudyError, TrainingError, EvaluationError, ModelError, DataError, OSError)

STORES = ("store", "haystack_store")  # evaluation settings that select a prepared corpus


class EvaluationKind(Protocol):
    """A kind of evaluation in the registry of evaluate.py."""

    @property
    def title(self) -> str: ...

    @property
    def settings(self) -> type[MeasurementSettings]: ...


@dataclass(frozen=True)
class PlannedEvaluation:
    """One evaluation of one cell. `arguments`: evaluate.py's, without the path of another corpus."""

    name: str
    arguments: tuple[str, ...]
    settings: MeasurementSettings
    data: DataSettings | None = None  # another corpus, tokenized as the run's
    store_setting: str = ""  # the setting of evaluate.py that selects the corpus


@dataclass
class PlannedCell:
    """A cell with validated settings."""

    cell: GridCell
    settings: RunSettings
    run: Path
    evaluations: list[PlannedEvaluation] = field(default_factory=list)


@dataclass(frozen=True)
class StudyPlanner:
    """Plans cells. `kind_of(arguments)` returns the kind of an evaluation; `builtin`: the methods of
    configs/evaluation/methods.yaml."""

    study: StudySettings
    folder: Path
    kind_of: Callable[[list[str]], EvaluationKind]
    builtin: dict[str, list[str]]

    def plan(self, cells: Sequence[GridCell]) -> list[PlannedCell]:
        """Plans of all cells. Raises StudyError with every problem of every cell."""
        plans, problems = [], CellProblems()
        for cell in cells:
            try:
                plans.append(self._cell(cell, problems))
            except USER_ERRORS as error:
                problems.add(cell, str(error))
        problems.raise_any(len(cells))
        self._check_report(plans)
        return plans

    def _cell(self, cell: GridCell, problems: "CellProblems") -> PlannedCell:
        settings = load_settings(RunSettings, list(cell.arguments))
        check_model(settings)
        prepared_folder(settings.data)  # checks that the source exists
        run = self.folder / "runs" / cell.id
        if is_run(run):
            changed = [key for key, _, _, free in differences(read_settings(run), settings) if not free]
            if changed:
                raise StudyError(
                    f"{run} was trained with other settings ({', '.join(changed)}); restore them, "
                    "move the run, or set another --run-dir"
                )
        plan = PlannedCell(cell, settings, run)
        for name, entry in self.study.evaluations.items():
            if matches(cell.axes, entry.skip):
                continue
            try:
                plan.evaluations.append(self._evaluation(name, entry, cell, settings))
            except USER_ERRORS as error:
                problems.add(cell, f"evaluations.{name}: {error}")
        return plan

    def _check_report(self, plans: Sequence[PlannedCell]) -> None:
        """Check that the primary evaluation measures all primary lengths on some cell."""
        wanted = self.study.report.lengths
        primary = self.study.report.primary or next(iter(self.study.evaluations), None)
        measured: set[int] = set()
        for plan in plans:
            for evaluation in plan.evaluations:
                if evaluation.name == primary and isinstance(evaluation.settings, EvaluationSettings):
                    measured |= set(evaluation.settings.grid(plan.settings.train_length))
        unknown = [length for length in wanted or [] if length not in measured]
        if unknown and measured:
            raise StudyError(
                f"report.lengths: {', '.join(map(str, unknown))} not among the lengths of "
                f"evaluations.{primary}: {', '.join(map(str, sorted(measured)))}"
            )

    def _evaluation(
        self, name: str, entry: EvaluationEntry, cell: GridCell, run: RunSettings
    ) -> PlannedEvaluation:
        kind = self.kind_of(entry.overrides)
        fields = kind.settings.model_fields
        arguments = [*entry.overrides, f"folder={name}"]
        if "unreachable" in fields:  # all schemes use the targets of the longest length
            arguments.append("unreachable=dash")
        settings: Any = load_settings(kind.settings, arguments)
        if "methods" in fields:
            arguments += self._with_methods(settings.methods, self._methods_of_variants(cell))
            settings = load_settings(kind.settings, arguments)
            self._check_methods(settings.methods, run)
        if "lengths" in fields and "targets" in fields:
            _check_lengths(settings, run)
        if entry.data is None:
            return PlannedEvaluation(name, tuple(arguments), settings)
        setting = next((key for key in STORES if key in fields), None)
        if setting is None:
            raise StudyError(f"data: {kind.title.lower()} reads no corpus; remove the setting")
        return PlannedEvaluation(name, tuple(arguments), settings, _corpus(entry.data), setting)

    def _methods_of_variants(self, cell: GridCell) -> list[str]:
        own = [one.method for one in self.study.variants.values() if one.scheme == cell.axes.get(SCHEME)]
        return list(dict.fromkeys(method for method in own if method != TRAINED))

    def _with_methods(self, methods: list[str] | dict[str, list[str]], wanted: list[str]) -> list[str]:
        """The override that adds the methods of a scheme's variants to those of the evaluation."""
        more = [method for method in wanted if method not in methods]
        if not more:
            return []
        if isinstance(methods, list):
            return [f"methods={json.dumps([*methods, *more])}"]
        unknown = [method for method in more if method not in self.builtin]
        if unknown:
            raise StudyError(f"variants: unknown method {unknown[0]}")
        return [f"methods={json.dumps({method: self.builtin[method] for method in more})}"]

    def _check_methods(self, labels: list[str] | dict[str, list[str]], run: RunSettings) -> None:
        last, _ = last_trained(run, run.steps)
        problems = []
        methods: list[Method] = resolve_methods(labels, self.builtin, run.train_length)
        for method in methods:
            try:
                override(last, method.words)
            except (ModelError, TrainingError) as error:
                problems.append(f"method {method.label!r}: {error}")
        if problems:
            raise StudyError("; ".join(problems))


class CellProblems:
    """Problems of cells; equal ones are reported once."""

    def __init__(self):
        self._cells: dict[str, list[GridCell]] = {}

    def add(self, cell: GridCell, problem: str) -> None:
        self._cells.setdefault(problem, []).append(cell)

    def raise_any(self, n_cells: int) -> None:
        """Raise StudyError with all problems, if there are any."""
        if not self._cells:
            return
        count = len({cell.index for cells in self._cells.values() for cell in cells})
        lines = [
            f"{_names(cells, n_cells)}: {problem}".replace("\n", "\n    ")
            for problem, cells in self._cells.items()
        ]
        raise StudyError(
            f"{count} of {counted(n_cells, 'cell')} cannot run; nothing was started:\n       "
            + "\n       ".join(lines)
        )


def _names(cells: list[GridCell], n_cells: int) -> str:
    if len(cells) == n_cells > 1:
        return "every cell"
    more = f" and {len(cells) - 2} more" if len(cells) > 3 else ""
    return "; ".join(cell.id for cell in (cells[:2] if more else cells)) + more


def _check_lengths(settings: Any, run: RunSettings) -> None:
    """Targets must fit in the training length, which is always evaluated."""
    if settings.targets > run.train_length and getattr(settings, "protocol", "") == "fixed-targets":
        raise StudyError(f"targets={settings.targets} exceeds train_length={run.train_length}; decrease it")


def _corpus(overrides: list[str]) -> DataSettings:
    """Settings of another corpus, all of it held out; the run's tokenizer is filled in later."""
    fixed = ["data.valid_fraction=1", "data.tokenizer={name: bytes}"]
    data = load_settings(RunSettings, [*overrides, *fixed]).data
    if data.valid_source is not None:
        raise StudyError("data.valid_source: evaluations read all of data.source; remove it")
    prepared_folder(data)  # checks that the source exists
    return data
