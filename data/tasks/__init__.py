"""Synthetic tasks, in text and on symbols. Each item has one correct answer and is a function of a
seed and an index.

Items of tasks in text are texts that contain facts, for training or for evaluation. Items of tasks
on symbols are sequences of symbols, for models that are trained on them.
"""

from typing import Annotated

from pydantic import Field

from data.tasks.arithmetic import AdditionTask, ModularAdditionTask, ParityTask
from data.tasks.memory import AssociativeRecallTask, DyckTask, FlipFlopTask, IndirectIndexingTask
from data.tasks.retrieval import (
    Haystacks,
    HaystackTask,
    NeedleTask,
    PasskeyTask,
    RecallTask,
    TextTask,
    VariablesTask,
    is_for,
)
from data.tasks.strings import CopyTask, CountingTask, MajorityTask, SelectiveCopyTask
from data.tasks.symbols import CoupledTask, SymbolTask
from data.tasks.task import NO_TEXT, Task, TaskItem, TaskItems

AnyTextTask = PasskeyTask | NeedleTask | VariablesTask | RecallTask
AnySymbolTask = (
    CopyTask
    | SelectiveCopyTask
    | MajorityTask
    | CountingTask
    | ModularAdditionTask
    | ParityTask
    | AdditionTask
    | FlipFlopTask
    | AssociativeRecallTask
    | IndirectIndexingTask
    | DyckTask
)
TextTaskSettings = Annotated[AnyTextTask, Field(discriminator="name")]
SymbolTaskSettings = Annotated[AnySymbolTask, Field(discriminator="name")]
TaskSettings = Annotated[AnyTextTask | AnySymbolTask, Field(discriminator="name")]

__all__ = [
    "NO_TEXT",
    "CoupledTask",
    "HaystackTask",
    "Haystacks",
    "SymbolTask",
    "SymbolTaskSettings",
    "Task",
    "TaskItem",
    "TaskItems",
    "TaskSettings",
    "TextTask",
    "TextTaskSettings",
    "is_for",
]
