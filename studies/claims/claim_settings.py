"""The settings of a claim: a study, what was published, and what decides.

A comparison is an expression: one number for each seed, from the measured values of the claim's
arms. An expression is a number; a value of one arm, such as {scheme: rope, length: 256}, which is a
change with `from`, {scheme: rope, length: 256, from: 64}; or an operator with its operands,
{minus: [A, B]}.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from settings.fields import StrictSettings, setting
from studies.stored_study import SEED
from studies.study_settings import StudySettings

PILOT_SEEDS = 10  # seeds 0 to 9 are for the choice of settings
QUESTIONS = {
    "breaks": "What breaks beyond the trained length?",
    "holds": "What holds beyond the trained length?",
    "reads": "What is still read beyond the trained length?",
    "training": "What does training change?",
    "protocol": "Which protocol flips the sign?",
}

Expression = Any  # a number, or a mapping as above
Read = Callable[[dict], Any]  # the values of one arm

# Operands and function of each operator.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "minus": (2, np.subtract),
    "times": (2, np.multiply),
    "absolute": (1, np.abs),
}
# Keys of a value besides the axes of the grid, and what they are where they are not given.
DEFAULTS = {"evaluation": None, "metric": "nll", "method": "trained", "length": None}
FROM = "from"  # the length that a change begins at


def operator_of(tree: Expression) -> str | None:
    """The operator of an expression; None for a number or a value."""
    if not isinstance(tree, dict):
        return None
    return next((key for key in tree if key in OPERATORS), None)


def expanded(tree: Expression, axes: list[str], more: dict[str, str]) -> Expression:
    """The expression with changes written as differences and the labels `more` in every value.
    Raises ValueError with the part that is no expression."""
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return tree
    if not isinstance(tree, dict) or not tree:
        raise ValueError(f"{tree}: write a value such as {{scheme: rope, length: 256}}")
    name = operator_of(tree)
    if name is not None:
        operands = tree[name]
        count = OPERATORS[name][0]
        if len(tree) > 1 or not isinstance(operands, list) or len(operands) != count:
            raise ValueError(f"{name} has a list of {count} operands and stands alone, not {tree}")
        return {name: [expanded(operand, axes, more) for operand in operands]}
    known = [*axes, *DEFAULTS, FROM]
    if unknown := [key for key in tree if key not in known]:
        raise ValueError(
            f"{unknown[0]} is neither an operator ({', '.join(OPERATORS)}) nor a key of a value "
            f"({', '.join(known)})"
        )
    value = {key: each for key, each in tree.items() if key != FROM} | more
    if FROM not in tree:
        return value
    return {"minus": [value, value | {"length": tree[FROM]}]}


def values_in(tree: Expression) -> Iterator[dict]:
    """The values of arms that an expression reads."""
    name = operator_of(tree)
    if name is not None:
        for operand in tree[name]:
            yield from values_in(operand)
    elif isinstance(tree, dict):
        yield tree


def evaluate(tree: Expression, read: Read) -> Any:
    """The number of an expression for each element of what `read` returns."""
    name = operator_of(tree)
    if name is not None:
        _, function = OPERATORS[name]
        return function(*(evaluate(operand, read) for operand in tree[name]))
    return read(tree) if isinstance(tree, dict) else tree


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
        description="the prediction: a positive number, or none that counts in either direction"
    )
    delta: float = Field(gt=0, description="the smallest effect that counts, in the value's unit")
    each: str | None = setting(
        None, "an axis: one comparison for each of its labels, such as corpora"
    )
    solved: float | None = setting(
        None,
        "for exact match: compare the share of seeds that reach this value instead of "
        "the mean; `value` is then an arm, or minus of two",
        gt=0,
        le=1,
    )


class LearnedSettings(StrictSettings):
    """A condition within the trained length without which a run does not count as learned."""

    value: dict[str, Any] = Field(
        description="a value, of all arms with the labels that it names: {metric: nll, length: 64}"
    )
    at_least: float | None = setting(None, "smallest value of a run that has learned")
    at_most: float | None = setting(None, "largest value of a run that has learned")

    @model_validator(mode="after")
    def _one_bound(self) -> "LearnedSettings":
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("learned requires either at_least or at_most")
        return self

    def holds(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most


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
    deviations: str = Field(description="how this study differs from the published one")
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
        """The primary comparisons by name, those with `each` by name and label, with expanded
        values."""
        comparisons = {}
        for name, comparison in self.primary.items():
            axis = comparison.each
            for label in self.grid[axis] if axis else [""]:
                more = {axis: label} if axis else {}
                value = expanded(comparison.value, self.axes, more)
                of = f"{name}, {label}" if axis else name
                comparisons[of] = comparison.model_copy(update={"value": value})
        return comparisons

    def label(self, value: dict, axis: str) -> str:
        """The label of a value on an axis: the only one if it names none."""
        return str(value.get(axis, next(iter(self.grid[axis]))))

    def arm(self, value: dict) -> dict[str, str]:
        """The labels of a value on all axes but the seed."""
        return {axis: self.label(value, axis) for axis in self.axes}

    @property
    def arms(self) -> list[dict[str, str]]:
        """The arms that the comparisons read."""
        arms = []
        for comparison in self.comparisons.values():
            for value in values_in(comparison.value):
                arm = self.arm(value)
                if arm not in arms:
                    arms.append(arm)
        return arms

    def conditions(self, arm: dict[str, str]) -> list[LearnedSettings]:
        """The conditions of an arm."""
        return [each for each in self.learned if self.arm(arm | each.value) == arm]

    @model_validator(mode="after")
    def _consistent(self) -> "ClaimSettings":
        problems = [*self._seed_problems()]
        for name, each in self.primary.items():
            if each.each is not None and each.each not in self.axes:
                problems.append(f"primary.{name}.each = {each.each} is not an axis of the grid")
        if not problems:
            problems += self._comparison_problems()
        if problems:
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
        for name, comparison in comparisons.items():
            for value in values_in(comparison.value):
                problems += self._value_problems(f"primary.{name}", value)
                for axis in self.axes:
                    if axis not in value and len(self.grid[axis]) > 1:
                        problems.append(f"primary.{name}: {value} names no {axis}")
            if comparison.solved is not None and not _is_of_arms(comparison.value):
                problems.append(f"primary.{name}.solved requires a value of an arm or minus of two")
        for condition in self.learned:
            problems += self._value_problems("learned", condition.value)
        if not problems:
            bare = [arm for arm in self.arms if not self.conditions(arm)]
            problems += [f"learned has no condition for {', '.join(arm.values())}" for arm in bare]
        return problems

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

    def _value_problems(self, place: str, value: dict) -> list[str]:
        problems = []
        for axis in self.axes:
            if axis in value and str(value[axis]) not in self.grid[axis]:
                problems.append(
                    f"{place}: {axis} {value[axis]} is not in the grid: "
                    f"{', '.join(self.grid[axis])}"
                )
        evaluation = value.get("evaluation")
        if evaluation is not None and evaluation not in self.evaluations:
            problems.append(f"{place}: {evaluation} is not among the evaluations")
        return problems


def _is_of_arms(tree: Expression) -> bool:
    """Whether an expression is a value of one arm, or minus of two."""
    if not isinstance(tree, dict):
        return False
    operands = tree["minus"] if operator_of(tree) == "minus" else [tree]
    return all(isinstance(value, dict) and operator_of(value) is None for value in operands)
