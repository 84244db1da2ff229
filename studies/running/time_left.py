"""How much of a study is left, in FLOPs of training, and how long it takes at the measured rate."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

from run_directory.console import Console, duration
from run_directory.position_overrides import make_model
from studies.running.commands import commands_left, commands_of
from studies.running.corpora import StudyCorpora
from studies.running.gathered import flops_of, read_times
from studies.running.plan import PlannedCell

WAITING = "waiting"
BUSY = "locked by another process"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
LEFT = "left for later"  # does not fit into --hours
COUNTED = (DONE, FAILED, STOPPED, LEFT, RUNNING, BUSY, WAITING)


class StudyWork:
    """The work of cells: the FLOPs of their training, shared equally among their commands.

    Attributes:
        left: the parts of each cell that are not done, by its id.
    """

    def __init__(self, plans: Sequence[PlannedCell], corpora: StudyCorpora, folder: Path):
        self.folder = folder
        self._corpora = corpora
        self._sizes: dict[str, tuple[int, float]] = {}
        self._plans = plans
        self.left = {plan.id: [command.part for command in commands_left(plan)] for plan in plans}

    def size(self, plan: PlannedCell) -> tuple[int, float]:
        """Parameters, and FLOPs of the training."""
        key = plan.settings.model_dump_json(
            exclude={"seed"}
        )  # many cells differ only in their seed
        if key not in self._sizes:
            prepared = self._corpora.of_run(plan)
            if prepared is None:
                vocabulary = getattr(plan.settings.data.tokenizer, "vocab_size", 258)
            else:
                vocabulary = prepared.tokenizer.vocab_size
            with torch.device("meta"):
                model = make_model(plan.settings, vocabulary)
            self._sizes[key] = model.parameter_count(), flops_of(plan.settings, vocabulary)
        return self._sizes[key]

    def flops_left(self, plan: PlannedCell) -> float:
        _, flops = self.size(plan)
        return flops * len(self.left[plan.id]) / len(commands_of(plan))

    def seconds_per_flop(self) -> float | None:
        """The rate of the cells that are done; None before the first one."""
        times = read_times(self.folder)
        done = [plan for plan in self._plans if not self.left[plan.id] and times[plan.id]]
        flops = sum(self.size(plan)[1] for plan in done)
        seconds = sum(line["wall"] for plan in done for line in times[plan.id])
        return seconds / flops if flops else None

    def seconds_left(self, plans: Sequence[PlannedCell]) -> float | None:
        """Of these cells, one after the other; None before any cell is done."""
        rate = self.seconds_per_flop()
        return None if rate is None else rate * sum(map(self.flops_left, plans))


class StudyProgress:
    """The phase of every cell. Events go to `journal`, with the time, and to the console."""

    def __init__(self, plans: Sequence[PlannedCell], work: StudyWork, jobs: int, console: Console):
        self.work = work
        self.jobs = jobs
        self.console = console
        self.journal = work.folder / "study.log"
        self.plans = {plan.id: plan for plan in plans}
        self.phases = {plan.id: WAITING for plan in plans}
        self.errors: dict[str, str] = {}

    def info(self, text: str) -> None:
        """Log one event."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
        self.console.info(text)

    def finish(self, plan: PlannedCell, phase: str, error: str = "") -> None:
        """Log the end of a cell that ran."""
        self.phases[plan.id] = phase
        if phase == DONE:
            self.work.left[plan.id] = []
        elif phase == FAILED:
            self.errors[plan.id] = error
        reason = f": {error}" if error else ""
        self.info(f"{plan.id}: {phase}{reason}; {self.summary()}")

    def report(self, received, repeat: str) -> int:
        """Log the outcome; the exit status: 0 all done, 1 a cell failed, 128 + a signal that
        stopped it. `repeat`: the command to run again."""
        self.console.info(self.summary())
        if received is not None:
            self.console.info(f"stopped by {received.name}; resume with: {repeat}")
            return 128 + received
        for name, error in self.errors.items():
            self.console.warn(f"{name} failed: {error}")
        if self.errors:
            self.console.info(f"retry failed cells with: {repeat}")
        return 1 if self.errors else 0

    def summary(self) -> str:
        """`12 done, 1 failed, 2 running, 15 waiting; about 1 h 10 min left`."""
        counts = Counter(self.phases.values())
        text = ", ".join(f"{counts[phase]} {phase}" for phase in COUNTED if counts[phase])
        open_phases = (RUNNING, BUSY, WAITING)
        left = [plan for name, plan in self.plans.items() if self.phases[name] in open_phases]
        seconds = self.work.seconds_left(left)
        if left and seconds is not None:
            text += f"; about {duration(seconds / self.jobs)} left"
        return text
