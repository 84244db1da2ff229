"""What the child of one cell does: train it, then evaluate it."""

import shlex
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from errors import INTERRUPTED, UserError, printable
from evaluation.evaluate_runs import run_evaluation
from model.devices import prepare_cpu
from run_directory.checkpoints import find_checkpoint, steps_of
from settings.load import load_settings
from settings.script import message_of
from studies.running.cell_record import TRAINING, CellRecord, identity_of, last_checkpoint
from studies.running.children import set_threads
from studies.running.plan import PlannedCell, PlannedEvaluation
from studies.running.study_call import StudyCall

FAILED = 1


class CellWork:
    """The training and the evaluations of one cell that are not done yet."""

    def __init__(
        self,
        plan: PlannedCell,
        folder: Path,
        call: StudyCall,
    ):
        self.plan = plan
        self.call = call
        self.log = folder / "logs" / f"{plan.id}.log"
        self.record = CellRecord(folder, plan)
        self.checkpoint = last_checkpoint(plan)

    def missing(self) -> list[PlannedEvaluation]:
        """The evaluations that have no results under their present settings."""
        evaluations = self.plan.evaluations
        if self.checkpoint is None:
            return list(evaluations)
        return [e for e in evaluations if not self.record.is_evaluated(e, self._identity(e))]

    def is_done(self) -> bool:
        return self.checkpoint is not None and not self.missing()

    def run(self) -> int:
        """Do what is missing and save the record; the exit status of a child."""
        set_threads(self.call.options.jobs)
        errors = []
        try:
            missing = self.missing()
            if self.checkpoint is None:
                errors += self._timed(TRAINING, self._train)
                self.checkpoint = last_checkpoint(self.plan)
                if self.checkpoint is None and not errors:
                    errors.append("training: the checkpoint of the last step is missing")
            for evaluation in missing if self.checkpoint is not None else ():
                errors += self._timed(evaluation.name, partial(self._evaluate, evaluation))
                self.record.save("pending", None, self.checkpoint)
        except (KeyboardInterrupt, SystemExit):  # the latter from SIGTERM before the first step
            self.record.save("pending", None, self.checkpoint)
            return INTERRUPTED
        if errors:
            self.record.save("failed", "; ".join(errors), self.checkpoint)
            return FAILED
        self.record.save("done", None, self.checkpoint)
        return 0

    def _extra(self, evaluation: PlannedEvaluation) -> list[str]:
        return self.call.corpora.arguments(self.plan, evaluation)

    def _identity(self, evaluation: PlannedEvaluation) -> str:
        assert self.checkpoint is not None
        return identity_of(evaluation, self._extra(evaluation), self.checkpoint)

    def _timed(self, name: str, work: Callable[[], None]) -> list[str]:
        """The error of a part of the work, if any. Its time is recorded, that of interrupted
        attempts included."""
        wall = time.monotonic()
        cpu = time.process_time()
        try:
            work()
        except (UserError, OSError) as error:
            print(f"error: {printable(message_of(error))}", file=sys.stderr)
            return [f"{name}: {message_of(error)}"]
        except Exception as error:
            traceback.print_exc()
            return [f"{name}: {type(error).__name__}: {error}; full output: {self.log}"]
        finally:
            self.record.add_time(name, time.monotonic() - wall, time.process_time() - cpu)
        return []

    def _train(self) -> None:
        if (last := self.plan.settings.steps) in steps_of(self.plan.run):
            find_checkpoint(self.plan.run, last)  # a damaged one is not replaced by another model
        precision = self.plan.settings.training.precision  # `auto` is resolved once for all cells
        arguments = [*self.plan.cell.arguments, f"training.precision={precision}"]
        arguments += ["--run-dir", str(self.plan.run)]
        if self.call.train(arguments) != 0:
            raise KeyboardInterrupt  # it has saved a checkpoint

    def _evaluate(self, evaluation: PlannedEvaluation) -> None:
        arguments = [*evaluation.arguments, *self._extra(evaluation)]
        settings = load_settings(type(evaluation.settings), arguments)
        prepare_cpu(None)
        command = shlex.join(["python", "evaluate.py", str(self.plan.run), *arguments])
        run_evaluation([self.plan.run], settings, command, numbers_only=True)
        self.record.mark_evaluated(evaluation, self._identity(evaluation))
