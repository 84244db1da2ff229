"""A study in its directory: what is left of it, and what was measured."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from data.files import write_text
from errors import UserError
from evaluation.reports.document import counted
from run_directory.console import Console, duration
from run_directory.position_overrides import meta_model
from settings.load import dump
from studies.cell_pool import CellPool, read_times, seconds_left, submit
from studies.planned_cells import PlannedCell, StudyPlanner
from studies.study_record import flops_of, gather
from studies.study_settings import StudySettings, cells_of, running_order
from studies.study_texts import StudyTexts

COLUMNS = ["#", "cell", "parameters", "tokens", "train length", "FLOPs", "left"]


@dataclass(frozen=True)
class StudyCall:
    """The options of a call of study.py, and what its studies share.

    Attributes:
        with_parent: imports a foreign `parent.run` among the arguments of train.py.
    """

    options: Namespace
    console: Console
    with_parent: Callable[[Sequence[str]], Sequence[str]]

    @cached_property
    def texts(self) -> StudyTexts:
        """The text of all cells, prepared unless no cell will run."""
        options = self.options
        only_reads = options.dry_run or options.report or (options.claims and not options.all)
        return StudyTexts(self.console, make=not only_reads)


class StudyRun:
    """One call of a study. Raises StudyError for an invalid cell; trains nothing before `run`.

    Args:
        shared: of StudyPlanner.
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
        self._planner = StudyPlanner(study, folder, shared)
        self.cells = self._planner.plan(cells)
        by_id = {cell.id: cell for cell in self.cells}
        order = running_order(cells, study, call.options.only)
        self.selected = [by_id[cell.id] for cell in order]
        self._texts = call.texts
        self._sizes: dict[str, tuple[int, float]] = {}

    def prepare(self) -> None:
        """Prepare the text of all cells."""
        self._texts.prepare(self.cells)

    def run(self) -> CellPool | None:
        """Run the selected cells, or print or submit them where an option requests it (None)."""
        options = self.options
        self.prepare()
        if options.dry_run:
            self._print_cells()
            return None
        write_text(self.folder / "study.yaml", dump(self.study))
        self._planner.keep_precision()
        if options.list:
            self._print_commands()
            return None
        if options.launcher:
            left = [cell for cell in self.selected if not self.commands.done[cell.id].all()]
            jobs = submit(left, self.folder, options.jobs, options.launcher) if left else []
            print(f"{counted(len(jobs), 'job')} submitted: {', '.join(jobs)}")
            return None
        pool = CellPool(self.folder, self.commands, options.jobs, self.console)
        pool.run(self.selected, options.hours)
        return pool

    def gather(self) -> dict:
        """Write results.json from the run directories of all cells, and return it."""
        return gather(self.study, self.name, self.folder, self.cells)

    @cached_property
    def commands(self) -> pd.DataFrame:
        """The commands of all cells, by cell and part: whether each is done, and its share of the
        FLOPs of the training, which are divided equally."""
        rows = []
        for cell in self.cells:
            left = {command.part for command in cell.commands_left()}
            own = cell.commands()
            _, flops = self._size(cell)
            for command in own:
                is_done = command.part not in left
                rows.append((cell.id, command.part, command, flops / len(own), is_done))
        columns = ["cell", "part", "command", "flops", "done"]
        return pd.DataFrame(rows, columns=columns).set_index(["cell", "part"])

    def _size(self, cell: PlannedCell) -> tuple[int, float]:
        """Parameters, and FLOPs of the training."""
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
        """Print the lines that are left of the selected cells, in the order in which they run."""
        for cell in self.selected:
            try:
                cell.refuse_damaged()
            except UserError as error:
                self.console.warn(f"{cell.id}: {error}")
                continue
            for command in cell.commands_left():
                print(command)

    def _print_cells(self) -> None:
        """Print the cells, the remaining work and, if a command is done, the remaining time."""
        left = self.commands[~self.commands.done].reset_index("part").groupby("cell").part
        parts = left.agg(", ".join)
        rows = []
        for i, cell in enumerate(self.cells):
            parameters, flops = self._size(cell)
            rows.append([
                i,
                cell.id,
                f"{parameters:,}",
                f"{cell.settings.trained_tokens:,}",
                cell.settings.train_length,
                f"{flops:.1e}",
                parts.get(cell.id, "done"),
            ])  # fmt: skip
        count = counted(len(self.cells), "cell")
        self.console.table(f"{count} in {self.folder}", COLUMNS, rows)
        if not len(parts):
            print("everything is done")
            return
        text = f"{len(parts)} of {count} left"
        seconds = seconds_left(self.commands, read_times(self.folder), parts.index)
        if seconds is not None:
            jobs = self.options.jobs
            text += f": about {duration(seconds / jobs)} with {counted(jobs, 'job')}"
        print(text)
