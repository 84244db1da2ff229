"""What a study is about to do: every cell with its settings and evaluations, or all reasons why it cannot.

Nothing is prepared or trained here: settings are read, models are built without memory, files are looked for.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data import DataError, DataSettings, prepared_folder
from evaluation import EvaluationError, EvaluationSettings, resolve_rules
from evaluation.rules import TRAINED, Rule
from evaluation.settings import MeasurementSettings
from model import ModelError
from studies.document import counted
from studies.errors import StudyError
from studies.grid import Cell
from studies.settings import SCHEME, EvaluationEntry, StudySettings, matches
from training.config import differences, load_settings
from training.errors import TrainingError
from training.overrides import override
from training.run import is_run, read_settings
from training.settings import RunSettings
from training.stages import last_trained
from training.start import check_model

# What a cell can be refused for; anything else is a bug and keeps its traceback.
USER_ERRORS = (StudyError, TrainingError, EvaluationError, ModelError, DataError, OSError)

STORES = ("store", "haystack_store")  # settings of evaluations that name a prepared corpus


class Kind(Protocol):
    """A kind of evaluation as evaluate.py lists it."""

    @property
    def title(self) -> str: ...

    @property
    def settings(self) -> type[MeasurementSettings]: ...


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one cell. `words` are evaluate.py's, but for the folder of another corpus."""

    name: str
    words: tuple[str, ...]
    settings: MeasurementSettings
    data: DataSettings | None = None  # another corpus; its tokenizer is the run's
    place: str = ""  # the setting of evaluate.py that names the corpus


@dataclass
class CellPlan:
    """A cell that can work as far as settings tell."""

    cell: Cell
    settings: RunSettings
    run: Path
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass(frozen=True)
class Planner:
    """Makes plans of cells. `kind_of(words)` finds the kind of an evaluation; `builtin` are the rules of
    configs/evaluation/rules.yaml."""

    study: StudySettings
    folder: Path
    kind_of: Callable[[list[str]], Kind]
    builtin: dict[str, list[str]]

    def plan(self, cells: Sequence[Cell]) -> list[CellPlan]:
        """Plans of all cells. Raises StudyError with every reason of every cell that cannot work."""
        plans, refused = [], Refusals()
        for cell in cells:
            try:
                plans.append(self._cell(cell, refused))
            except USER_ERRORS as error:
                refused.add(cell, str(error))
        refused.raise_any(len(cells))
        self._check_report(plans)
        return plans

    def _cell(self, cell: Cell, refused: "Refusals") -> CellPlan:
        settings = load_settings(RunSettings, list(cell.words))
        check_model(settings)
        prepared_folder(settings.data)  # looks for the source
        run = self.folder / "runs" / cell.id
        if is_run(run):
            barred = [key for key, _, _, free in differences(read_settings(run), settings) if not free]
            if barred:
                raise StudyError(
                    f"{run} was trained with other settings ({', '.join(barred)}); move it away, change them "
                    "back, or give the study another --folder"
                )
        plan = CellPlan(cell, settings, run)
        for name, entry in self.study.evaluations.items():
            if matches(cell.axes, entry.skip):
                continue
            try:
                plan.evaluations.append(self._evaluation(name, entry, cell, settings))
            except USER_ERRORS as error:
                refused.add(cell, f"evaluations.{name}: {error}")
        return plan

    def _check_report(self, plans: Sequence[CellPlan]) -> None:
        """The primary lengths have to be among those that the primary evaluation measures on some cell."""
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

    def _evaluation(self, name: str, entry: EvaluationEntry, cell: Cell, run: RunSettings) -> Evaluation:
        kind = self.kind_of(entry.words)
        fields = kind.settings.model_fields
        words = [*entry.words, f"folder={name}"]
        if "unreachable" in fields:  # all schemes share the targets of the longest length
            words.append("unreachable=dash")
        settings: Any = load_settings(kind.settings, words)
        if "rules" in fields:
            words += self._with_rules(settings.rules, self._rules_of_variants(cell))
            settings = load_settings(kind.settings, words)
            self._check_rules(settings.rules, run)
        if "lengths" in fields and "targets" in fields:
            _check_lengths(settings, run)
        if entry.data is None:
            return Evaluation(name, tuple(words), settings)
        place = next((key for key in STORES if key in fields), None)
        if place is None:
            raise StudyError(f"{kind.title.lower()}: reads no corpus, so data has no meaning; remove it")
        return Evaluation(name, tuple(words), settings, _corpus(entry.data), place)

    def _rules_of_variants(self, cell: Cell) -> list[str]:
        mine = [one.rule for one in self.study.variants.values() if one.scheme == cell.axes.get(SCHEME)]
        return list(dict.fromkeys(rule for rule in mine if rule != TRAINED))

    def _with_rules(self, asked: list[str] | dict[str, list[str]], wanted: list[str]) -> list[str]:
        """A word that adds the rules of a scheme's variants to those of the evaluation."""
        more = [rule for rule in wanted if rule not in asked]
        if not more:
            return []
        if isinstance(asked, list):
            return [f"rules={json.dumps([*asked, *more])}"]
        unknown = [rule for rule in more if rule not in self.builtin]
        if unknown:
            raise StudyError(f"a variant asks for the unknown rule {unknown[0]}")
        return [f"rules={json.dumps({rule: self.builtin[rule] for rule in more})}"]

    def _check_rules(self, asked: list[str] | dict[str, list[str]], run: RunSettings) -> None:
        last, _ = last_trained(run, run.steps)
        problems = []
        rules: list[Rule] = resolve_rules(asked, self.builtin, run.train_length)
        for rule in rules:
            try:
                override(last, rule.words)
            except (ModelError, TrainingError) as error:
                problems.append(f"rule {rule.label!r}: {error}")
        if problems:
            raise StudyError("; ".join(problems))


