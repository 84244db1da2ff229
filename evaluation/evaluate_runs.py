"""Evaluation of run directories, as evaluate.py and `sextant.evaluate` call it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from data.files import sha256_of, write_text
from data.task_data import generated
from data.tasks import HaystackTask, TextTask
from errors import EvaluationError, printable
from evaluation.diagnostics.attention import AttentionMeasurement
from evaluation.diagnostics.generation import GenerationMeasurement
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import (
    AttentionDiagnosticSettings,
    ContaminationSettings,
    EvaluationSettings,
    GenerationDiagnosticSettings,
    MeasurementSettings,
    TaskEvaluationSettings,
)
from evaluation.methods import (
    TRAINED,
    TRUNCATE,
    Method,
    compatible_methods,
    resolve_methods,
)
from evaluation.ranks import EvaluationRanks, joined
from evaluation.reports.diagnostic_report import attention_report, generation_report
from evaluation.reports.document import print_table
from evaluation.reports.loss_report import loss_report
from evaluation.reports.report import EvaluationReport
from evaluation.reports.task_report import task_report
from evaluation.scoring.byte_spans import choose_byte_spans
from evaluation.scoring.cells import Measurement
from evaluation.scoring.evaluation_plan import choose_targets
from evaluation.scoring.targets import EvaluationText
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.stores import haystacks, open_stores
from evaluation.tasks.drawn_items import DrawnItems, draw_symbols, draw_text
from evaluation.tasks.task_session import TaskMeasurement
from run_directory.console import Console
from run_directory.run_names import names_of
from settings.load import dump

RECORD = "results.json"
SUMS = "SHA256SUMS"  # hash of results.json, for `sha256sum --check`


@dataclass(frozen=True)
class EvaluationOutput:
    """The report of an evaluation and what was written to `folder`."""

    report: EvaluationReport
    folder: Path
    files: list[Path]


@dataclass(frozen=True)
class Evaluation:
    """The arguments of every kind of evaluation: `settings` and the opened `runs`.

    Attributes:
        dry_run: print cells and estimates instead of measuring.
        command: command line, stored in results.json.
    """

    settings: Any
    runs: Sequence[EvaluatedRun]
    ranks: EvaluationRanks
    console: Console
    command: str
    dry_run: bool = False

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

    def measure(self, measurement: Measurement) -> bool:
        """Measure every method at every length, or print the forecast of a dry run. True if this
        process reports the numbers."""
        if self.dry_run:
            measurement.forecast()
            return False
        measurement.run()
        return self.ranks.main

    def facts(self, **first: str) -> dict:
        """The entries of results.json about the first run and this command."""
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        changed = self.runs[0].changed
        return {**first, "changed": changed, "command": self.command, "finished": finished}


def run_evaluation(
    folders: Sequence[Path],
    settings: MeasurementSettings,
    command: str,
    dry_run: bool = False,
    numbers_only: bool = False,
) -> EvaluationOutput | None:
    """Measure the cells that are not stored yet and write the report to the first run's directory.

    Args:
        command: command line, stored in results.json.
        dry_run: print the cells and estimate memory and time instead of measuring.
        numbers_only: write neither figures nor the report.

    Returns:
        None for a dry run, and in processes other than the first.

    Raises:
        EvaluationError: the evaluation cannot run.
    """
    # A dry run estimates memory and time of each process in a single process.
    with joined(1 if dry_run else getattr(settings, "context", 1)) as ranks:
        for count, several in ((ranks.world, "processes"), (len(folders), "runs")):
            if count > 1 and not isinstance(settings, EvaluationSettings):
                raise EvaluationError(
                    f"protocol={settings.protocol} does not support several {several}"
                )
        device = ranks.device(settings.device)
        console = Console(quiet=not ranks.main)
        runs = [  # the only reads of weights
            EvaluatedRun.open(folder, name, device, console, settings.dtype, settings.weights)
            for folder, name in zip(folders, names_of(folders), strict=True)
        ]
        for run in runs:
            if run.changed:
                console.info(run.changed)
        if isinstance(settings, EvaluationSettings) and len(runs) > 1:
            settings = for_all_runs(settings, runs)
        evaluate = KINDS[type(settings)]
        report = evaluate(Evaluation(settings, runs, ranks, console, command, dry_run))
        if report is None:
            return None
        folder = folders[0] / "evaluation" / (settings.folder or report.name)
        files = report.write_numbers(folder) if numbers_only else report.write(folder)
        write_text(folder / "settings.yaml", dump(settings))
        write_text(folder / SUMS, f"{sha256_of(folder / RECORD)}  {RECORD}\n")
        return EvaluationOutput(report, folder, files)


def is_intact(folder: Path) -> bool:
    """Whether results.json matches its stored hash, or has none, as in earlier versions."""
    sums = folder / SUMS
    return not sums.is_file() or sums.read_text().split()[:1] == [sha256_of(folder / RECORD)]


def show(
    report: EvaluationReport,
    files: list[Path],
    verbose: bool = False,
) -> None:
    """Print the first tables, the verdict, its caveats and the names of the files; with `verbose`,
    all tables and sentences."""
    for table in [*report.tables, *(report.more_tables if verbose else [])]:
        print_table(table)
    lines = [report.verdict, *report.caveats, *(report.details if verbose else [])]
    for line in [*filter(None, lines), f"written: {', '.join(map(str, files))}"]:
        print(printable(line))


# Kinds of evaluation. Each draws its targets or items, measures its cells and returns a report.


def evaluate_loss(evaluation: Evaluation) -> EvaluationReport | None:
    """Loss of text by length or by position; several runs are compared on the same targets."""
    settings = evaluation.settings
    runs = evaluation.runs
    has_one_tokenizer = len(_tokenizers(runs)) == 1
    if has_one_tokenizer:
        stores = [open_stores(settings, runs)] * len(runs)
    else:
        stores = [open_stores(settings, [run]) for run in runs]
    drawn_by = settings
    if evaluation.dry_run:  # skips the search for passages shared with the training text
        unchecked = ContaminationSettings(check=False)
        drawn_by = settings.model_copy(update={"contamination": unchecked})
    targets = []
    for run, text in zip(runs, stores, strict=True):
        length = run.model.trained_length
        check_windows(settings, length)
        targets.append(choose_targets(drawn_by, text, run.tokenizer, length, evaluation.console))
    if not has_one_tokenizer:
        targets = choose_byte_spans(targets)
    measurements = {}
    for run, chosen in zip(runs, targets, strict=True):
        methods = evaluation.methods(run)
        left_out = {}
        if settings.matrix:
            offered = partial(run.model.offered, bos=settings.bos)
            more, left_out = compatible_methods(run.model.trained_length, offered)
            labels = [method.label for method in methods]
            methods += [method for method in more if method.label not in labels]
        measurement = LossMeasurement(
            settings,
            run.model,
            chosen,
            methods,
            cells=run.cells,
            console=evaluation.console,
            ranks=evaluation.ranks,
        )
        measurement.left_out = left_out
        measurements[run.name] = measurement
    measured = [evaluation.measure(measurement) for measurement in measurements.values()]
    if not all(measured):
        return None
    name = f"{settings.protocol}-{settings.identity()}"
    if len(runs) > 1:
        hashes = [run.model.checkpoint_hash for run in runs]
        name = f"comparison-{sha256_of(''.join([settings.identity(), *hashes]))[:8]}"
    return loss_report(measurements, name, evaluation.facts(corpus=stores[0].name))


def _tokenizers(runs: Sequence[EvaluatedRun]) -> set[str]:
    return {run.tokenizer.hash for run in runs}


def check_windows(settings: EvaluationSettings, trained_length: int) -> None:
    """Raise EvaluationError if windows are too short for the processes that share them."""
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


def evaluate_task(evaluation: Evaluation) -> EvaluationReport | None:
    """Accuracy on the items of one task, by length and depth."""
    settings = evaluation.settings
    (run,) = evaluation.runs
    drawn, facts = draw_items(settings, run)
    measurement = TaskMeasurement(
        settings,
        run.model,
        drawn,
        evaluation.methods(run),
        cells=run.cells,
        facts={"tokenizer_hash": run.tokenizer.hash, **facts},
        console=evaluation.console,
    )
    if not evaluation.measure(measurement):
        return None
    measurement.facts |= evaluation.facts()
    return task_report(measurement, f"{measurement.facts['task']}-{settings.identity()}")


def draw_items(settings: TaskEvaluationSettings, run: EvaluatedRun) -> tuple[DrawnItems, dict]:
    """The items of a task, and facts about them for results.json. Raises EvaluationError for a run
    and settings without a task."""
    data = run.model.settings.data
    if items := generated(data):
        return draw_symbols(settings, items, data.positions), {}
    task = settings.task or run.task
    if not isinstance(task, TextTask):
        raise EvaluationError(
            f"{run.folder} was not trained on {task.name if task else 'a task'}: set a task in "
            "text, such as task.name=passkey"
        )
    documents = None
    origin = "none"
    if isinstance(task, HaystackTask):
        folder = settings.haystack_store or (run.data if run.task is None else None)
        documents, origin = haystacks(task, folder)
    drawn = draw_text(
        settings,
        task,
        run.tokenizer,
        bos=data.bos,
        trained_length=run.model.trained_length,
        documents=documents,
        origin=origin,
    )
    return drawn, {"haystack": origin}


def evaluate_diagnostic(
    evaluation: Evaluation,
    make_measurement: Callable[..., Measurement],
    make_report: Callable,
) -> EvaluationReport | None:
    """Attention weights, or text that the model generates past its trained length."""
    settings = evaluation.settings
    (run,) = evaluation.runs
    stores = open_stores(settings, [run])
    text = EvaluationText(stores.read, settings.bos, run.tokenizer.bos_id)
    methods = evaluation.methods(run)
    measurement = make_measurement(
        settings, run.model, text, run.tokenizer, methods, evaluation.console
    )
    if not evaluation.measure(measurement):
        return None
    measurement.facts |= evaluation.facts(corpus=stores.name)
    return make_report(measurement, f"{settings.protocol}-{settings.identity()}")


KINDS: dict[type[MeasurementSettings], Callable[[Evaluation], EvaluationReport | None]] = {
    EvaluationSettings: evaluate_loss,
    TaskEvaluationSettings: evaluate_task,
    AttentionDiagnosticSettings: partial(
        evaluate_diagnostic,
        make_measurement=AttentionMeasurement,
        make_report=attention_report,
    ),
    GenerationDiagnosticSettings: partial(
        evaluate_diagnostic,
        make_measurement=GenerationMeasurement,
        make_report=generation_report,
    ),
}
