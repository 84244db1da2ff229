"""The settings of a study."""

import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from errors import StudyError
from evaluation.scoring.methods import TRAINED
from settings.fields import StrictSettings, setting
from studies.stored_study import CONFIDENCE, SCHEME, SEED, TOLERANCE

_LABEL = re.compile(r"^[^\s/\\,=.][^/\\,=]*$")  # part of a directory name: scheme=rope,seed=0
_NAME = re.compile(r"^\w[\w.+-]*$")
Axis = Annotated[dict[str, list[str]], Field(min_length=1)]
Grid = Annotated[dict[str, Axis], Field(min_length=1)]


def _text(value: Any) -> str:
    """A scalar as written in an override, and as a label."""
    if isinstance(value, (dict, list)):
        raise ValueError(f"{value}: such a value needs a label: {{short: [setting={value}], ...}}")
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _texts(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [_text(item) for item in items]


def _skip_entries(entries: Any) -> Any:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("skip must be a list of mappings such as {scheme: fox, seed: [1, 2]}")
    return [{axis: _texts(value) for axis, value in entry.items()} for entry in entries]


Skip = Annotated[
    list[dict[str, list[str]]],
    BeforeValidator(_skip_entries, json_schema_input_type=Any),
]


class VariantSettings(StrictSettings):
    """A row of the report besides the schemes as trained: the runs of a scheme under a method."""

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
        None, "variant that all others are compared with; null: the first"
    )
    primary: str | None = setting(
        None, "evaluation summarized at the top; null: the first of `evaluations`"
    )
    lengths: list[int] | None = setting(
        None, "lengths at which variants are compared with the baseline; null: all"
    )
    family: int | None = setting(
        None, "number of simultaneous comparisons; null: schemes × primary lengths", ge=1
    )
    tolerance: float = setting(
        TOLERANCE, "nats; a scheme has held if the bound on its loss increase is below this", gt=0
    )
    confidence: float = setting(CONFIDENCE, "simultaneous level of the intervals", gt=0.5, lt=1)


class StudySettings(StrictSettings):
    """Training runs × evaluations → one report."""

    base: list[str] = setting([], "settings files and overrides of train.py for all cells")
    grid: Grid = Field(
        description="axes. Each maps labels to settings files and overrides of train.py, or lists "
        "values of the setting with the axis's name; a cell has one label of each. `scheme` is "
        "compared, `seed` repeats"
    )
    skip: Skip = setting(
        [], "combinations to leave out: axis: label or list of labels; all axes must match"
    )
    variants: dict[str, VariantSettings] = setting(
        {}, "rows of the report besides the schemes as trained"
    )
    evaluations: dict[str, EvaluationEntry] = setting(
        {}, "evaluations of every run, by the name of their results directory"
    )
    report: ReportSettings = setting(ReportSettings(), "what is compared")  # pyright: ignore[reportCallIssue]

    @field_validator("grid", mode="before", json_schema_input_type=Any)
    @classmethod
    def _labelled(cls, grid: Any) -> Any:
        """Every axis as label: [overrides]; a list of values becomes axis=value."""
        if not isinstance(grid, dict):
            raise ValueError("grid must map axes to labels, as in grid: {seed: [0, 1]}")
        return {axis: _labels(axis, value) for axis, value in grid.items()}

    @model_validator(mode="after")
    def _names_exist(self) -> "StudySettings":
        problems = [
            *_axis_problems(self.grid),
            *_skip_problems("skip", self.skip, self.grid),
            *self._variant_problems(),
        ]
        for name, entry in self.evaluations.items():
            problems += _skip_problems(
                f"evaluations.{name}.skip",
                entry.skip,
                self.grid,
            )
            if not _NAME.match(name):
                problems.append(
                    f"evaluations.{name} must be a directory name: use letters, digits, . + - _"
                )
        labels = [*self.grid.get(SCHEME, {}), *self.variants]
        baseline = self.report.baseline
        if baseline is not None and baseline not in labels:
            known = ", ".join(labels) or "nothing"
            problems.append(f"report.baseline = {baseline} is not among {known}")
        primary = self.report.primary
        if primary is not None and primary not in self.evaluations:
            known = ", ".join(self.evaluations) or "no evaluations"
            problems.append(f"report.primary = {primary} is not among {known}")
        if problems:
            raise ValueError("\n       ".join(problems))
        return self

    def _variant_problems(self) -> list[str]:
        schemes = self.grid.get(SCHEME, {})
        problems = []
        for label, variant in self.variants.items():
            if SCHEME not in self.grid:
                problems.append(f"variants.{label} needs an axis `{SCHEME}` in the grid")
            elif variant.scheme not in schemes:
                problems.append(
                    f"variants.{label}.scheme = {variant.scheme} is not in the grid: "
                    f"{', '.join(schemes)}"
                )
            if label in schemes and (variant.scheme, variant.method) != (label, TRAINED):
                problems.append(f"variants.{label} has the name of a scheme; rename it")
        return problems


