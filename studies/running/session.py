"""One call of a study: its plans, its corpora, what is left, and what was measured."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from signal import Signals

from data.files import write_text
from evaluation.reports.document import counted
from run_directory.console import duration
from settings.load import dump
from studies.grid import cells_of, running_order, select_cells
from studies.running.commands import commands_left
from studies.running.gathered import gather
from studies.running.plan import PlannedCell, StudyPlanner
from studies.running.runner import StudyRunner
from studies.running.study_call import StudyCall
from studies.running.time_left import StudyProgress, StudyWork
from studies.running.workers import submit
from studies.study_settings import StudySettings

COLUMNS = ["#", "cell", "parameters", "tokens", "train length", "FLOPs", "left"]


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
    def work(self) -> StudyWork:
        """What is left of all cells, once their text is prepared."""
        return StudyWork(self.plans, self.call.corpora, self.folder)

    @property
    def queue(self) -> list[PlannedCell]:
        """The selected cells in the order in which they run."""
        by_index = {plan.cell.index: plan for plan in self.plans}
        return [by_index[cell.index] for cell in running_order(self.selected, self.study)]

    def print_commands(self) -> None:
        """Print the lines that are left of the selected cells, in the order in which they run."""
        self._begin()
        for plan in self.queue:
            for command in commands_left(plan):
                print(command)

    def dry_run(self) -> None:
        """Print the cells, the remaining work and, if a cell is done, the remaining time."""
        self.prepare()
        rows = []
        for plan in self.plans:
            parameters, flops = self.work.size(plan)
            rows.append([
                plan.cell.index,
                plan.id,
                f"{parameters:,}",
                f"{plan.settings.trained_tokens:,}",
                plan.settings.train_length,
                f"{flops:.1e}",
                ", ".join(self.work.left[plan.id]) or "done",
            ])  # fmt: skip
        count = counted(len(self.plans), "cell")
        self.call.console.table(f"{count} in {self.folder}", COLUMNS, rows)
        left = [plan for plan in self.plans if self.work.left[plan.id]]
        if not left:
            print("everything is done")
            return
        text = f"{len(left)} of {count} left"
        seconds = self.work.seconds_left(left)
        if seconds is not None:
            jobs = self.options.jobs
            text += f": about {duration(seconds / jobs)} with {counted(jobs, 'job')}"
        print(text)

    def run(self) -> tuple[StudyProgress, Signals | None]:
        """Run the selected cells; what became of them, and the signal that stopped the study."""
        self._begin()
        progress = StudyProgress(self.queue, self.work, self.options.jobs, self.call.console)
        runner = StudyRunner(self.queue, progress, self.options.hours)
        return progress, runner.run()

    def submit(self) -> None:
        """Submit the selected cells that are not done to the scheduler of `--launcher`."""
        self._begin()
        left = [plan for plan in self.queue if self.work.left[plan.id]]
        ids = submit(left, self.folder, self.options.jobs, self.options.launcher) if left else []
        print(f"{counted(len(ids), 'job')} submitted: {', '.join(ids)}")

    def gather(self, errors: Mapping[str, str] | None = None) -> dict:
        """Write results.json from the run directories of all cells, and return it. `errors`: of
        cells that failed in this call."""
        return gather(self.study, self.name, self.folder, self.plans, errors)

    def _begin(self) -> None:
        """Prepare all text, and store what later calls of the study must share."""
        self.prepare()
        write_text(self.folder / "study.yaml", dump(self.study))
        self.planner.keep_precision()
