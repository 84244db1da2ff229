"""The planned cells of a study, with validated settings, and their command lines.

A cell is one command line of train.py and one of evaluate.py for each of its evaluations. Its run
directory is the only record of progress: training is done if the checkpoint of the last step
exists, an evaluation if results of this checkpoint with the same settings exist.

Planning loads settings, builds models on the meta device and checks that files exist; it prepares
and trains nothing.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from data import DataSettings, is_prepared
from data.files import canonical_hash, read_object
from errors import StudyError, TrainingError, UserError
from evaluation.evaluate_runs import is_intact
from evaluation.evaluation_settings import (
    EvaluationSettings,
    MeasurementSettings,
    settings_class,
    tokens_of,
)
from evaluation.methods import TRAINED, builtin_methods, resolve_methods
from evaluation.reports.document import counted
from model import ModelError
from run_directory.checkpoints import Checkpoint, find_checkpoint, steps_of
from run_directory.parent_run import read_run_settings
from run_directory.position_overrides import override
from run_directory.precision import auto_precision, resolve_precision
from run_directory.run import Run, is_run
from run_directory.run_names import scheme_names
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import last_trained
from settings.load import differences, identity, load_settings
from studies.expressions import values_in
from studies.study_results_reader import SCHEME
from studies.study_settings import EvaluationEntry, GridCell, StudySettings, matches
from training.feasibility import check_model

# Errors reported per cell; any other exception is a bug and keeps its traceback.
USER_ERRORS = (UserError, OSError)

TRAINING = "training"  # name of the part of a cell that is not an evaluation
STORES = ("store", "haystack_store")  # evaluation settings that select a prepared corpus


@dataclass(frozen=True)
class Command:
    """A command line of train.py or evaluate.py. `part`: `training`, or the name of the
    evaluation."""

    part: str
    script: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["python", f"{self.script}.py", *self.arguments])


@dataclass(frozen=True)
class PlannedEvaluation:
    """One evaluation of one cell.

    Attributes:
        arguments: arguments of evaluate.py. If `data` is set, preparing the text adds its folder.
        data: another corpus, prepared with the run's tokenizer; None: the run's own corpus.
        store_setting: the setting of evaluate.py that selects the corpus.
    """

    name: str
    arguments: tuple[str, ...]
    settings: MeasurementSettings
    data: DataSettings | None = None
    store_setting: str = ""


@dataclass
class PlannedCell(GridCell):
    """A cell with validated settings, and its run directory."""

    settings: RunSettings
    run: Path
    evaluations: list[PlannedEvaluation] = field(default_factory=list)

    @property
    def shared_settings(self) -> str:
        """The settings as JSON without the seed; many cells differ only in the seed."""
        return self.settings.model_dump_json(exclude={"seed"})

    def commands(self) -> list[Command]:
        """All commands of the cell, in the order in which they run."""
        # `auto` is resolved once for all cells
        precision = f"training.precision={self.settings.training.precision}"
        train = (*self.arguments, precision, "--run-dir", str(self.run))
        return [
            Command(TRAINING, "train", train),
            *(
                Command(each.name, "evaluate", (str(self.run), *each.arguments, "--no-report"))
                for each in self.evaluations
            ),
        ]

    def commands_left(self) -> list[Command]:
        """The commands that are not done."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return self.commands()
        done = {TRAINING} | {
            each.name for each in self.evaluations if self.results(each, checkpoint) is not None
        }
        return [command for command in self.commands() if command.part not in done]

    def last_checkpoint(self) -> Checkpoint | None:
        """The intact checkpoint of the last step; None if training has not finished."""
        try:
            return find_checkpoint(self.run, step=self.settings.steps) if is_run(self.run) else None
        except TrainingError:  # missing or damaged
            return None

    def refuse_damaged(self) -> None:
        """Raise TrainingError if the checkpoint of the last step is damaged: training again would
        replace a model that may have been used."""
        if (last := self.settings.steps) in steps_of(self.run):
            find_checkpoint(self.run, last)

    def results(self, evaluation: PlannedEvaluation, checkpoint: Checkpoint) -> dict | None:
        """results.json of an evaluation. None if it is missing or altered, or was made from another
        checkpoint, with other settings that affect results, or with other overrides of a built-in
        method."""
        settings = evaluation.settings
        folder = self.run / "evaluation" / str(settings.folder)
        try:
            results = read_object(folder / "results.json")
            stored = load_settings(type(settings), [str(folder / "settings.yaml")])
        except USER_ERRORS:
            return None
        is_same = stored.identity() == settings.identity()
        is_same &= results.get("checkpoint_hash") == checkpoint.hash_of(settings.weights)
        if isinstance(settings.methods, list):  # the settings contain labels only
            known = resolve_methods([*builtin_methods()], self.settings.train_length)
            overrides = {method.label: [*method.overrides] for method in known}
            for label, method in results.get("methods", {}).items():
                is_same &= method["overrides"] == overrides.get(label)
        return results if is_same and is_intact(folder) else None


