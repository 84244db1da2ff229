"""The corpora of a study: prepared and checked against all evaluations before any cell starts.

A corpus used only for evaluation is prepared with the tokenizer of the runs evaluated on it.
"""

from collections.abc import Sequence
from typing import Any

from data import DataSettings, PreparedData, prepare, prepared_folder
from data.files import read_object
from data.hashing import canonical_hash
from data.tokenizers import saved_settings
from errors import StudyError
from evaluation.scoring.evaluate import choose_targets
from evaluation.settings import EvaluationSettings
from studies.running.plan import USER_ERRORS, CellProblems, PlannedCell, PlannedEvaluation
from training.run.directory import MANIFEST, is_run


class StudyTexts:
    """Prepared corpora by their settings, each opened once. `make`: prepare those that are missing."""

    def __init__(self, console: Any, make: bool = True):
        self.console = console
        self.make = make
        self._open: dict[str, PreparedData | None] = {}

    def of_run(self, plan: PlannedCell) -> PreparedData | None:
        """The training corpus of a cell; None if it is not prepared and `make` is false."""
        return self._prepared(plan.settings.data)

    def of_evaluation(
        self, plan: PlannedCell, evaluation: PlannedEvaluation
    ) -> PreparedData | None:
        """The corpus of an evaluation: its own, or else the run's."""
        own = self.of_run(plan)
        data = evaluation.data
        if data is None or own is None:
            return own
        tokenizer = saved_settings(own.folder / "tokenizer")
        default_root = data.root == type(data).model_fields["root"].default
        root = plan.settings.data.root if default_root else data.root
        return self._prepared(data.model_copy(update={"tokenizer": tokenizer, "root": root}))

    def arguments(self, plan: PlannedCell, evaluation: PlannedEvaluation) -> list[str]:
        """The override of evaluate.py that selects another corpus, if any."""
        prepared = self.of_evaluation(plan, evaluation) if evaluation.data is not None else None
        return [] if prepared is None else [f"{evaluation.store_setting}={prepared.folder}"]

    def _prepared(self, data: DataSettings) -> PreparedData | None:
        key = canonical_hash(data.model_dump(mode="json", exclude={"packing", "positions"}))
        if key not in self._open:
            ready = self.make or (prepared_folder(data) / "prepared.json").is_file()
            self._open[key] = prepare(data, self.console) if ready else None
        return self._open[key]

    def check(self, plans: Sequence[PlannedCell]) -> None:
        """Prepare all corpora; raises StudyError with every problem of every cell."""
        problems = CellProblems()
        drawn = {}
        for plan in plans:
            try:
                own = self.of_run(plan)
                if (
                    own
                    and is_run(plan.run)
                    and read_object(plan.run / MANIFEST).get("data_hash", own.hash) != own.hash
                ):
                    raise StudyError(
                        f"{plan.run} was trained on data other than those now in {own.folder}; move the run "
                        "or restore the data"
                    )
            except USER_ERRORS as error:
                problems.add(plan.cell, str(error))
                continue
            for evaluation in plan.evaluations:
                try:
                    self._check_targets(plan, evaluation, drawn)
                except USER_ERRORS as error:
                    problems.add(plan.cell, f"evaluations.{evaluation.name}: {error}")
        problems.raise_any(len(plans))

    def _check_targets(
        self, plan: PlannedCell, evaluation: PlannedEvaluation, drawn: dict[str, str]
    ) -> None:
        """Choose targets as evaluate.py will; fails if documents are too few, too short or in the training
        data."""
        settings = evaluation.settings
        own = self.of_run(plan)
        prepared = self.of_evaluation(plan, evaluation)
        length = plan.settings.train_length
        if prepared is None or own is None or not isinstance(settings, EvaluationSettings):
            return
        key = f"{prepared.folder}|{own.folder}|{length}|{settings.model_dump_json(exclude={'methods'})}"
        if key not in drawn:
            drawn[key] = ""
            store = prepared.valid if settings.split == "valid" else prepared.train
            how = {"cache": own.folder / "overlaps", "console": self.console}
            others = [other.train for other in own.others]
            try:
                choose_targets(
                    settings, store, own.train, prepared.tokenizer, length, earlier=others, **how
                )
            except USER_ERRORS as error:
                drawn[key] = str(error)
        if drawn[key]:
            raise StudyError(drawn[key])
