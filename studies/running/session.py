"""One call of a study: its plans, its corpora, their forecast, and what was measured."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from signal import Signals

from data.files import write_text
from evaluation.reports.document import counted
from run_directory.console import duration
from settings.load import dump
from studies.grid import cells_of, running_order, select_cells
from studies.running.cell_record import gather
from studies.running.cell_work import CellWork
from studies.running.forecast import StudyForecast
from studies.running.plan import PlannedCell, StudyPlanner
from studies.running.progress import StudyProgress
from studies.running.runner import StudyRunner
from studies.running.study_call import StudyCall
from studies.study_settings import StudySettings

COLUMNS = ["#", "cell", "parameters", "tokens", "train length", "time left", "left"]


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
        self.planner = StudyPlanner(study, folder, shared)
        self.plans = self.planner.plan(self.cells)

    def prepare(self) -> None:
        """Prepare the text of all cells."""
        self.call.corpora.check(self.plans)

    @cached_property
    def forecast(self) -> StudyForecast:
        return StudyForecast(self.plans, self.call.corpora, self.folder)

    @property
    def work(self) -> list[PlannedCell]:
        """The selected cells in the order in which they run."""
        by_index = {plan.cell.index: plan for plan in self.plans}
        return [by_index[cell.index] for cell in running_order(self.selected, self.study)]

    def left(self) -> list[tuple[PlannedCell, dict[str, float]]]:
        """The cells that are not done, with the seconds of their unfinished parts."""
        cells = []
        for plan in self.plans:
            work = CellWork(plan, self.folder, self.call)
            if parts := self.forecast.parts(plan, work):
                cells.append((plan, parts))
        return cells

    def dry_run(self) -> None:
        """Print the cells and the remaining time."""
        self.prepare()
        left = {plan.id: parts for plan, parts in self.left()}
        rows = []
        for plan in self.plans:
            parts = left.get(plan.id, {})
            parameters, _ = self.forecast.size(plan)
            rows.append([
                plan.cell.index,
                plan.id,
                f"{parameters:,}",
                f"{plan.settings.trained_tokens:,}",
                plan.settings.train_length,
                duration(sum(parts.values())) if parts else "",
                ", ".join(parts) or "done",
            ])  # fmt: skip
        count = counted(len(self.plans), "cell")
        self.call.console.table(f"{count} in {self.folder}", COLUMNS, rows)
        if not left:
            print("everything is done")
            return
        jobs = self.options.jobs
        seconds = sum(sum(parts.values()) for parts in left.values()) / jobs
        print(
            f"{len(left)} of {count} left: about {duration(seconds)} with {counted(jobs, 'job')}, "
            "measured on earlier cells or estimated from one step"
        )

    def run(self) -> tuple[StudyProgress, Signals | None]:
        """Run the selected cells; what became of them, and the signal that stopped the study."""
        self.prepare()
        write_text(self.folder / "study.yaml", dump(self.study))
        self.planner.keep_precision()
        journal = self.folder / "study.log"
        progress = StudyProgress(self.work, self.options.jobs, self.call.console, journal)
        runner = StudyRunner(self.folder, self.work, progress, self.forecast, self.call)
        return progress, runner.run()

    def gather(self) -> dict:
        """Write results.json from the files of all cells, and return it."""
        return gather(self.study, self.name, self.folder, self.cells)
