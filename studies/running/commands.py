"""The command lines of a study, and which of them are left.

A cell is one line of train.py and a line of evaluate.py for each of its evaluations. The run
directory is the only record of what is done: the checkpoint of the last step, and results of an
evaluation under the same settings and from the same checkpoint.
"""

import shlex
from dataclasses import dataclass

from data.files import read_object
from errors import TrainingError, UserError
from run_directory.checkpoints import Checkpoint, find_checkpoint, steps_of
from run_directory.run import is_run
from settings.load import load_settings
from studies.running.plan import PlannedCell, PlannedEvaluation

TRAINING = "training"  # the part of a cell besides its evaluations
# evaluation settings that do not change the results
FREE = {"folder", "device", "batch", "context", "memory"}


@dataclass(frozen=True)
class Command:
    """A line of train.py or evaluate.py. `part`: `training`, or the name of the evaluation."""

    part: str
    script: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        """The line, quoted for a shell."""
        return shlex.join(["python", f"{self.script}.py", *self.arguments])


def train_command(plan: PlannedCell) -> Command:
    # `auto` is resolved once for all cells
    precision = f"training.precision={plan.settings.training.precision}"
    arguments = (*plan.cell.arguments, precision, "--run-dir", str(plan.run))
    return Command(TRAINING, "train", arguments)


def evaluate_command(plan: PlannedCell, evaluation: PlannedEvaluation) -> Command:
    arguments = (str(plan.run), *evaluation.arguments, "--no-report")
    return Command(evaluation.name, "evaluate", arguments)


def commands_of(plan: PlannedCell) -> list[Command]:
    """All lines of a cell, in the order in which they run."""
    evaluations = [evaluate_command(plan, evaluation) for evaluation in plan.evaluations]
    return [train_command(plan), *evaluations]


def commands_left(plan: PlannedCell) -> list[Command]:
    """The lines of a cell that are not done."""
    checkpoint = last_checkpoint(plan)
    if checkpoint is None:
        return commands_of(plan)
    return [
        evaluate_command(plan, evaluation)
        for evaluation in plan.evaluations
        if evaluation_results(plan, evaluation, checkpoint) is None
    ]


def last_checkpoint(plan: PlannedCell) -> Checkpoint | None:
    """The intact checkpoint of the cell's last step; None if training has not finished."""
    if not is_run(plan.run):
        return None
    try:
        return find_checkpoint(plan.run, step=plan.settings.steps)
    except TrainingError:  # missing or damaged
        return None


def refuse_damaged(plan: PlannedCell) -> None:
    """Raise TrainingError if the checkpoint of the last step is damaged: training again would
    replace a model that may have been used."""
    last = plan.settings.steps
    if last in steps_of(plan.run):
        find_checkpoint(plan.run, last)


def evaluation_results(
    plan: PlannedCell,
    evaluation: PlannedEvaluation,
    checkpoint: Checkpoint,
) -> dict | None:
    """results.json of an evaluation; None if it is missing or damaged, or if the checkpoint or a
    setting that changes the results is another one."""
    folder = plan.run / "evaluation" / str(evaluation.settings.folder)
    settings_type = type(evaluation.settings)
    but = FREE & set(settings_type.model_fields)
    try:
        results = read_object(folder / "results.json")
        stored = load_settings(settings_type, [str(folder / "settings.yaml")])
    except (UserError, OSError):
        return None
    is_same = stored.asked(but) == evaluation.settings.asked(but)
    is_same &= results.get("protocol") == evaluation.settings.protocol
    return results if is_same and results.get("checkpoint_hash") == checkpoint.hash else None