class Refusals:
    """Reasons why cells cannot work, equal ones told once."""

    def __init__(self):
        self._cells: dict[str, list[Cell]] = {}

    def add(self, cell: Cell, reason: str) -> None:
        self._cells.setdefault(reason, []).append(cell)

    def raise_any(self, n_cells: int) -> None:
        """Raise StudyError with all of them, if there are any."""
        if not self._cells:
            return
        count = len({cell.index for cells in self._cells.values() for cell in cells})
        # What a reason has below its first line stands further in than the cells.
        lines = [
            f"{_listed(cells, n_cells)}: {reason}".replace("\n", "\n    ")
            for reason, cells in self._cells.items()
        ]
        raise StudyError(
            f"{count} of {counted(n_cells, 'cell')} cannot work; nothing was started:\n       "
            + "\n       ".join(lines)
        )


def _listed(cells: list[Cell], n_cells: int) -> str:
    if len(cells) == n_cells > 1:
        return "every cell"
    more = f" and {len(cells) - 2} more" if len(cells) > 3 else ""
    return "; ".join(cell.id for cell in (cells[:2] if more else cells)) + more


def _check_lengths(settings: Any, run: RunSettings) -> None:
    """The trained length is in every grid of lengths, so targets must fit in it too."""
    if settings.targets > run.train_length and getattr(settings, "protocol", "") == "fixed-targets":
        raise StudyError(f"targets={settings.targets} is more than train_length={run.train_length}; lower it")


def _corpus(words: list[str]) -> DataSettings:
    """Settings of another corpus, all of it held-out text, before the tokenizer of a run is put in."""
    data = load_settings(RunSettings, [*words, "data.valid_fraction=1", "data.tokenizer={name: bytes}"]).data
    if data.valid_source is not None:
        raise StudyError("data.valid_source: an evaluation reads all of data.source; remove it")
    prepared_folder(data)  # looks for the source
    return data
