"""One call of a study: its plans, its corpora, their forecast, and what was measured."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from signal import Signals

from data.files import write_text
from evaluation.scoring.methods import builtin_methods
from settings.load import dump
from studies.grid import cells_of, running_order, select_cells
from studies.running.cell_record import gather
from studies.running.corpora import StudyCorpora
from studies.running.forecast import StudyForecast, print_forecast
from studies.running.plan import PlannedCell, StudyPlanner
from studies.running.progress import StudyProgress
from studies.running.runner import StudyRunner
from studies.running.study_call import StudyCall
from studies.study_settings import StudySettings


class StudySession:
    """A study in its directory. Raises StudyError for an invalid cell; prepares and trains nothing
    before `run`.

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
        self.call = call
        self.options = call.options
        self.cells = [
            replace(cell, arguments=tuple(call.with_parent(cell.arguments)))
            for cell in cells_of(study)
        ]
        self.selected = select_cells(self.cells, call.options.only)
        planner = StudyPlanner(study, folder, builtin_methods(), shared)
        self.plans = planner.plan(self.cells)

    @cached_property
    def corpora(self) -> StudyCorpora:
        """The text of all cells, prepared unless `options.dry_run`."""
        return StudyCorpora(self.call.console, make=not self.options.dry_run)

    def prepare(self) -> None:
        """Prepare the text of all cells."""
        self.corpora.check(self.plans)

    @cached_property
    def forecast(self) -> StudyForecast:
        return StudyForecast(self.plans, self.corpora, self.folder)

    @property
    def work(self) -> list[PlannedCell]:
        """The selected cells in the order in which they run."""
        by_index = {plan.cell.index: plan for plan in self.plans}
        return [by_index[cell.index] for cell in running_order(self.selected, self.study)]

    def dry_run(self) -> None:
        """Print the cells and the remaining time."""
        self.prepare()
        print_forecast(self.plans, self.forecast, self.folder, self.call)

    def run(self) -> tuple[StudyProgress, Signals | None]:
        """Run the selected cells; what became of them, and the signal that stopped the study."""
        self.prepare()
        write_text(self.folder / "study.yaml", dump(self.study))
        journal = self.folder / "study.log"
        progress = StudyProgress(self.work, self.options.jobs, self.call.console, journal)
        runner = StudyRunner(
            self.folder, self.work, self.corpora, progress, self.forecast, self.call
        )
        return progress, runner.run()

    def gather(self) -> dict:
        """Write results.json from the files of all cells, and return it."""
        return gather(self.study, self.name, self.folder, self.cells)
