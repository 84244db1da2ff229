"""The kinds of evaluation behind one interface: loss of text, tasks, attention, generated text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, ClassVar

from data.tasks import HaystackTask, Task
from errors import EvaluationError
from evaluation.diagnostics.attention import AttentionSession
from evaluation.diagnostics.diagnostic_settings import (
    AttentionDiagnosticSettings,
    DiagnosticSettings,
    GenerationDiagnosticSettings,
)
from evaluation.diagnostics.generation import GenerationSession
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import (
    ContaminationSettings,
    EvaluationSettings,
    MeasurementSettings,
)
from evaluation.ranks import EvaluationRanks
from evaluation.reports.diagnostic_report import attention_report, generation_report
from evaluation.reports.loss_report import comparison_report, loss_report
from evaluation.reports.report import EvaluationReport
from evaluation.reports.task_report import item_report, task_report
from evaluation.scoring.byte_spans import choose_byte_spans
from evaluation.scoring.evaluate import EvaluationResult, EvaluationSession
from evaluation.scoring.methods import (
    TRAINED,
    TRUNCATE,
    Method,
    compatible_methods,
    resolve_methods,
)
from evaluation.scoring.plan import ChosenTargets, choose_targets
from evaluation.scoring.session import CellSession
from evaluation.statistics.loss_table import analyze
from evaluation.stores import haystacks, open_stores
from evaluation.tasks.drawn_items import draw_items
from evaluation.tasks.item_session import ItemResult, ItemSession
from evaluation.tasks.task_session import TaskSession
from evaluation.tasks.task_settings import TaskEvaluationSettings


class Evaluation(ABC):
    """One kind of evaluation of `runs`: makes a session for each run, and a report of their
    results.

    Args:
        dry_run: the sessions only forecast.
    """

    is_shared: ClassVar[bool] = False  # several processes and several runs are supported

    def __init__(
        self,
        settings: Any,
        runs: Sequence[EvaluatedRun],
        ranks: EvaluationRanks,
        console: Any,
        dry_run: bool = False,
    ):
        self.settings = settings
        self.runs = runs
        self.ranks = ranks
        self.console = console
        self.dry_run = dry_run

    @abstractmethod
    def session(self, run: EvaluatedRun) -> CellSession:
        """Choose the methods and draw the targets."""

    @abstractmethod
    def report(self, results: list[Any], facts: dict) -> EvaluationReport:
        """Analyze the result of every run; `facts` (command, date) go to results.json."""

    def methods(self, run: EvaluatedRun) -> list[Method]:
        """The methods of the settings, without those that equal the checkpoint as trained."""
        methods = resolve_methods(self.settings.methods, run.model.trained_length)
        schemes = run.model.schemes(methods)
        kept = [
            method
            for method in methods
            if method.label in (TRAINED, TRUNCATE) or schemes[method.label] != schemes[TRAINED]
        ]
        same = [method.label for method in methods if method not in kept]
        if same and self.ranks.main:
            self.console.warn(
                f"{', '.join(same)}: {run.name} was trained this way; shown as {TRAINED}"
            )
        return kept


class LossEvaluation(Evaluation):
    """Loss of text by length or by position; several runs are compared on the same targets."""

    is_shared = True
    settings: EvaluationSettings

    def __init__(
        self,
        settings: EvaluationSettings,
        runs: Sequence[EvaluatedRun],
        *more,
        **options,
    ):
        settings = for_all_runs(settings, runs) if len(runs) > 1 else settings
        super().__init__(settings, runs, *more, **options)
        self.left_out: dict[str, str] = {}
        self.targets: list[ChosenTargets] = []  # of each run
        if len(_tokenizers(runs)) == 1:
            self.stores = [open_stores(settings, runs)] * len(runs)
        else:
            self.stores = [open_stores(settings, [run]) for run in runs]

    def methods(self, run: EvaluatedRun) -> list[Method]:
        methods = super().methods(run)
        if not self.settings.matrix:
            return methods
        more, self.left_out = compatible_methods(
            run.model.trained_length,
            lambda overrides: run.model.offered(overrides, self.settings.bos),
        )
        labels = [method.label for method in methods]
        return methods + [method for method in more if method.label not in labels]

    def session(self, run: EvaluatedRun) -> EvaluationSession:
        self.targets = self.targets or self.choose()
        return EvaluationSession(
            self.settings,
            run.model,
            self.targets[self.runs.index(run)],
            self.methods(run),
            cells=run.cells,
            console=self.console,
            ranks=self.ranks,
        )

    def choose(self) -> list[ChosenTargets]:
        """The targets of each run."""
        settings = self.settings
        if self.dry_run:  # skips the search for passages shared with the training text
            unchecked = ContaminationSettings(check=False)
            settings = settings.model_copy(update={"contamination": unchecked})
        targets = []
        for run, stores in zip(self.runs, self.stores, strict=True):
            length = run.model.trained_length
            check_windows(settings, length)
            targets.append(choose_targets(settings, stores, run.tokenizer, length, self.console))
        return targets if len(_tokenizers(self.runs)) == 1 else choose_byte_spans(targets)

    def report(self, results: list[EvaluationResult], facts: dict) -> EvaluationReport:
        run = self.runs[0]
        facts = {"corpus": self.stores[0].name, "changed": run.changed, **facts}
        identity = self.settings.identity()
        if len(self.runs) > 1:
            hashes = [run.model.checkpoint_hash for run in self.runs]
            digest = sha256("".join([identity, *hashes]).encode()).hexdigest()
            names = [run.name for run in self.runs]
            return comparison_report(names, results, f"comparison-{digest[:8]}", facts)
        (result,) = results
        result.left_out = self.left_out
        result.facts |= facts
        name = f"{self.settings.protocol}-{identity}"
        return loss_report(result, analyze(result), name)


def _tokenizers(runs: Sequence[EvaluatedRun]) -> set[str]:
    return {run.tokenizer.hash for run in runs}


def check_windows(settings: EvaluationSettings, trained_length: int) -> None:
    """Raise EvaluationError for windows that are too short for the processes that share them."""
    shortest = settings.grid(trained_length)[0]
    chunks = 2 * settings.context
    if settings.context > 1 and shortest < chunks:
        raise EvaluationError(
            f"context = {settings.context} requires windows of {chunks} tokens or more, two for "
            f"each process; the shortest length is {shortest}: lower context, or evaluate longer "
            "lengths"
        )


def for_all_runs(settings: EvaluationSettings, runs: Sequence[EvaluatedRun]) -> EvaluationSettings:
    """Settings that score all runs at the same lengths.

    Raises EvaluationError for runs that cannot be compared, and for settings that a comparison
    cannot show.
    """
    unsupported = {
        "--matrix": settings.matrix,
        "protocol=by-position": settings.protocol == "by-position",
        "targets_by": settings.targets_by is not None,
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise EvaluationError(
                f"{setting} does not support several runs; evaluate them one at a time"
            )
    if settings.protocol != "fixed-targets" and len(_tokenizers(runs)) > 1:
        raise EvaluationError(
            f"{', '.join(run.name for run in runs)} have different tokenizers, so that their "
            "losses are comparable per byte only: set protocol=fixed-targets"
        )
    trained = [run.model.trained_length for run in runs]
    lengths = sorted({*settings.grid(trained[0]), *trained})
    return settings.model_copy(update={"lengths": lengths, "unreachable": "dash"})


class TaskEvaluation(Evaluation):
    """Items of one task, by length, depth and distance."""

    settings: TaskEvaluationSettings

    def session(self, run: EvaluatedRun) -> CellSession:
        settings = self.settings
        if run.model.settings.data.is_generated:
            return ItemSession(settings, run, self.methods(run), console=self.console)
        task = settings.task or run.task
        if not isinstance(task, Task):
            raise EvaluationError(
                f"{run.folder} was not trained on {task.name if task else 'a task'}: set a task in "
                "text, such as task.name=passkey"
            )
        documents = None
        origin = "none"
        if isinstance(task, HaystackTask):
            folder = settings.haystack_store or (run.data if run.task is None else None)
            documents, origin = haystacks(task, folder)
        drawn = draw_items(
            settings,
            task,
            run.tokenizer,
            bos=run.model.settings.data.bos,
            trained_length=run.model.trained_length,
            documents=documents,
            origin=origin,
        )
        return TaskSession(
            settings,
            run.model,
            drawn,
            self.methods(run),
            cells=run.cells,
            facts={"task": task.name, "haystack": origin, "tokenizer_hash": run.tokenizer.hash},
            console=self.console,
        )

    def report(self, results: list[Any], facts: dict) -> EvaluationReport:
        (result,) = results
        result.facts |= {"changed": self.runs[0].changed, **facts}
        name = f"{result.facts['task']}-{self.settings.identity()}"
        if isinstance(result, ItemResult):
            return item_report(result, name)
        return task_report(result, name)


class DiagnosticEvaluation(Evaluation):
    """Attention weights, or the text that the model generates past its trained length."""

    settings: DiagnosticSettings

    def session(self, run: EvaluatedRun) -> CellSession:
        self.stores = open_stores(self.settings, self.runs)
        make, _ = DIAGNOSTICS[type(self.settings)]
        return make(
            self.settings,
            run.model,
            store=self.stores.read,
            tokenizer=run.tokenizer,
            methods=self.methods(run),
            console=self.console,
        )

    def report(self, results: list[Any], facts: dict) -> EvaluationReport:
        (result,) = results
        result.facts |= {"corpus": self.stores.name, "changed": self.runs[0].changed, **facts}
        _, report_of = DIAGNOSTICS[type(self.settings)]
        return report_of(result, f"{self.settings.protocol}-{self.settings.identity()}")


DIAGNOSTICS: dict[type[DiagnosticSettings], tuple[Callable, Callable]] = {  # session, report
    AttentionDiagnosticSettings: (AttentionSession, attention_report),
    GenerationDiagnosticSettings: (GenerationSession, generation_report),
}
KINDS: dict[type[MeasurementSettings], type[Evaluation]] = {
    EvaluationSettings: LossEvaluation,
    TaskEvaluationSettings: TaskEvaluation,
    **dict.fromkeys(DIAGNOSTICS, DiagnosticEvaluation),
}
