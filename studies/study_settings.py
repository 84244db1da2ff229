"""The settings of a study."""

import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from errors import StudyError
from evaluation.evaluation_settings import tokens_of
from evaluation.methods import TRAINED
from settings.fields import StrictSettings, setting
from studies.expressions import Expression, expanded, values_in
from studies.study_results_reader import CONFIDENCE, SCHEME, SEED, TOLERANCE


def _directory_name(label: str) -> str:
    """A label as part of the name of a run or results directory, such as scheme=rope,seed=0."""
    if not re.fullmatch(r"[^\s/\\,=.][^/\\,=]*", label):
        raise ValueError(
            "is part of a directory name: it must not contain / , = nor begin with a dot or a space"
        )
    return label


def _text(value: Any) -> str:
    """A scalar as text, for an override and a label."""
    if isinstance(value, (dict, list)):
        raise ValueError(f"{value}: such a value needs a label: {{short: [setting={value}], ...}}")
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _texts(value: Any) -> list[str]:
    return [_text(item) for item in (value if isinstance(value, list) else [value])]


def _overrides(value: Any) -> Any:
    """The overrides of a label as a list, from a list, a single string or null."""
    return [] if value is None else [value] if isinstance(value, str) else value


DirectoryName = Annotated[str, AfterValidator(_directory_name)]
Overrides = Annotated[list[str], BeforeValidator(_overrides, json_schema_input_type=Any)]
Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=Any)]
Skip = list[Annotated[dict[str, Texts], Field(min_length=1)]]
Axis = Annotated[dict[DirectoryName, Overrides], Field(min_length=1)]
Grid = Annotated[dict[DirectoryName, Axis], Field(min_length=1)]


class VariantSettings(StrictSettings):
    """A further row of the report: the runs of a scheme, evaluated under a context-extension
    method."""

    scheme: str = Field(description="label of the axis `scheme` whose runs are evaluated")
    method: str = setting(
        TRAINED, "label in configs/evaluation/methods.yaml or in the evaluation's own methods"
    )


class EvaluationEntry(StrictSettings):
    """One call of evaluate.py on every run."""

    overrides: list[str] = setting([], "settings files and overrides of evaluate.py")
    data: list[str] | None = setting(
        None,
        "settings files and overrides (data.KEY=value) of a corpus to evaluate on, "
        "all of it, prepared with each run's own tokenizer; null: the run's held-out data",
    )
    skip: Skip = setting(
        [], "cells to leave out, as in `skip`, such as schemes that cannot reach these lengths"
    )


class ReportSettings(StrictSettings):
    """The comparisons that the report declares in advance."""

    baseline: str | None = setting(
        None, "variant that all others are compared with; null: the first scheme"
    )
    primary: str | None = setting(
        None, "evaluation summarized at the top; null: the first in `evaluations`"
    )
    lengths: list[int] | None = setting(
        None, "lengths at which variants are compared with the baseline; null: all lengths"
    )
    family: int | None = setting(
        None, "number of simultaneous comparisons; null: schemes × primary lengths", ge=1
    )
    tolerance: float = setting(
        TOLERANCE, "nats; a scheme has held if the bound on its loss increase is below this", gt=0
    )
    confidence: float = setting(CONFIDENCE, "simultaneous level of the intervals", gt=0.5, lt=1)


class EffectSettings(StrictSettings):
    """One effect and its predicted trend."""

    statement: str = Field(description="the effect in a few words, positive as predicted")
    value: Expression = Field(
        description="the number, as in claims, with lengths in multiples of the trained one: "
        "{scheme: rope, length: 4x, from: 1x}; {scheme: rope, evaluation: reading, metric: "
        "read_gain, length: 8x, distance: 1x} is read at distances from the trained length on"
    )
    delta: float = Field(gt=0, description="the smallest effect that counts, in nats")
    expect: Literal["grows", "shrinks", "turns", "steady"] = Field(
        description="predicted trend with size"
    )


class PredictedRung(StrictSettings):
    """A rung whose effects are predicted from those of all other rungs."""

    label: str = Field(description="label of the rung")
    parameters: int = Field(
        gt=0, description="number of parameters without embedding, head and last norm"
    )
    length: int = Field(gt=0, description="trained length in tokens")
    seeds: int = Field(gt=0, description="number of seeds that will be measured")


