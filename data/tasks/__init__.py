"""Synthetic tasks. Each item has one correct answer and is a function of a seed and an index."""

from typing import Annotated

from pydantic import Field

from data.tasks.closed import AdditionTask, CopyTask, ParityTask, RecallTask, ReverseTask
from data.tasks.haystack import Haystacks, is_for
from data.tasks.items import NO_TEXT, Task, TaskContext, TaskItem
from data.tasks.retrieval import HaystackTask, NeedleTask, PasskeyTask, VariablesTask

TaskSettings = Annotated[
    PasskeyTask
    | NeedleTask
    | VariablesTask
    | RecallTask
    | CopyTask
    | ReverseTask
    | ParityTask
    | AdditionTask,
    Field(discriminator="name"),
]

__all__ = [
    "NO_TEXT",
    "HaystackTask",
    "Haystacks",
    "Task",
    "TaskContext",
    "TaskItem",
    "TaskSettings",
    "is_for",
]
