"""Settings of an evaluation by tasks."""

from typing import Literal

from pydantic import Field

from data.tasks import TaskSettings
from evaluation.evaluation_settings import MeasurementSettings


class TaskEvaluationSettings(MeasurementSettings):
    """Items of one task at several lengths: accuracy by likelihood, and exact match."""

    protocol: Literal["tasks"] = Field("tasks", description="items with one right answer each")
    task: TaskSettings | None = Field(
        None, description="the task; null: the one the run was trained on"
    )
    lengths: list[int] | None = Field(
        None,
        description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4",
    )
    items: int = Field(
        200, ge=1, description="items per length: the same questions in longer contexts"
    )
    depths: int = Field(
        5, ge=1, description="depths of the hidden fact, evenly from 0 (far) to 1 (near)"
    )
    haystacks: int = Field(
        40,
        ge=1,
        description="maximum number of haystack texts, used evenly",
    )
    haystack_store: str | None = Field(
        None,
        description="folder of a prepared corpus whose held-out text is the haystack; null: the "
        "run's own if it was trained on text, else task.haystack",
    )
    unreachable: Literal["refuse", "dash"] = Field(
        "refuse",
        description="a length that no method supports is an error, or a dash in the table",
    )
    batch: int | None = Field(
        None, ge=1, description="items per batch; default: as the memory allows"
    )

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, including the trained length."""
        return sorted({*(self.lengths or [trained_length * n for n in (1, 2, 4)]), trained_length})