class TrendSettings(StrictSettings):
    """Effects whose trend with size is reported."""

    axis: str = setting("rung", "axis of the grid whose labels differ in size")
    effects: dict[str, EffectSettings] = Field(min_length=1, description="by name")
    predicted: PredictedRung | None = setting(
        None, "rung whose effects are predicted from those of all other rungs"
    )

    def expressions(self, axes: Iterable[str]) -> dict[str, Expression]:
        """The expanded values of the effects, by name. Raises ValueError for an invalid one.

        Args:
            axes: the axes of the grid.
        """
        keys = [axis for axis in axes if axis not in (self.axis, SEED)]
        return {
            name: expanded(effect.value, [*keys, "distance"], {})
            for name, effect in self.effects.items()
        }

    def problems(self, grid: Mapping[str, Iterable[str]], evaluations: Sequence[str]) -> list[str]:
        """The reasons why the effects cannot be computed in a study.

        Args:
            grid: the labels of each axis.
            evaluations: names of the evaluations.
        """
        if self.axis == SEED or SEED not in grid:
            return ["trend requires an axis `seed` besides trend.axis, such as grid.seed=[0,1,2]"]
        if not evaluations:
            return ["trend requires an evaluation, whose values are compared"]
        try:
            trees = self.expressions(grid)
        except ValueError as error:
            return [f"trend.effects: {error}"]
        labels = {axis: own for axis, own in grid.items() if axis not in (self.axis, SEED)}
        problems = []
        for name, tree in trees.items():
            key = f"trend.effects.{name}.value"
            values = values_in(tree)
            if not values:
                problems.append(f"{key} reads no cell; write a value such as {{length: 4x}}")
            for value in values:
                problems += [f"{key}: {each}" for each in _problems_of(value, labels, evaluations)]
        return list(dict.fromkeys(problems))


def _problems_of(
    value: dict, grid: Mapping[str, Iterable[str]], evaluations: Sequence[str]
) -> list[str]:
    """The problems of a value that an effect reads."""
    problems = []
    for axis, labels in grid.items():
        if axis not in value:
            problems.append(f"a value names no {axis}")
        elif str(value[axis]) not in labels:
            problems.append(f"{axis} {value[axis]} is not among {', '.join(labels)}")
    evaluation = value.get("evaluation")
    if evaluation is not None and evaluation not in evaluations:
        problems.append(f"evaluation {evaluation} is not among {', '.join(evaluations)}")
    for key in ("length", "distance"):
        try:
            tokens_of(value.get(key) or 0, 1)
        except (AttributeError, ValueError):
            text = f"{key} {value[key]} is neither a number of tokens nor a multiple such as 4x"
            problems.append(text)
    return problems


