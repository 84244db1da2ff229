"""What an evaluation by tasks measures."""

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.tasks.settings import TaskSettings


class TaskEvaluationSettings(BaseModel):
    """Items of one task at several lengths: which answer is likeliest, and which would be written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str | None = Field(
        None,
        pattern=r"^\w[\w.+-]*$",
        description="name of the results folder under RUN/evaluation/; default: the task and a hash",
    )
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
    rules: list[str] | dict[str, list[str]] = Field(
        ["trained", "truncate"],
        description="labels of configs/evaluation/rules.yaml, or label: [dotted words for the model]",
    )
    unreachable: Literal["refuse", "dash"] = Field(
        "refuse", description="a length that no rule can place is an error, or stands as a dash"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of the intervals")
    seed: int = Field(0, ge=0, description="draws items and haystacks; never those of a training")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="arithmetic of the model")
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1 ...")
    batch: int | None = Field(None, ge=1, description="items at once; default: what the memory allows")
    chunk: int = Field(4096, ge=1, description="longer prompts are prefilled in chunks of this many tokens")
    memory: float | None = Field(
        None, gt=0, description="GiB the evaluation may use; default: 80% of what is free"
    )

    @field_validator("lengths")
    @classmethod
    def _positive(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (not value or min(value) < 1):
            raise ValueError("lengths must be positive and at least one")
        return value

    @field_validator("rules")
    @classmethod
    def _some(cls, value):
        if not value:
            raise ValueError("rules is empty; the smallest useful list is [trained]")
        return value

    def grid(self, trained_length: int) -> list[int]:
        """The lengths in ascending order, the trained length always among them."""
        return sorted({*(self.lengths or [trained_length * n for n in (1, 2, 4)]), trained_length})

    def hash(self) -> str:
        """Short name of what is measured; where and how fast it is computed does not count."""
        free = {"folder", "device", "batch", "memory"}
        return hashlib.sha256(self.model_dump_json(exclude=free).encode()).hexdigest()[:8]
