"""The settings of a run.

Fields marked `may_change` do not shape the weights beyond rounding: they may differ when a run is
resumed and do not count in its identity.
"""

import sys
from itertools import groupby
from typing import Literal

from pydantic import Field, model_validator

from data.data_settings import DataSettings
from data.sampling.window_order import StepRange, samples_before
from model.model_settings import ModelSettings
from run_directory.training_settings import TrainingSettings, WsdSchedule, step_ranges_of
from settings.fields import StrictSettings, counts_if_changed, may_change, setting, show
from settings.load import differences


class ParentSettings(StrictSettings):
    """The checkpoint that an extension run or fork starts from, and whose settings are the
    defaults."""

    run: str = Field(
        description="run directory whose weights are the initial weights",
        json_schema_extra={"may_change": True},
    )
    checkpoint: int | None = may_change(
        None,
        "step of its checkpoint; null: the newest",
        ge=0,
    )
    hash: str | None = setting(
        None, "hash of that checkpoint; recorded at the start, and checked if set"
    )
    fork: Literal[True] | None = counts_if_changed(
        "true: continue its optimizer, step count and data order too, as --fork RUN does"
    )


class RunSettings(StrictSettings):
    """All settings of one run."""

    train_length: int = setting(256, "tokens of a training window, L0", ge=2)
    original_length: int | None = setting(
        None, "length L0 that stretch factors are relative to; null: train_length", ge=2
    )
    seed: int = setting(
        0,
        "seed of initial weights, data order and samples",
        ge=0,
        lt=1 << 63,
    )
    parent: ParentSettings | None = counts_if_changed("the run that an extension run starts from")
    model: ModelSettings = setting(
        ModelSettings(),  # pyright: ignore[reportCallIssue]
        "the decoder and its positional scheme",
    )
    data: DataSettings = setting(
        DataSettings(),  # pyright: ignore[reportCallIssue]
        "text, tokenizer and batches",
    )
    training: TrainingSettings = setting(TrainingSettings(), "optimization, validation and logging")

    @property
    def step_ranges(self) -> tuple[StepRange, ...]:
        """Window length, batch size and steps of every stage."""
        t = self.training
        return step_ranges_of(t.stages, t.tokens, self.train_length, t.batch_size)

    @property
    def plan(self) -> tuple[StepRange, ...]:
        """The step ranges that determine the order of the data: one per stage, or one for
        consecutive stages of equal length and batch size."""
        return tuple(
            StepRange(*size, sum(step_range.steps for step_range in group))
            for size, group in groupby(self.step_ranges, key=lambda step_range: step_range[:2])
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(step_range.steps for step_range in self.step_ranges)

    @property
    def is_fork(self) -> bool:
        """Whether the run continues its parent's optimizer, step count and data order."""
        return self.parent is not None and bool(self.parent.fork)

    @property
    def first_step(self) -> int:
        """The number of updates before the run's own first update: in a fork, the parent's updates;
        otherwise 0."""
        return self.parent.checkpoint or 0 if self.parent is not None and self.is_fork else 0

    def tokens_after(self, step: int) -> int:
        """Target tokens of the first `step` updates."""
        return sum(group.length * group.samples for group in samples_before(self.plan, step))

    @property
    def trained_tokens(self) -> int:
        """Target tokens of the whole run."""
        return self.tokens_after(self.steps)

    @model_validator(mode="after")
    def _lengths_and_budget_agree(self) -> "RunSettings":
        t = self.training
        length = self.train_length
        targets = self.training.validation.targets
        if self.steps < 1:
            raise ValueError(
                f"training.tokens = {t.tokens} is less than one step: training.batch_size × "
                f"train_length = {t.batch_size * length} tokens"
            )
        if targets > length and not self.data.is_generated:
            raise ValueError(
                f"training.validation.targets = {targets} exceeds train_length = {length}"
            )
        self.data.check(length)
        t.validation.steps(self.steps)
        if t.state == "carry":
            self._check_carried()
        if t.cuda_graphs:
            self._check_recorded()
        decay = t.lr_schedule.decay if isinstance(t.lr_schedule, WsdSchedule) else 0.0
        warmup = t.lr_schedule.warmup / (1 if t.lr_schedule.warmup < 1 else self.steps)
        share = warmup + decay / (1 if decay <= 1 else self.steps)
        if share > 1:
            keys = "warmup or decay" if decay else "warmup"
            raise ValueError(
                f"training.lr_schedule: warmup and decay take {share:.0%} of the run's "
                f"{self.steps} steps; lower {keys}, or raise training.tokens"
            )
        return self

    def _check_recorded(self) -> None:
        """Raise ValueError if the shapes or the host-side numbers of passes differ between steps,
        or if a pass is more than one graph."""
        t = self.training
        rest = t.batch_size % (t.micro_batch_size or t.batch_size)
        self._require(
            "training.cuda_graphs records passes that are equal in every step",
            "training.cuda_graphs to false",
            ("training.compile", "null or true", t.compile is not False),
            ("training.stages", "one length and batch size", len(self.plan) == 1),
            ("training.micro_batch_size", "a divisor of training.batch_size", rest == 0),
            ("training.state", "reset", t.state == "reset"),
            ("training.parallel.context", "1", t.parallel.context == 1),
            ("training.parallel.sharding", "none", t.parallel.sharding != "full"),
            (
                "training.parallel.activation_checkpointing",
                "false",
                t.parallel.checkpointing == "none",
            ),
            ("data.packing", "concat", self.data.packing == "concat"),
            ("data.positions.name", "plain", self.data.positions.name == "plain"),
            ("data.source.name", "a text", not self.data.is_generated),
        )

    def _check_carried(self) -> None:
        """Raise ValueError if the rows of batches cannot read consecutive windows."""
        self._require(
            "training.state = carry reads consecutive windows of documents",
            "training.state to reset",
            ("data.source.name", "a text", not self.data.is_generated),
            ("data.packing", "intra_document", self.data.packing == "intra_document"),
            ("data.positions.name", "plain", self.data.positions.name == "plain"),
            ("data.mixture", "[]", not self.data.mixture),
            ("training.stages", "one length and batch size", len(self.plan) == 1),
            ("training.parallel.context", "1", self.training.parallel.context == 1),
        )

    def _require(self, reason: str, other: str, *conditions: tuple[str, str, bool]) -> None:
        """Raise ValueError for the first of `conditions` (setting, required value, whether it is
        met) that is not met; `other`: the setting that could change instead."""
        for key, required, is_met in conditions:
            if not is_met:
                raise ValueError(f"{reason}: set {key} to {required}, or {other}")


def describe_changes(old: RunSettings, new: RunSettings, include_allowed: bool = True) -> list[str]:
    """Every setting that differs, as `key: old → new`; with `include_allowed`, also those
    that may change on resume."""
    return [
        f"{each.key}: {short_text(each.old)} → {short_text(each.new)}"
        for each in differences(old, new)
        if include_allowed or not each.may_change
    ]


def short_text(value: object) -> str:
    if not isinstance(value, dict):
        return str(value) if isinstance(value, str) else show(value, sys.maxsize)
    inside = ", ".join(
        f"{k}: {short_text(v)}" for k, v in value.items() if k != "name" and v is not None
    )
    return f"{value.get('name', '')}({inside})" if inside else str(value.get("name", "{}"))
