"""A study in its directory: runs the unfinished commands and gathers the results."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from data.files import write_text
from errors import UserError
from evaluation.reports.document import counted
from run_directory.console import Console, duration
from run_directory.position_overrides import meta_model
from run_directory.training_schedule import flops_of
from settings.load import dump
from studies.cell_pool import CellPool, seconds_left, submit
from studies.planned_cells import PlannedCell, StudyPlanner
from studies.study_results_writer import gather
from studies.study_settings import StudySettings, cells_of, running_order
from studies.study_texts import StudyTexts

COLUMNS = ["cell", "parameters", "tokens", "train length", "FLOPs", "left"]


@dataclass(frozen=True)
class StudyCall:
    """The options of a call of study.py, and the objects that its studies share.

    Attributes:
        with_parent: imports a foreign `parent.run` among the arguments of train.py.
    """

    options: Namespace
    console: Console
    with_parent: Callable[[Sequence[str]], Sequence[str]]

    @cached_property
    def texts(self) -> StudyTexts:
        """The texts of all cells. They are prepared unless no cell will run."""
        options = self.options
        only_reads = options.dry_run or options.report or (options.claims and not options.all)
        return StudyTexts(self.console, make=not only_reads)


class StudyRun:
    """One call of a study. Raises StudyError for an invalid cell; trains nothing before `run`.

    Args:
        shared: see `StudyPlanner`.
    """

    def __init__(
        self,
        study: StudySettings,
        name: str,
        folder: Path,
        call: StudyCall,
        shared: Path | None = None,
    ):
        self.study = study
        self.name = name
        self.folder = folder
        self.options = call.options
        self.console = call.console
        cells = [
            replace(cell, arguments=tuple(call.with_parent(cell.arguments)))
            for cell in cells_of(study)
        ]
        self.cells = StudyPlanner(study, folder, shared).plan(cells)
        self.selected = running_order(self.cells, study, call.options.only)
        self._texts = call.texts
        self._sizes: dict[str, tuple[int, float]] = {}

    def prepare(self) -> None:
        """Prepare the text of all cells."""
        self._texts.prepare(self.cells)

    def run(self) -> CellPool | None:
        """Run the selected cells. Returns None if an option requests to print or submit them
        instead."""
        options = self.options
        self.prepare()
        if options.dry_run:
            self._print_cells()
            return None
        write_text(self.folder / "study.yaml", dump(self.study))
        if options.list:
            self._print_commands()
            return None
        if options.launcher:
            left = [cell for cell in self.selected if cell.id not in self.done]
            jobs = submit(left, self.folder, options.jobs, options.launcher) if left else []
            print(f"{counted(len(jobs), 'job')} submitted: {', '.join(jobs)}")
            return None
        self.console.info(self._work_left())
        pool = CellPool(self.folder, self.flops, self.done, options.jobs, self.console)
        pool.run(self.selected, options.hours)
        return pool

    def gather(self) -> dict:
        """Write results.json from the run directories of all cells, and return it."""
        return gather(self.study, self.name, self.folder, self.cells)

    @cached_property
    def done(self) -> set[str]:
        """The cells whose commands are all done; the pool adds the cells that it finishes."""
        return {cell.id for cell in self.cells if not cell.commands_left()}

    @cached_property
    def flops(self) -> dict[str, float]:
        """Training FLOPs of each cell."""
        return {cell.id: self._size(cell)[1] for cell in self.cells}

    def _size(self, cell: PlannedCell) -> tuple[int, float]:
        """Number of parameters, and training FLOPs."""
        key = cell.shared_settings
        if key not in self._sizes:
            text = self._texts.of(cell.settings.data)
            vocabulary = getattr(cell.settings.data.tokenizer, "vocab_size", 258)
            if text is not None:
                vocabulary = text.tokenizer.vocab_size
            parameters = meta_model(cell.settings, vocabulary).parameter_count()
            self._sizes[key] = parameters, flops_of(cell.settings, vocabulary)
        return self._sizes[key]

    def _print_commands(self) -> None:
        """Print the unfinished commands of the selected cells, in the order in which they run."""
        for cell in self.selected:
            try:
                cell.refuse_damaged()
            except UserError as error:
                self.console.warn(f"{cell.id}: {error}")
                continue
            for command in cell.commands_left():
                print(command)

    def _print_cells(self) -> None:
        """Print the selected cells and the remaining work."""
        rows = []
        for cell in self.selected:
            parameters, flops = self._size(cell)
            left = ", ".join(command.part for command in cell.commands_left())
            rows.append([
                cell.id,
                f"{parameters:,}",
                f"{cell.settings.trained_tokens:,}",
                cell.settings.train_length,
                f"{flops:.1e}",
                left or "done",
            ])  # fmt: skip
        self.console.table(f"{counted(len(rows), 'cell')} in {self.folder}", COLUMNS, rows)
        print(self._work_left())

    def _work_left(self) -> str:
        """The number of unfinished cells among the selected ones and, if a cell of the study is
        done, the time that they will take."""
        left = [cell.id for cell in self.selected if cell.id not in self.done]
        if not left:
            return "everything is done"
        text = f"{len(left)} of {counted(len(self.selected), 'cell')} left"
        seconds = seconds_left(self.folder, self.flops, self.done, left)
        if seconds is None:
            return text
        jobs = self.options.jobs
        return f"{text}: about {duration(seconds / jobs)} with {counted(jobs, 'job')}"
