"""The plan of a study: every cell with its validated settings and evaluations.

Planning loads settings, builds models on the meta device and checks that files exist; it prepares
and trains nothing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from data import DataSettings, is_prepared
from data.data_settings import SymbolSource
from data.files import canonical_hash, write_text
from errors import StudyError, TrainingError, UserError
from evaluation.evaluation_settings import EvaluationSettings, MeasurementSettings
from evaluation.protocols import settings_class
from evaluation.reports.document import counted
from evaluation.scoring.methods import TRAINED, builtin_methods, resolve_methods
from model import ModelError
from run_directory.parent_run import read_run_settings
from run_directory.position_overrides import override
from run_directory.precision import auto_precision, resolve_precision
from run_directory.run import Run, is_run
from run_directory.run_names import scheme_names
from run_directory.run_settings import RunSettings
from run_directory.stages import last_trained
from settings.load import differences, identity, load_settings
from studies.grid import GridCell
from studies.results.stored import SCHEME
from studies.study_settings import EvaluationEntry, StudySettings, matches
from training.checks import check_model

# Errors reported per cell; any other exception is a bug and keeps its traceback.
USER_ERRORS = (UserError, OSError)

PRECISION_FILE = "precision.txt"
STORES = ("store", "haystack_store")  # evaluation settings that select a prepared corpus


@dataclass(frozen=True)
class PlannedEvaluation:
    """One evaluation of one cell.

    Attributes:
        arguments: of evaluate.py. Preparing the corpora adds the path of another corpus.
        data: another corpus, tokenized as the run's; None: the run's own.
        store_setting: the setting of evaluate.py that selects the corpus.
    """

    name: str
    arguments: tuple[str, ...]
    settings: MeasurementSettings
    data: DataSettings | None = None
    store_setting: str = ""


@dataclass
class PlannedCell:
    """A cell with validated settings."""

    cell: GridCell
    settings: RunSettings
    run: Path
    evaluations: list[PlannedEvaluation] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def trained_range(self) -> tuple[int, int]:
        """The smallest and the largest trained length: of problems, for a task on symbols."""
        source = self.settings.data.source
        length = self.settings.train_length
        return source.bounds if isinstance(source, SymbolSource) else (length, length)

    def lengths_of(self, settings: Any) -> list[int]:
        """The lengths of an evaluation; the largest of each range of a task on symbols."""
        if isinstance(self.settings.data.source, SymbolSource):
            return [longest for _, longest in settings.ranges(self.trained_range)]
        return settings.grid(self.settings.train_length)

    def inputs(self, length: int) -> int:
        """The tokens of an input of a length: that of its problem, for a task on symbols."""
        source = self.settings.data.source
        if isinstance(source, SymbolSource):
            return source.model_copy(update={"lengths": length}).inputs(self.settings.data.bos)
        return length


@dataclass(frozen=True)
class StudyPlanner:
    """Plans cells.

    Attributes:
        shared: a folder of run directories that are named by their settings, so that several
            studies share them; None: of this study, named by its cells.
    """

    study: StudySettings
    folder: Path
    shared: Path | None = None
    _passed: set[str] = field(default_factory=set)  # checks
    _precision: list[str] = field(default_factory=list)  # at most one

    def plan(self, cells: Sequence[GridCell]) -> list[PlannedCell]:
        """Plans of all cells. Raises StudyError with every problem of every cell."""
        plans = []
        problems = CellProblems()
        for cell in cells:
            try:
                plans.append(self._plan_cell(cell, problems))
            except USER_ERRORS as error:
                problems.add(cell, str(error))
        problems.raise_any(len(cells))
        self._check_report(plans)
        return plans

    def _plan_cell(
        self,
        cell: GridCell,
        problems: "CellProblems",
    ) -> PlannedCell:
        run = None if self.shared is not None else self.folder / "runs" / cell.id
        given, _ = read_run_settings(cell.arguments, run)

        def folder_of(settings: RunSettings) -> Path:
            if self.shared is None:
                return self.folder / "runs" / cell.id
            names = [*scheme_names(settings), f"seed{settings.seed}", identity(settings)]
            return self.shared / "-".join(names)

        settings, run = resolve_precision(given, folder_of, self._auto_precision)
        self._once(
            check_model,
            settings.model_dump_json(exclude={"seed"}),
            settings,
        )
        # The source exists; this reads the list of its files.
        self._once(is_prepared, settings.data.model_dump_json(), settings.data)
        if is_run(run):
            rows = differences(Run(run).settings, settings)
            if changed := [key for key, _, _, is_free in rows if not is_free]:
                raise StudyError(
                    f"{run} was trained with other settings ({', '.join(changed)}); restore them, "
                    "move the run, or set another --run-dir"
                )
        plan = PlannedCell(cell, settings, run)
        for name, entry in self.study.evaluations.items():
            try:
                if not matches(cell.axes, entry.skip):
                    plan.evaluations.append(self._plan_evaluation(name, entry, plan))
            except USER_ERRORS as error:
                problems.add(cell, f"evaluations.{name}: {error}")
        return plan

    def _auto_precision(self, settings: RunSettings) -> str:
        """What training.precision=auto stands for in all cells: chosen with the first one."""
        if not self._precision:
            file = self.folder / PRECISION_FILE
            if file.is_file():
                self._precision.append(file.read_text(encoding="utf-8"))
            else:
                self._precision.append(auto_precision(settings))
        return self._precision[0]

    def keep_precision(self) -> None:
        """Store the choice for later calls of the study, which other machines may make."""
        if self._precision:
            write_text(self.folder / PRECISION_FILE, self._precision[0])

    def _once(self, check: Callable, key: str, *arguments: object) -> None:
        """Run a check once for all cells that share its `key`: many differ only in their seed."""
        name = f"{check.__name__} {key}"
        if name not in self._passed:
            check(*arguments)
            self._passed.add(name)

    def _check_report(self, plans: Sequence[PlannedCell]) -> None:
        """Check that the primary evaluation measures all primary lengths on some cell."""
        primary = self.study.report.primary or next(iter(self.study.evaluations), None)
        measured = set()
        for plan in plans:
            for evaluation in plan.evaluations:
                if evaluation.name == primary and isinstance(
                    evaluation.settings, EvaluationSettings
                ):
                    measured |= set(evaluation.settings.grid(plan.settings.train_length))
        unknown = [length for length in self.study.report.lengths or [] if length not in measured]
        if unknown and measured:
            raise StudyError(
                f"report.lengths: {', '.join(map(str, unknown))} not among the lengths of "
                f"evaluations.{primary}: {', '.join(map(str, sorted(measured)))}"
            )

    def _plan_evaluation(
        self,
        name: str,
        entry: EvaluationEntry,
        plan: PlannedCell,
    ) -> PlannedEvaluation:
        settings_type = _settings_class(tuple(entry.overrides))
        fields = settings_type.model_fields
        arguments = [*entry.overrides, f"folder={self._results_folder(name, entry)}"]
        if "unreachable" in fields:  # all schemes use the targets of the longest length
            arguments.append("unreachable=dash")
        settings = _load(settings_type, tuple(arguments))
        arguments += self._methods_of_variants(settings.methods, plan.cell)
        settings = _load(settings_type, tuple(arguments))
        key = plan.settings.model_dump_json(exclude={"seed"}) + str(settings.methods)
        self._once(self._check_methods, key, settings.methods, plan.settings)
        length = plan.settings.train_length  # it is always evaluated, so targets must fit into it
        if settings.protocol == "fixed-targets" and settings.targets > length:
            raise StudyError(
                f"targets={settings.targets} exceeds train_length={length}; decrease it"
            )
        if entry.data is None:
            return PlannedEvaluation(name, tuple(arguments), settings)
        store = next((key for key in STORES if key in fields), None)
        if store is None:
            raise StudyError(
                f"data: protocol={settings.protocol} reads no corpus; remove the setting"
            )
        data = _corpus(tuple(entry.data))
        return PlannedEvaluation(name, tuple(arguments), settings, data, store)

    def _results_folder(self, name: str, entry: EvaluationEntry) -> str:
        """The name of the results directory in a run; in a shared run, different evaluations of the
        same name have different ones."""
        if self.shared is None:
            return name
        return f"{name}-{canonical_hash([entry.overrides, entry.data])[:8]}"

    def _methods_of_variants(
        self, methods: list[str] | dict[str, list[str]], cell: GridCell
    ) -> list[str]:
        """The override that adds the methods of a scheme's variants to those of the evaluation."""
        more = []
        for variant in self.study.variants.values():
            is_own = variant.scheme == cell.axes.get(SCHEME) and variant.method != TRAINED
            if is_own and variant.method not in [*methods, *more]:
                more.append(variant.method)
        if not more:
            return []
        if isinstance(methods, list):
            return [f"methods={json.dumps([*methods, *more])}"]
        builtin = builtin_methods()
        if unknown := [method for method in more if method not in builtin]:
            raise StudyError(f"variants: unknown method {unknown[0]}")
        return [f"methods={json.dumps({method: builtin[method] for method in more})}"]

    def _check_methods(
        self,
        labels: list[str] | dict[str, list[str]],
        run: RunSettings,
    ) -> None:
        last, _ = last_trained(run, run.steps)
        problems = []
        for method in resolve_methods(labels, run.train_length):
            try:
                override(last, method.overrides)
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
        invalid = {cell.index for cells in self._cells.values() for cell in cells}
        lines = [f"{len(invalid)} of {counted(n_cells, 'cell')} cannot run; nothing was started:"]
        for problem, cells in self._cells.items():
            names = "; ".join(cell.id for cell in cells[:3])
            if len(cells) == n_cells > 1:
                names = "every cell"
            elif len(cells) > 3:
                names += f" and {len(cells) - 3} more"
            lines.append(f"{names}: {problem}".replace("\n", "\n    "))
        raise StudyError("\n       ".join(lines))


_settings_class = cache(settings_class)


@cache
def _load(settings_class: type[MeasurementSettings], arguments: tuple[str, ...]) -> Any:
    """Settings of an evaluation, which most cells share."""
    return load_settings(settings_class, list(arguments))


@cache
def _corpus(overrides: tuple[str, ...]) -> DataSettings:
    """Settings of another corpus, all of it held out; the run's tokenizer is filled in later."""
    fixed = ["data.valid_fraction=1", "data.tokenizer={name: bytes}"]
    data = load_settings(RunSettings, [*overrides, *fixed]).data
    if data.valid_source is not None:
        raise StudyError("data.valid_source: evaluations read all of data.source; remove it")
    is_prepared(data)  # checks that the source exists
    return data