def _labels(axis: str, value: Any) -> Any:
    if isinstance(value, dict):
        overrides = {}
        for label, own in value.items():
            if own is None:
                own = []
            overrides[label] = [own] if isinstance(own, str) else own
        return overrides
    labels = _texts(value)
    if len(set(labels)) < len(labels):
        raise ValueError(f"grid.{axis} has duplicate values: {', '.join(labels)}")
    return {label: [f"{axis}={label}"] for label in labels}


def _axis_problems(grid: Grid) -> list[str]:
    problems = []
    for axis, labels in grid.items():
        places = {f"grid.{axis}": axis} | {f"grid.{axis}.{label}": label for label in labels}
        for place, name in places.items():
            if not _LABEL.match(name):
                problems.append(
                    f"{place} is part of a directory name: it must not contain / , = nor begin "
                    "with a dot or a space"
                )
    return problems


def _skip_problems(
    where: str,
    skip: list[dict[str, list[str]]],
    grid: Grid,
) -> list[str]:
    problems = []
    for i, entry in enumerate(skip):
        if not entry:
            problems.append(f"{where}.{i} is empty and would exclude every cell")
        for axis, labels in entry.items():
            place = f"{where}.{i}.{axis}"
            if axis not in grid:
                problems.append(f"{place} is not an axis; the axes are {', '.join(grid)}")
                continue
            unknown = [label for label in labels if label not in grid[axis]]
            if unknown:
                problems.append(f"{place}: {', '.join(unknown)} not among {', '.join(grid[axis])}")
    return problems


def matches(axes: dict[str, str], skip: list[dict[str, list[str]]]) -> bool:
    """Whether an entry of `skip` matches a cell on all of the entry's axes."""
    return any(all(axes[axis] in out for axis, out in entry.items()) for entry in skip)


# The grid's cells.


@dataclass(frozen=True)
class GridCell:
    """One training run and its evaluations."""

    axes: dict[str, str]
    arguments: tuple[str, ...]  # settings files and overrides of train.py

    @property
    def id(self) -> str:
        """`scheme=rope,seed=0`: also the name of the run directory."""
        return ",".join(f"{axis}={label}" for axis, label in self.axes.items())


def cells_of(study: StudySettings) -> list[GridCell]:
    """All combinations of labels that `skip` does not exclude, in the order of the grid, the last
    axis fastest.

    Raises StudyError if there are none.
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


def running_order(
    cells: Sequence[GridCell], study: StudySettings, pattern: str | None = None
) -> list[GridCell]:
    """The cells whose name matches the pattern, those of the first seed first, so that an
    unfinished study can compare all schemes. Raises StudyError for none."""
    selected = [cell for cell in cells if fnmatch.fnmatchcase(cell.id, pattern or "*")]
    if not selected:
        raise StudyError(f"--only {pattern}: no cell matches; the first cell is {cells[0].id}")
    seeds = list(study.grid.get(SEED, {}))
    return sorted(selected, key=lambda cell: seeds.index(cell.axes[SEED]) if seeds else 0)
