"""The corpora of a study: prepared and checked against all evaluations before any cell starts.

A corpus used only for evaluation is prepared with the tokenizer of the runs evaluated on it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from data import DataSettings, PreparedData, RunData, is_prepared
from data.files import canonical_hash, read_object
from data.preparation.prepare import prepare
from data.tokenizers import saved_settings
from errors import StudyError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.plan import choose_targets
from evaluation.stores import EvaluationStores
from run_directory.run import MANIFEST, is_run
from settings.load import load_settings
from studies.running.plan import USER_ERRORS, CellProblems, PlannedCell, PlannedEvaluation


class StudyCorpora:
    """Prepared corpora by their settings, each opened once. `make`: prepare the missing ones."""

    def __init__(self, console: Any, make: bool = True):
        self.console = console
        self.make = make
        self._open: dict[str, RunData | None] = {}
        self._target_errors: dict[str, str] = {}

    def of_run(self, plan: PlannedCell) -> RunData | None:
        """The training corpus of a cell; None if it is not prepared and `make` is false."""
        return self._prepared(plan.settings.data)

    def of_evaluation(self, plan: PlannedCell, evaluation: PlannedEvaluation) -> RunData | None:
        """The corpus of an evaluation: its own, or else the run's."""
        own = self.of_run(plan)
        data = evaluation.data
        if data is None or not isinstance(own, PreparedData):
            return own
        changes = {"tokenizer": saved_settings(own.folder / "tokenizer")}
        if data.root == type(data).model_fields["root"].default:
            changes["root"] = plan.settings.data.root
        return self._prepared(data.model_copy(update=changes))

    def select(self, plan: PlannedCell, evaluation: PlannedEvaluation) -> PlannedEvaluation:
        """The evaluation with the folder of its own corpus, if it has one that is prepared."""
        prepared = self.of_evaluation(plan, evaluation)
        if evaluation.data is None or not isinstance(prepared, PreparedData):
            return evaluation
        arguments = (*evaluation.arguments, f"{evaluation.store_setting}={prepared.folder}")
        settings = load_settings(type(evaluation.settings), list(arguments))
        return replace(evaluation, arguments=arguments, settings=settings)

    def check(self, plans: Sequence[PlannedCell]) -> None:
        """Prepare all corpora and select them in the evaluations; raises StudyError with every
        problem of every cell."""
        problems = CellProblems()
        for plan in plans:
            try:
                self._check_training_data(plan)
            except USER_ERRORS as error:
                problems.add(plan.cell, str(error))
                continue
            for i, evaluation in enumerate(plan.evaluations):
                try:
                    self._check_targets(plan, evaluation)
                    plan.evaluations[i] = self.select(plan, evaluation)
                except USER_ERRORS as error:
                    problems.add(plan.cell, f"evaluations.{evaluation.name}: {error}")
        problems.raise_any(len(plans))

    def _prepared(self, data: DataSettings) -> RunData | None:
        key = canonical_hash(data.model_dump(mode="json", exclude={"packing", "positions"}))
        if key not in self._open:
            is_ready = self.make or is_prepared(data)
            self._open[key] = prepare(data, self.console) if is_ready else None
        return self._open[key]

    def _check_training_data(self, plan: PlannedCell) -> None:
        own = self.of_run(plan)
        if own is None or not is_run(plan.run):
            return
        if read_object(plan.run / MANIFEST).get("data_hash", own.hash) != own.hash:
            raise StudyError(
                f"{plan.run} was trained on data other than those now in {own.folder}; move the "
                "run or restore the data"
            )

    def _check_targets(
        self,
        plan: PlannedCell,
        evaluation: PlannedEvaluation,
    ) -> None:
        """Choose targets as evaluate.py will; fails if documents are too few, too short or in the
        training data."""
        settings = evaluation.settings
        own = self.of_run(plan)
        prepared = self.of_evaluation(plan, evaluation)
        length = plan.settings.train_length
        if not isinstance(settings, EvaluationSettings):
            return
        if not isinstance(prepared, PreparedData) or not isinstance(own, PreparedData):
            return
        measured = settings.model_dump_json(exclude={"methods"})
        key = f"{prepared.folder}|{own.folder}|{length}|{measured}"
        if key not in self._target_errors:
            self._target_errors[key] = ""
            try:
                stores = EvaluationStores(
                    read=prepared.valid if settings.split == "valid" else prepared.train,
                    train=own.train,
                    earlier=[other.train for other in own.others],
                    overlaps=own.folder / "overlaps",
                )
                choose_targets(settings, stores, prepared.tokenizer, length, self.console)
            except USER_ERRORS as error:
                self._target_errors[key] = str(error)
        if self._target_errors[key]:
            raise StudyError(self._target_errors[key])
