"""What an evaluation by tasks measures."""

from typing import Literal

from pydantic import Field

from data.tasks.settings import TaskSettings
from evaluation.settings import MeasurementSettings


class TaskEvaluationSettings(MeasurementSettings):
    """Items of one task at several lengths: which answer is likeliest, and which would be written."""

    protocol: Literal["tasks"] = Field("tasks", description="items with one right answer each")
    task: TaskSettings | None = Field(None, description="which task; null: the one the run was trained on")
    lengths: list[int] | None = Field(
        None, description="input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4"
    )
    items: int = Field(200, ge=1, description="items at each length: the same questions, grown")
    depths: int = Field(5, ge=1, description="depths of what is hidden, evenly from 0 (far) to 1 (near)")
    haystacks: int = Field(40, ge=1, description="at most so many texts around what is hidden, evenly used")
    haystack_store: str | None = Field(
        None,
        description="folder of a prepared corpus whose held-out text is the haystack; null: the run's own "
        "where it was trained on text, else task.haystack",
    )
    unreachable: Literal["refuse", "dash"] = Field(
        "refuse", description="a length that no rule can place is an error, or stands as a dash"
    )
    batch: int | None = Field(None, ge=1, description="items at once; default: what the memory allows")

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, the trained length always among them."""
        return sorted({*(self.lengths or [trained_length * n for n in (1, 2, 4)]), trained_length})
