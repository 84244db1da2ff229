"""The texts of a study: prepared and checked against all evaluations before any cell starts.

A corpus used only for evaluation is prepared with the tokenizer of the runs evaluated on it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from data import DataSettings, PreparedData, RunData, is_prepared
from data.files import canonical_hash, read_object
from data.preparation.preparation import prepare
from data.tokenizers import saved_settings
from errors import StudyError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.windows import choose_targets
from evaluation.stores import EvaluationStores
from run_directory.console import Console
from run_directory.run import MANIFEST, is_run
from settings.load import load_settings
from studies.planned_cells import USER_ERRORS, CellProblems, PlannedCell, PlannedEvaluation


class StudyTexts:
    """Prepared texts by their settings, each opened once. `make`: prepare the missing ones."""

    def __init__(self, console: Console, make: bool = True):
        self.console = console
        self.make = make
        self._open: dict[str, RunData | None] = {}
        self._checked: dict[tuple, str] = {}  # the error of a choice of targets, or ""

    def of(self, data: DataSettings) -> RunData | None:
        """None if it is not prepared and `make` is false."""
        key = canonical_hash(data.model_dump(mode="json", exclude={"packing", "positions"}))
        if key not in self._open:
            is_ready = self.make or is_prepared(data)
            self._open[key] = prepare(data, self.console) if is_ready else None
        return self._open[key]

    def prepare(self, plans: Sequence[PlannedCell]) -> None:
        """Prepare all texts and select them in the evaluations; raises StudyError with every
        problem of every cell."""
        problems = CellProblems()
        for plan in plans:
            try:
                own = self.of(plan.settings.data)
                _check_trained_text(plan, own)
            except USER_ERRORS as error:
                problems.add(plan.cell, str(error))
                continue
            for i, evaluation in enumerate(plan.evaluations):
                try:
                    if isinstance(own, PreparedData):
                        plan.evaluations[i] = self._prepare_evaluation(plan, evaluation, own)
                except USER_ERRORS as error:
                    problems.add(plan.cell, f"evaluations.{evaluation.name}: {error}")
        problems.raise_any(len(plans))

    def _prepare_evaluation(
        self, plan: PlannedCell, evaluation: PlannedEvaluation, own: PreparedData
    ) -> PlannedEvaluation:
        """The evaluation with the folder of its own corpus, if it has one; raises EvaluationError
        where its documents are too few, too short or in the training data."""
        text = own
        if data := evaluation.data:
            changes: dict[str, Any] = {"tokenizer": saved_settings(own.folder / "tokenizer")}
            if data.root == type(data).model_fields["root"].default:
                changes["root"] = plan.settings.data.root
            text = self.of(data.model_copy(update=changes))
            if not isinstance(text, PreparedData):
                return evaluation
            arguments = (*evaluation.arguments, f"{evaluation.store_setting}={text.folder}")
            settings = load_settings(type(evaluation.settings), arguments)
            evaluation = replace(evaluation, arguments=arguments, settings=settings)
        settings = evaluation.settings
        if isinstance(settings, EvaluationSettings):
            length = plan.settings.train_length
            key = (own.folder, length, settings.model_dump_json(exclude={"methods", "folder"}))
            if key not in self._checked:
                self._checked[key] = self._target_error(settings, text, own, length)
            if error := self._checked[key]:
                raise StudyError(error)
        return evaluation

    def _target_error(
        self, settings: EvaluationSettings, text: PreparedData, own: PreparedData, length: int
    ) -> str:
        """Choose targets as evaluate.py will."""
        stores = EvaluationStores(
            read=text.valid if settings.split == "valid" else text.train,
            train=own.train,
            earlier=[other.train for other in own.others],
            overlaps=own.folder / "overlaps",
        )
        try:
            choose_targets(settings, stores, text.tokenizer, length, self.console)
        except USER_ERRORS as error:
            return str(error)
        return ""


def _check_trained_text(plan: PlannedCell, own: RunData | None) -> None:
    """Raise StudyError if a run was trained on another text than its settings now give."""
    if own is None or not is_run(plan.run):
        return
    if read_object(plan.run / MANIFEST).get("data_hash", own.hash) != own.hash:
        now = f"in {own.folder}" if isinstance(own, PreparedData) else "generated by its task"
        raise StudyError(
            f"{plan.run} was trained on data other than those now {now}; move the run or restore "
            "the data"
        )
