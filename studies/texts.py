"""The text of a study: prepared before the first cell needs it, and measured against what will be asked.

A corpus that is only evaluated on is prepared with the tokenizer of the runs that are evaluated on it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import ByteTokenizer, DataSettings, Prepared, prepare, prepared_folder
from data.files import canonical
from data.settings import BytesSettings, SentencePieceSettings
from evaluation import EvaluationSettings, Text
from evaluation.contamination import screen
from evaluation.plan import make_plan
from studies.errors import StudyError
from studies.plan import USER_ERRORS, CellPlan, Evaluation, Refusals
from training.files import read_json
from training.run import MANIFEST, is_run


class Texts:
    """Prepared text by its settings, each opened once. With `make`, what is missing is prepared."""

    def __init__(self, console: Any, make: bool = True):
        self.console, self.make = console, make
        self._open: dict[bytes, Prepared | None] = {}

    def of_run(self, plan: CellPlan) -> Prepared | None:
        """What the cell trains on; None where it is not prepared, and shall not be."""
        return self._prepared(plan.settings.data)

    def of_evaluation(self, plan: CellPlan, evaluation: Evaluation) -> Prepared | None:
        """What the evaluation reads; the same as the run if it has no corpus of its own."""
        own = self.of_run(plan)
        if evaluation.data is None or own is None:
            return own
        model = str(own.folder / "tokenizer" / "tokenizer.model")
        spoken = (
            BytesSettings()
            if isinstance(own.tokenizer, ByteTokenizer)
            else SentencePieceSettings(model=model)
        )
        asked = evaluation.data
        beside = asked.root == type(asked).model_fields["root"].default
        root = plan.settings.data.root if beside else asked.root
        return self._prepared(asked.model_copy(update={"tokenizer": spoken, "root": root}))

    def words(self, plan: CellPlan, evaluation: Evaluation) -> list[str]:
        """The word that names another corpus to evaluate.py."""
        prepared = self.of_evaluation(plan, evaluation) if evaluation.data is not None else None
        return [] if prepared is None else [f"{evaluation.place}={prepared.folder}"]

    def _prepared(self, data: DataSettings) -> Prepared | None:
        key = canonical(data.model_dump(mode="json", exclude={"packing", "positions"}))
        if key not in self._open:
            ready = self.make or (prepared_folder(data) / "prepared.json").is_file()
            self._open[key] = prepare(data, self.console) if ready else None
        return self._open[key]

    def check(self, plans: Sequence[CellPlan]) -> None:
        """Prepare everything and refuse what its text does not allow: StudyError with every reason of every
        cell."""
        refused, drawn = Refusals(), {}
        for plan in plans:
            try:
                own = self.of_run(plan)
                if own is not None:
                    _check_same_data(plan.run, own)
            except USER_ERRORS as error:
                refused.add(plan.cell, str(error))
                continue
            for evaluation in plan.evaluations:
                try:
                    self._check_lengths(plan, evaluation, drawn)
                except USER_ERRORS as error:
                    refused.add(plan.cell, f"evaluations.{evaluation.name}: {error}")
        refused.raise_any(len(plans))

    def _check_lengths(self, plan: CellPlan, evaluation: Evaluation, drawn: dict[str, str]) -> None:
        """Draw the targets as evaluate.py will: documents may be too few, too short, or trained on."""
        settings, prepared = evaluation.settings, self.of_evaluation(plan, evaluation)
        if prepared is None or not isinstance(settings, EvaluationSettings):
            return
        length = plan.settings.train_length
        key = f"{prepared.folder}|{length}|{settings.model_dump_json(exclude={'rules'})}"
        if key not in drawn:
            drawn[key] = ""
            store = prepared.valid if settings.split == "valid" else prepared.train
            tokenizer = prepared.tokenizer
            try:
                text = Text(store, settings.bos, tokenizer.bos_id)
                windows = make_plan(settings, text, store.hash, tokenizer.hash, length).truncated
                if (own := self.of_run(plan)) is not None:
                    how = {"cache": own.folder / "overlaps", "console": self.console}
                    others = [other.train for other in own.others]
                    screen(settings.contamination, text, windows, own.train, tokenizer, earlier=others, **how)
            except USER_ERRORS as error:
                drawn[key] = str(error)
        if drawn[key]:
            raise StudyError(drawn[key])


def _check_same_data(run: Path, prepared: Prepared) -> None:
    if is_run(run) and read_json(run / MANIFEST).get("data_hash", prepared.hash) != prepared.hash:
        raise StudyError(
            f"{run} was trained on other data than {prepared.folder} holds now; move it away, or restore them"
        )