class CellProblems:
    """User errors of cells; equal errors are reported once."""

    def __init__(self):
        self._cells: dict[str, list[str]] = {}

    @contextmanager
    def of(self, cell: GridCell, prefix: str = "") -> Iterator[None]:
        """Collect a user error that the block raises."""
        try:
            yield
        except USER_ERRORS as error:
            self._cells.setdefault(f"{prefix}{error}", []).append(cell.id)

    def raise_any(self, n_cells: int) -> None:
        """Raise StudyError with all collected errors, if there are any."""
        if not self._cells:
            return
        invalid = set().union(*self._cells.values())
        lines = [f"{len(invalid)} of {counted(n_cells, 'cell')} cannot run; nothing was started:"]
        for problem, cells in self._cells.items():
            names = cells[0] if len(cells) == 1 else f"{len(cells)} cells such as {cells[0]}"
            lines.append(f"{names}: {problem}".replace("\n", "\n    "))
        raise StudyError("\n       ".join(lines))


class StudyPlanner:
    """Plans cells.

    Args:
        shared: a folder of run directories named by their settings, which several studies share;
            None: the study has its own run directories, named by its cells.
    """

    def __init__(self, study: StudySettings, folder: Path, shared: Path | None = None):
        self.study = study
        self.folder = folder
        self.shared = shared
        self._precision = ""

    def plan(self, cells: Sequence[GridCell]) -> list[PlannedCell]:
        """Plans of all cells. Raises StudyError with all errors of all cells."""
        plans = []
        problems = CellProblems()
        for cell in cells:
            with problems.of(cell):
                plans.append(self._plan_cell(cell, problems))
        problems.raise_any(len(cells))
        self._check_report(plans)
        self._check_trend(plans)
        return plans

    def _plan_cell(self, cell: GridCell, problems: CellProblems) -> PlannedCell:
        own_run = self.folder / "runs" / cell.id

        def folder_of(settings: RunSettings) -> Path:
            if self.shared is None:
                return own_run
            names = [*scheme_names(settings), f"seed{settings.seed}", identity(settings)]
            return self.shared / "-".join(names)

        given, _ = read_run_settings(cell.arguments, None if self.shared else own_run)
        settings, run = resolve_precision(given, folder_of, self._auto_precision)
        plan = PlannedCell(cell.axes, cell.arguments, settings, run)
        _check_run(plan.shared_settings)
        if is_run(run):
            rows = differences(Run(run).settings, settings)
            if changed := [key for key, _, _, may_change in rows if not may_change]:
                raise StudyError(
                    f"trained in {run.parent} with other settings ({', '.join(changed)}); restore "
                    "them, move the runs, or set another --run-dir"
                )
        for name, entry in self.study.evaluations.items():
            with problems.of(cell, f"evaluations.{name}: "):
                if not matches(cell.axes, entry.skip):
                    plan.evaluations.append(self._plan_evaluation(name, entry, plan))
        return plan

    def _auto_precision(self, settings: RunSettings) -> str:
        """The precision that training.precision=auto selects for all cells: that of an earlier run
        of the study, possibly from another machine, or else the automatic precision of the first
        cell."""
        if not self._precision:
            runs = sorted(self.folder.glob("runs/*/settings.yaml"))
            earlier = [Run(file.parent).settings.training.precision for file in runs[:1]]
            self._precision = earlier[0] if earlier else auto_precision(settings)
        return self._precision

    def _check_report(self, plans: Sequence[PlannedCell]) -> None:
        """Check that the primary evaluation measures every primary length in at least one cell."""
        report = self.study.report
        primary = report.primary or next(iter(self.study.evaluations), None)
        measured = {
            length
            for plan in plans
            for evaluation in plan.evaluations
            if evaluation.name == primary and isinstance(evaluation.settings, EvaluationSettings)
            for length in evaluation.settings.grid(plan.settings.train_length)
        }
        unknown = set(report.lengths or ()) - measured
        if unknown and measured:
            raise StudyError(
                f"report.lengths: evaluations.{primary} does not measure "
                f"{', '.join(map(str, sorted(unknown)))}; choose from "
                f"{', '.join(map(str, sorted(measured)))}"
            )

    def _check_trend(self, plans: Sequence[PlannedCell]) -> None:
        """Check that the evaluations measure what the effects of the trend read."""
        if self.study.trend is None:
            return
        problems = CellProblems()
        for name, tree in self.study.trend.expressions(self.study.grid).items():
            for plan, value in product(plans, values_in(tree)):
                labels = {axis: str(value[axis]) for axis in plan.axes if axis in value}
                if labels.items() <= plan.axes.items():
                    with problems.of(plan, f"trend.effects.{name}: "):
                        _check_measured(plan, value)
        problems.raise_any(len(plans))

    def _plan_evaluation(
        self, name: str, entry: EvaluationEntry, plan: PlannedCell
    ) -> PlannedEvaluation:
        results_folder = name
        if self.shared is not None:  # different evaluations with equal names get different folders
            results_folder += f"-{canonical_hash([entry.overrides, entry.data])[:8]}"
        arguments = [*entry.overrides, f"folder={results_folder}"]
        fields = settings_class(arguments).model_fields
        if "unreachable" in fields:  # all schemes use the targets of the longest length
            arguments.append("unreachable=dash")
        settings = _evaluation_settings(tuple(arguments))
        arguments += self._methods_of_variants(settings.methods, plan)
        settings = _evaluation_settings(tuple(arguments))
        _check_methods(json.dumps(settings.methods), plan.shared_settings)
        if entry.data is None:
            return PlannedEvaluation(name, tuple(arguments), settings)
        store = next((key for key in STORES if key in fields), None)
        if store is None:
            raise StudyError(
                f"data: protocol={settings.protocol} reads no corpus; remove the setting"
            )
        data = _corpus(tuple(entry.data))
        return PlannedEvaluation(name, tuple(arguments), settings, data, store)

    def _methods_of_variants(
        self, methods: list[str] | dict[str, list[str]], cell: GridCell
    ) -> list[str]:
        """The override that adds the methods of a scheme's variants to the methods of the
        evaluation."""
        of_scheme = [
            variant.method
            for variant in self.study.variants.values()
            if variant.scheme == cell.axes.get(SCHEME)
        ]
        more = [each for each in dict.fromkeys(of_scheme) if each not in [*methods, TRAINED]]
        if not more:
            return []
        if isinstance(methods, list):
            return [f"methods={json.dumps([*methods, *more])}"]
        builtin = builtin_methods()
        if unknown := [method for method in more if method not in builtin]:
            raise StudyError(f"variants: unknown method {unknown[0]}")
        return [f"methods={json.dumps({method: builtin[method] for method in more})}"]


