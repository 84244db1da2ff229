"""The settings of a claim: a study, the published result, and the comparisons that decide."""

from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from settings.fields import StrictSettings, setting
from studies.expressions import Expression, expanded, values_in
from studies.study_results_reader import SEED
from studies.study_settings import StudySettings

PILOT_SEEDS = 10  # seeds 0 to 9 are reserved for the choice of settings
QUESTIONS = {
    "breaks": "What breaks beyond the trained length?",
    "holds": "What holds beyond the trained length?",
    "reads": "What is still read beyond the trained length?",
    "training": "What does training change?",
    "protocol": "Which protocol flips the sign?",
}


class ClaimSource(StrictSettings):
    """Where a claim was published."""

    paper: str = Field(description="arXiv id, or repository#thread")
    title: str = Field(description="title of the paper or thread")
    authors: str = Field(description="first author and year")
    place: str = Field(description="table, figure or section")


class PrimaryComparisonSettings(StrictSettings):
    """One paired number for each seed, positive as predicted."""

    value: Expression = Field(
        description="the number: a value of one arm, such as {scheme: rope, metric: nll, length: "
        "256}, its change with `from: 64`, or {minus: [A, B]}, {times: [A, B]}, {absolute: [A]}"
    )
    expect: Literal["positive", "no difference"] = Field(
        description="the prediction: a positive number, or no effect that counts in any direction"
    )
    delta: float = Field(gt=0, description="the smallest effect that counts, in the value's unit")
    each: str | None = setting(
        None, "an axis, such as corpora: one comparison for each of its labels"
    )
    solved: float | None = setting(
        None,
        "for exact match: compare the share of seeds that reach this value instead of "
        "the mean; `value` is then an arm, or minus of two",
        gt=0,
        le=1,
    )


class LearnedSettings(StrictSettings):
    """A condition within the trained length that a run must meet to count as learned."""

    value: dict[str, Any] = Field(
        description="a value, checked in all arms that match its labels: {metric: nll, length: 64}"
    )
    at_least: float | None = setting(None, "smallest value of a run that has learned")
    at_most: float | None = setting(None, "largest value of a run that has learned")

    @model_validator(mode="after")
    def _one_bound(self) -> "LearnedSettings":
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("learned requires either at_least or at_most")
        return self

    def holds(self, values: np.ndarray) -> np.ndarray:
        if self.at_least is not None:
            return values >= self.at_least
        assert self.at_most is not None
        return values <= self.at_most


class ClaimSettings(StudySettings):
    """A published claim as a study with a verdict."""

    statement: str = Field(description="the claim in one sentence")
    question: Literal["breaks", "holds", "reads", "training", "protocol"] = Field(
        description="the group of claims"
    )
    source: ClaimSource = Field(description="where it was published")
    published: str = Field(description="the number or sentence that was published")
    as_reported_by: str | None = setting(
        None, "where `published` was read, if not in the source itself"
    )
    deviations: str = Field(description="how this study differs from the published study")
    primary: dict[str, PrimaryComparisonSettings] = Field(
        description="one or two comparisons that decide, by name"
    )
    learned: list[LearnedSettings] = Field(
        min_length=1, description="conditions within the trained length"
    )

    @property
    def seeds(self) -> list[str]:
        return list(self.grid[SEED])

    @property
    def axes(self) -> list[str]:
        """The axes besides the seed."""
        return [axis for axis in self.grid if axis != SEED]

    @cached_property
    def comparisons(self) -> dict[str, PrimaryComparisonSettings]:
        """The primary comparisons with expanded values, by name; with `each`, by name and label."""
        comparisons = {}
        for name, comparison in self.primary.items():
            axis = comparison.each
            for label in self.grid[axis] if axis else [""]:
                more = {axis: label} if axis else {}
                value = expanded(comparison.value, self.axes, more)
                of = f"{name}, {label}" if axis else name
                comparisons[of] = comparison.model_copy(update={"value": value})
        return comparisons

    def arm(self, value: dict) -> dict[str, str]:
        """The labels of a value on all axes except the seed. An axis that the value does not name
        has only one label."""
        return {axis: str(value.get(axis, next(iter(self.grid[axis])))) for axis in self.axes}

    @property
    def arms(self) -> list[dict[str, str]]:
        """The arms that the comparisons read."""
        values = [each for own in self.comparisons.values() for each in values_in(own.value)]
        arms = {tuple(self.arm(value).items()): self.arm(value) for value in values}
        return list(arms.values())

    def conditions(self, arm: dict[str, str]) -> list[LearnedSettings]:
        """The conditions that apply to an arm."""
        return [each for each in self.learned if self.arm(arm | each.value) == arm]

    @model_validator(mode="after")
    def _consistent(self) -> "ClaimSettings":
        seeds = self.grid.get(SEED, {})
        problems = []
        if len(seeds) < 3:
            problems.append("grid.seed of a claim lists at least 3 seeds")
        if pilot := [seed for seed in seeds if not seed.isdigit() or int(seed) < PILOT_SEEDS]:
            problems.append(
                f"grid.seed: {', '.join(pilot)} are seeds for the choice of settings; use seeds "
                f"from {PILOT_SEEDS} on"
            )
        for name, each in self.primary.items():
            if each.each is not None and each.each not in self.axes:
                problems.append(f"primary.{name}.each = {each.each} is not an axis of the grid")
        if problems := problems or self._comparison_problems():
            raise ValueError("\n       ".join(problems))
        return self

    def _comparison_problems(self) -> list[str]:
        try:
            comparisons = self.comparisons
        except ValueError as error:
            return [f"primary: {error}"]
        if not 1 <= len(comparisons) <= 2:
            return [f"primary has one or two comparisons, not {len(comparisons)}"]
        problems = []
        values = [("learned", condition.value) for condition in self.learned]
        for name, comparison in comparisons.items():
            own = values_in(comparison.value)
            values += [(f"primary.{name}", value) for value in own]
            for axis in self.axes:
                if len(self.grid[axis]) > 1 and not all(axis in value for value in own):
                    problems.append(f"primary.{name}: a value names no {axis}")
            of_arms = (*own[:1], {"minus": own})
            if comparison.solved is not None and comparison.value not in of_arms:
                problems.append(f"primary.{name}.solved requires a value of an arm or minus of two")
        for place, value in values:
            known = {**self.grid, "evaluation": [None, *self.evaluations]}
            problems += [
                f"{place}: {key} {value[key]} is not among {', '.join(map(str, labels))}"
                for key, labels in known.items()
                if key in value and value[key] not in labels and str(value[key]) not in labels
            ]
        if not problems:
            bare = [arm for arm in self.arms if not self.conditions(arm)]
            problems += [f"learned has no condition for {', '.join(arm.values())}" for arm in bare]
        return problems
