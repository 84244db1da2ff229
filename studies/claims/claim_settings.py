"""The settings of a claim: a study, what was published, and what decides."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from settings.fields import StrictSettings
from studies.claims.expressions import Expression, check_expression, operator_of, values_in
from studies.results.stored import SEED
from studies.study_settings import StudySettings

PILOT_SEEDS = 10  # seeds 0 to 9 are for the choice of settings
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
        "256}, or {minus: [A, B]}, {times: [A, B]}, {absolute: [A]} of such expressions"
    )
    expect: Literal["positive", "no difference"] = Field(
        description="the prediction: a positive number, or none that counts in either direction"
    )
    delta: float = Field(gt=0, description="the smallest effect that counts, in the value's unit")
    solved: float | None = Field(
        None,
        gt=0,
        le=1,
        description="for exact match: compare the share of seeds that reach this value instead of "
        "the mean; `value` is then an arm, or minus of two",
    )


class LearnedSettings(StrictSettings):
    """The condition within the trained length without which a run does not count as learned."""

    value: dict[str, Any] = Field(description="a value without an axis: {metric: nll, length: 64}")
    at_least: float | None = Field(None, description="smallest value of a run that has learned")
    at_most: float | None = Field(None, description="largest value of a run that has learned")

    @model_validator(mode="after")
    def _one_bound(self) -> "LearnedSettings":
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("learned requires either at_least or at_most")
        return self

    def holds(self, value: float) -> bool:
        return value >= self.at_least if self.at_most is None else value <= self.at_most


class ClaimSettings(StudySettings):
    """A published claim as a study with a verdict."""

    statement: str = Field(description="the claim in one sentence")
    question: Literal["breaks", "holds", "reads", "training", "protocol"] = Field(
        description="the group of claims"
    )
    source: ClaimSource = Field(description="where it was published")
    published: str = Field(description="the number or sentence that was published")
    as_reported_by: str | None = Field(
        None, description="where `published` was read, if not in the source itself"
    )
    deviations: str = Field(description="how this study differs from the published one")
    primary: dict[str, PrimaryComparisonSettings] = Field(
        description="one or two comparisons that decide, by name"
    )
    learned: LearnedSettings = Field(description="condition within the trained length")

    @property
    def seeds(self) -> list[str]:
        return list(self.grid[SEED])

    @field_validator("primary", mode="after")
    @classmethod
    def _few(cls, primary: dict) -> dict:
        if not 1 <= len(primary) <= 2:
            raise ValueError(f"primary has one or two comparisons, not {len(primary)}")
        return primary

    @model_validator(mode="after")
    def _consistent(self) -> "ClaimSettings":
        problems = [*self._seed_problems()]
        for name, comparison in self.primary.items():
            problems += self._expression_problems(f"primary.{name}", comparison.value)
            if comparison.solved is not None and not _is_of_arms(comparison.value):
                problems.append(f"primary.{name}.solved requires a value of an arm or minus of two")
        problems += self._expression_problems("learned", self.learned.value)
        if problems:
            raise ValueError("\n       ".join(problems))
        return self

    def _seed_problems(self) -> list[str]:
        seeds = self.grid.get(SEED, {})
        if len(seeds) < 3:
            return ["grid.seed of a claim lists at least 3 seeds"]
        pilot = [seed for seed in seeds if not seed.isdigit() or int(seed) < PILOT_SEEDS]
        if pilot:
            return [
                f"grid.seed: {', '.join(pilot)} are seeds for the choice of settings; use seeds "
                f"from {PILOT_SEEDS} on"
            ]
        return []

    def _expression_problems(self, place: str, tree: Expression) -> list[str]:
        try:
            check_expression(tree, list(self.grid))
        except ValueError as error:
            return [f"{place}: {error}"]
        problems = []
        for value in values_in(tree):
            for axis, labels in self.grid.items():
                if axis != SEED and axis in value and str(value[axis]) not in labels:
                    problems.append(
                        f"{place}: {axis} {value[axis]} is not in the grid: {', '.join(labels)}"
                    )
            evaluation = value.get("evaluation")
            if evaluation is not None and evaluation not in self.evaluations:
                problems.append(f"{place}: {evaluation} is not among the evaluations")
            if place != "learned":
                absent = [a for a in self.grid if a not in (SEED, *value) and len(self.grid[a]) > 1]
                problems += [f"{place}: {value} does not say its {axis}" for axis in absent]
        return problems


def _is_of_arms(tree: Expression) -> bool:
    """Whether an expression is a value of one arm, or minus of two."""
    if not isinstance(tree, dict):
        return False
    operands = tree["minus"] if operator_of(tree) == "minus" else [tree]
    return all(isinstance(value, dict) and operator_of(value) is None for value in operands)