class StudySettings(StrictSettings):
    """Training runs × evaluations → one report."""

    base: list[str] = setting([], "settings files and overrides of train.py for all cells")
    grid: Grid = Field(
        description="axes. Each maps labels to settings files and overrides of train.py, or lists "
        "values of the setting with the axis's name; a cell has one label of each axis. "
        "`scheme` is the axis that is compared, `seed` the axis of repetitions"
    )
    skip: Skip = setting(
        [], "combinations to leave out: axis: label or list of labels; all axes must match"
    )
    variants: dict[str, VariantSettings] = setting(
        {}, "rows of the report besides the schemes as trained"
    )
    evaluations: dict[DirectoryName, EvaluationEntry] = setting(
        {}, "evaluations of every run, by the name of their results directory"
    )
    trend: TrendSettings | None = setting(None, "effects whose trend with size is reported")
    report: ReportSettings = setting(ReportSettings(), "what is compared")  # pyright: ignore[reportCallIssue]

    @field_validator("grid", mode="before", json_schema_input_type=Any)
    @classmethod
    def _labelled(cls, grid: Any) -> Any:
        """Replace a list of values by labels with overrides axis=value."""
        if not isinstance(grid, dict):
            raise ValueError("grid must map axes to labels, as in grid: {seed: [0, 1]}")
        axes = {}
        for axis, value in grid.items():
            if not isinstance(value, dict):
                labels = _texts(value)
                if len(set(labels)) < len(labels):
                    raise ValueError(f"grid.{axis} has duplicate values: {', '.join(labels)}")
                value = {label: [f"{axis}={label}"] for label in labels}
            axes[axis] = value
        return axes

    @model_validator(mode="after")
    def _names_exist(self) -> "StudySettings":
        schemes = list(self.grid.get(SCHEME, {}))
        report = self.report
        # (setting, its value, allowed values)
        names = [
            ("report.baseline", report.baseline, [*schemes, *self.variants]),
            ("report.primary", report.primary, list(self.evaluations)),
        ]
        if trend := self.trend:
            names.append(("trend.axis", trend.axis, list(self.grid)))
            rung = trend.predicted and trend.predicted.label
            names.append(("trend.predicted.label", rung, list(self.grid.get(trend.axis, {}))))
        skips = {"skip": self.skip}
        for name, entry in self.evaluations.items():
            skips[f"evaluations.{name}.skip"] = entry.skip
        for key, skip in skips.items():
            for i, labels in enumerate(skip):
                for axis, out in labels.items():
                    names.append((f"{key}.{i}", axis, list(self.grid)))
                    known = list(self.grid.get(axis, out))
                    names += [(f"{key}.{i}.{axis}", label, known) for label in out]
        names += [
            (f"variants.{label}.scheme", variant.scheme, schemes)
            for label, variant in self.variants.items()
        ]
        problems = [
            f"{key} = {name} is not among {', '.join(known) or 'nothing'}"
            for key, name, known in names
            if name is not None and name not in known
        ]
        problems += [
            f"variants.{label} has the name of a scheme; rename it"
            for label, variant in self.variants.items()
            if label in schemes and (variant.scheme, variant.method) != (label, TRAINED)
        ]
        if self.trend and not problems:
            problems = self.trend.problems(self.grid, list(self.evaluations))
        if problems:
            raise ValueError("\n       ".join(problems))
        return self


def matches(axes: dict[str, str], skip: list[dict[str, list[str]]]) -> bool:
    """Whether an entry of `skip` matches a cell on all of the entry's axes."""
    return any(all(axes[axis] in out for axis, out in entry.items()) for entry in skip)


# The grid's cells.


@dataclass
class GridCell:
    """One training run and its evaluations."""

    axes: dict[str, str]
    arguments: tuple[str, ...]  # settings files and overrides of train.py

    @property
    def id(self) -> str:
        """The name of the cell and of its run directory: `scheme=rope,seed=0`."""
        return ",".join(f"{axis}={label}" for axis, label in self.axes.items())


def cells_of(study: StudySettings) -> list[GridCell]:
    """All combinations of labels that `skip` does not exclude, in the order of the grid; the last
    axis varies fastest.

    Raises StudyError if no cell remains.
    """
    cells = []
    for labels in itertools.product(*study.grid.values()):
        axes = dict(zip(study.grid, labels, strict=True))
        if not matches(axes, study.skip):
            own = [study.grid[axis][label] for axis, label in axes.items()]
            cells.append(GridCell(axes, tuple(itertools.chain(study.base, *own))))
    if not cells:
        raise StudyError("skip excludes every cell of the grid; remove an entry")
    return cells


AnyCell = TypeVar("AnyCell", bound=GridCell)


def running_order(
    cells: Sequence[AnyCell], study: StudySettings, pattern: str | None = None
) -> list[AnyCell]:
    """The cells whose name matches the pattern, by rung in a study with a trend, then by seed, so
    that an unfinished study can compare all schemes. Raises StudyError if no cell matches."""
    selected = [cell for cell in cells if fnmatch.fnmatchcase(cell.id, pattern or "*")]
    if not selected:
        raise StudyError(f"--only {pattern}: no cell matches; the first cell is {cells[0].id}")
    rungs = [study.trend.axis] if study.trend else []
    first = [(axis, list(study.grid[axis])) for axis in [*rungs, SEED] if axis in study.grid]
    return sorted(
        selected, key=lambda cell: [order.index(cell.axes[axis]) for axis, order in first]
    )
