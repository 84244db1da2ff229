"""The settings of a study."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from evaluation.scoring.methods import TRAINED
from settings.fields import StrictSettings
from studies.results.stored import CONFIDENCE, SCHEME, TOLERANCE

_LABEL = re.compile(r"^[^\s/\\,=.][^/\\,=]*$")  # part of a directory name: scheme=rope,seed=0
_NAME = re.compile(r"^\w[\w.+-]*$")
Grid = dict[str, dict[str, list[str]]]


def _text(value: Any) -> str:
    """A scalar as written in an override, and as a label."""
    if isinstance(value, (dict, list)):
        raise ValueError(f"{value}: such a value needs a label: {{short: [setting={value}], ...}}")
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _skip_entries(entries: Any) -> Any:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("skip must be a list of mappings such as {scheme: fox, seed: [1, 2]}")

    def labels(value: Any) -> list[str]:
        return [_text(one) for one in (value if isinstance(value, list) else [value])]

    return [{axis: labels(value) for axis, value in entry.items()} for entry in entries]


Skip = Annotated[
    list[dict[str, list[str]]],
    BeforeValidator(_skip_entries, json_schema_input_type=Any),
]


class VariantSettings(StrictSettings):
    """A row of the report besides the schemes as trained: the runs of a scheme under a method."""

    scheme: str = Field(description="label of the axis `scheme` whose runs are evaluated")
    method: str = Field(
        TRAINED,
        description="label in configs/evaluation/methods.yaml or in the evaluation's own methods",
    )


class EvaluationEntry(StrictSettings):
    """One call of evaluate.py on every run."""

    overrides: list[str] = Field([], description="settings files and overrides of evaluate.py")
    data: list[str] | None = Field(
        None,
        description="settings files and overrides (data.KEY=value) of a corpus to evaluate on, all of it, "
        "prepared with each run's own tokenizer; null: the run's held-out data",
    )
    skip: Skip = Field(
        [],
        description="cells to leave out, as in `skip`, such as schemes that cannot reach these lengths",
    )


class ReportSettings(StrictSettings):
    """The comparisons that the report declares in advance."""

    baseline: str | None = Field(
        None, description="variant that all others are compared with; null: the first"
    )
    primary: str | None = Field(
        None, description="evaluation summarized at the top; null: the first of `evaluations`"
    )
    lengths: list[int] | None = Field(
        None, description="lengths at which variants are compared with the baseline; null: all"
    )
    family: int | None = Field(
        None,
        ge=1,
        description="number of simultaneous comparisons; null: schemes × primary lengths",
    )
    tolerance: float = Field(
        TOLERANCE,
        gt=0,
        description="nats; a scheme has held if the bound on its loss increase is below this",
    )
    confidence: float = Field(
        CONFIDENCE, gt=0.5, lt=1, description="simultaneous level of the intervals"
    )
    pool_seed_variance: bool = Field(
        False, description="assume that the seed variance is equal for all schemes, and pool it"
    )


class StudySettings(StrictSettings):
    """Training runs × evaluations → one report."""

    base: list[str] = Field(
        [], description="settings files and overrides of train.py for all cells"
    )
    grid: Grid = Field(
        description="axes. Each maps labels to settings files and overrides of train.py, or lists values of "
        "the setting with the axis's name; a cell has one label of each. `scheme` is compared, `seed` repeats"
    )
    skip: Skip = Field(
        [],
        description="combinations to leave out: axis: label or list of labels; all axes must match",
    )
    variants: dict[str, VariantSettings] = Field(
        {}, description="rows of the report besides the schemes as trained"
    )
    evaluations: dict[str, EvaluationEntry] = Field(
        {}, description="evaluations of every run, by the name of their results directory"
    )
    report: ReportSettings = Field(ReportSettings(), description="what is compared")  # pyright: ignore[reportCallIssue]

    @field_validator("grid", mode="before", json_schema_input_type=Any)
    @classmethod
    def _labelled(cls, grid: Any) -> Any:
        """Every axis as label: [overrides]; a list of values becomes axis=value."""
        if not isinstance(grid, dict):
            raise ValueError("grid must map axes to labels, as in grid: {seed: [0, 1]}")
        return {axis: _labels(axis, value) for axis, value in grid.items()}

    @model_validator(mode="after")
    def _names_exist(self) -> "StudySettings":
        schemes = self.grid.get(SCHEME, {})
        known = [*schemes, *self.variants]
        problems = [*_axis_problems(self.grid), *_skip_problems("skip", self.skip, self.grid)]
        for label, variant in self.variants.items():
            where = f"variants.{label}"
            if SCHEME not in self.grid:
                problems.append(f"{where} needs an axis `{SCHEME}` in the grid")
            elif variant.scheme not in schemes:
                problems.append(
                    f"{where}.scheme = {variant.scheme} is not in the grid: {', '.join(schemes)}"
                )
            if label in schemes and (variant.scheme, variant.method) != (label, TRAINED):
                problems.append(f"{where} has the name of a scheme; rename it")
        for name, entry in self.evaluations.items():
            problems += _skip_problems(f"evaluations.{name}.skip", entry.skip, self.grid)
            if not _NAME.match(name):
                problems.append(
                    f"evaluations.{name} must be a directory name: use letters, digits, . + - _"
                )
        if self.report.baseline is not None and self.report.baseline not in known:
            known_names = ", ".join(known) or "nothing"
            problems.append(f"report.baseline = {self.report.baseline} is not among {known_names}")
        if self.report.primary is not None and self.report.primary not in self.evaluations:
            names = ", ".join(self.evaluations) or "no evaluations"
            problems.append(f"report.primary = {self.report.primary} is not among {names}")
        if problems:
            raise ValueError("\n       ".join(problems))
        return self


def _labels(axis: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {
            label: [one] if isinstance(one, str) else [] if one is None else one
            for label, one in value.items()
        }
    labels = [_text(one) for one in (value if isinstance(value, list) else [value])]
    if len(set(labels)) < len(labels):
        raise ValueError(f"grid.{axis} has duplicate values: {', '.join(labels)}")
    return {label: [f"{axis}={label}"] for label in labels}


def _axis_problems(grid: Grid) -> list[str]:
    problems = [] if grid else ["grid is empty: define at least one axis, such as seed: [0]"]
    problems += [
        f"grid.{axis} is empty: define at least one label" for axis in grid if not grid[axis]
    ]
    names = {f"grid.{axis}": axis for axis in grid}
    names |= {f"grid.{axis}.{label}": label for axis, labels in grid.items() for label in labels}
    return problems + [
        f"{where} is part of a directory name: it must not contain / , = nor begin with a dot or a space"
        for where, name in names.items()
        if not _LABEL.match(name)
    ]


def _skip_problems(where: str, skip: list[dict[str, list[str]]], grid: Grid) -> list[str]:
    problems = []
    for i, entry in enumerate(skip):
        if not entry:
            problems.append(f"{where}.{i} is empty and would exclude every cell")
        for axis, labels in entry.items():
            unknown = [label for label in labels if label not in grid.get(axis, {})]
            if axis not in grid:
                problems.append(
                    f"{where}.{i}.{axis} is not an axis; the axes are {', '.join(grid)}"
                )
            elif unknown:
                problems.append(
                    f"{where}.{i}.{axis}: {', '.join(unknown)} not among {', '.join(grid[axis])}"
                )
    return problems


def matches(axes: dict[str, str], skip: list[dict[str, list[str]]]) -> bool:
    """Whether an entry of `skip` matches a cell on all of the entry's axes."""
    return any(all(axes[axis] in out for axis, out in entry.items()) for entry in skip)
