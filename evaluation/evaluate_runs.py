"""Evaluation of run directories, as evaluate.py and `sextant.evaluate` call it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from data.files import sha256_of, write_text
from errors import EvaluationError, printable
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import MeasurementSettings
from evaluation.kinds import KINDS
from evaluation.ranks import joined
from evaluation.reports.document import print_table
from evaluation.reports.report import EvaluationReport
from run_directory.console import Console
from run_directory.run_names import names_of
from settings.load import dump

RECORD = "results.json"
SUMS = "SHA256SUMS"  # of results.json, for `sha256sum --check`


@dataclass(frozen=True)
class EvaluationOutput:
    """The report of an evaluation and what was written to `folder`."""

    report: EvaluationReport
    folder: Path
    files: list[Path]


def run_evaluation(
    folders: Sequence[Path],
    settings: MeasurementSettings,
    command: str,
    dry_run: bool = False,
    numbers_only: bool = False,
) -> EvaluationOutput | None:
    """Measure what is not yet stored and write the report to the first run's directory.

    Args:
        command: stored in results.json.
        dry_run: print the cells and estimate memory and time instead.
        numbers_only: write neither figures nor the report.

    Returns:
        None for a dry run, and in processes other than the first.

    Raises:
        EvaluationError: an evaluation that cannot run.
    """
    kind = KINDS[type(settings)]
    # A dry run needs no other processes to estimate what each of them will take.
    with joined(1 if dry_run else getattr(settings, "context", 1)) as ranks:
        for count, several in ((ranks.world, "processes"), (len(folders), "runs")):
            if count > 1 and not kind.is_shared:
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
        evaluation = kind(settings, runs, ranks, console, dry_run)
        results = []
        for run in runs:
            # methods, targets, cells already on disk
            session = evaluation.session(run)
            if dry_run:
                session.forecast()
            else:
                results.append(session.run())  # score every method at every length
        if dry_run or not ranks.main:
            return None
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        report = evaluation.report(results, {"command": command, "finished": finished})
        folder = folders[0] / "evaluation" / (settings.folder or report.name)
        files = report.write_numbers(folder) if numbers_only else report.write(folder)
        write_text(folder / "settings.yaml", dump(evaluation.settings))
        write_text(folder / SUMS, f"{sha256_of(folder / RECORD)}  {RECORD}\n")
        return EvaluationOutput(report, folder, files)


def is_intact(folder: Path) -> bool:
    """Whether results.json is as the evaluation has written it, or has no hash, as those of earlier
    versions."""
    sums = folder / SUMS
    return not sums.is_file() or sums.read_text().split()[:1] == [sha256_of(folder / RECORD)]


def show(
    report: EvaluationReport,
    files: list[Path],
    verbose: bool = False,
) -> None:
    """Print the table, the verdict, what limits it, and the names of the files; with `verbose` all
    tables and sentences."""
    for table in [*report.tables, *(report.more_tables if verbose else [])]:
        print_table(table)
    lines = [report.verdict, *report.caveats, *(report.details if verbose else [])]
    for line in [*filter(None, lines), f"written: {', '.join(map(str, files))}"]:
        print(printable(line))