def _check_measured(plan: PlannedCell, value: dict) -> None:
    """Raise StudyError if the evaluations of a cell do not measure a value of an expression."""
    own = {each.name: each.settings for each in plan.evaluations}
    name = value.get("evaluation") or next(iter(own), None)
    if name not in own:
        raise StudyError(f"the cell has no evaluation {name or ''}; see evaluations.*.skip")
    settings = own[name]
    if not isinstance(settings, EvaluationSettings):
        return
    method = value.get("method", TRAINED)
    if method not in [TRAINED, *settings.methods] and not settings.matrix:
        raise StudyError(f"evaluations.{name} does not measure the method {method}")
    length = value.get("length")
    trained_length = plan.settings.train_length
    if length and tokens_of(length, trained_length) not in settings.grid(trained_length):
        raise StudyError(f"evaluations.{name} does not measure the length {length}")


# Checks and settings that many cells share are computed once.


@cache
def _check_run(settings: str) -> None:
    """Raise a user error if the model cannot be built or the source does not exist."""
    run = RunSettings.model_validate_json(settings)
    check_model(run)
    is_prepared(run.data)  # reads the list of the source's files


@cache
def _check_methods(methods: str, settings: str) -> None:
    """Raise StudyError if methods do not apply to a run."""
    run = RunSettings.model_validate_json(settings)
    last, _ = last_trained(run, run.steps)
    problems = []
    for method in resolve_methods(json.loads(methods), run.train_length):
        try:
            override(last, method.overrides)
        except (ModelError, TrainingError) as error:
            problems.append(f"method {method.label!r}: {error}")
    if problems:
        raise StudyError("; ".join(problems))


@cache
def _evaluation_settings(arguments: tuple[str, ...]) -> Any:
    return load_settings(settings_class(arguments), arguments)


@cache
def _corpus(overrides: tuple[str, ...]) -> DataSettings:
    """Settings of another corpus, all of it held out; the run's tokenizer is set later."""
    fixed = ["data.valid_fraction=1", "data.tokenizer={name: bytes}"]
    data = load_settings(RunSettings, [*overrides, *fixed]).data
    if data.valid_source is not None:
        raise StudyError("data.valid_source: evaluations read all of data.source; remove it")
    is_prepared(data)  # checks that the source exists
    return data
