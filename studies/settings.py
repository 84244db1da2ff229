"""Every setting of a study: what is trained, what is measured, what is reported."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from evaluation.rules import TRAINED
from studies.stored import CONFIDENCE, TOLERANCE
from training.settings import Settings

SCHEME = "scheme"  # the axis of what is compared; SEED repeats it
_LABEL = re.compile(r"^[^\s/\\,=.][^/\\,=]*$")  # part of a folder's name: scheme=rope,seed=0
_NAME = re.compile(r"^\w[\w.+-]*$")


class VariantSettings(Settings):
    """A line of the report beside the schemes as trained: the runs of a scheme under a test-time rule."""

    scheme: str = Field(description="label of the axis `scheme` whose runs are used; nothing more is trained")
    rule: str = Field(
        TRAINED, description="label of configs/evaluation/rules.yaml, or of the evaluation's own rules"
    )


class EvaluationEntry(Settings):
    """One call of evaluate.py on every run."""

    words: list[str] = Field([], description="files and words of evaluate.py")
    data: list[str] | None = Field(
        None,
        description="files and words (data.KEY=value) of text to evaluate on: all of it, prepared with each "
        "run's own tokenizer; null: the run's own held-out text",
    )
    skip: list[dict[str, list[str]]] = Field(
        [], description="cells that are not asked, as under `skip`: a scheme that ends before these lengths"
    )

    @field_validator("skip", mode="before")
    @classmethod
    def _lists(cls, entries: Any) -> Any:
        return _lists_of_labels(entries)


class ReportSettings(Settings):
    """What the report compares and declares beforehand."""

    baseline: str | None = Field(
        None, description="variant that the others are compared with; null: the first"
    )
    primary: str | None = Field(
        None, description="evaluation that the first lines speak of; null: the first of `evaluations`"
    )
    lengths: list[int] | None = Field(
        None, description="primary lengths: with the schemes they make the family of comparisons; null: all"
    )
    family: int | None = Field(
        None, ge=1, description="comparisons that hold at once; null: schemes × primary lengths"
    )
    tolerance: float = Field(
        TOLERANCE, gt=0, description="nats; a scheme has held where it is surely less worse"
    )
    confidence: float = Field(CONFIDENCE, gt=0.5, lt=1, description="simultaneous level of the intervals")
    pool_seed_variance: bool = Field(
        False,
        description="declares that seeds vary equally under all schemes, whose variances are then pooled",
    )


class StudySettings(Settings):
    """Trainings × evaluations → one report."""

    base: list[str] = Field([], description="files and words of train.py under every cell")
    grid: dict[str, dict[str, list[str]]] = Field(
        description="axes. Each is a mapping label: [files and words of train.py], or a list of values of "
        "the setting it is named after; a cell takes one label of each. `scheme` is what is compared, `seed` "
        "repeats"
    )
    skip: list[dict[str, list[str]]] = Field(
        [],
        description="combinations left out: axis: label or list of labels; all axes of an entry must match",
    )
    variants: dict[str, VariantSettings] = Field(
        {}, description="lines of the report beside the schemes as trained"
    )
    evaluations: dict[str, EvaluationEntry] = Field(
        {}, description="what is measured on every run, by the name of its results folder"
    )
    report: ReportSettings = Field(ReportSettings(), description="what is compared")  # pyright: ignore[reportCallIssue]

    @field_validator("grid", mode="before")
    @classmethod
    def _labelled(cls, grid: Any) -> Any:
        """Every axis as label: [words]; a list of values becomes axis=value."""
        if not isinstance(grid, dict):
            raise ValueError("grid must map axes to labels, as in grid: {seed: [0, 1]}")
        return {axis: _words_by_label(axis, value) for axis, value in grid.items()}

    @field_validator("skip", mode="before")
    @classmethod
    def _lists(cls, entries: Any) -> Any:
        return _lists_of_labels(entries)

    @model_validator(mode="after")
    def _names_exist(self) -> "StudySettings":
        problems = [*_of_axes(self.grid), *_of_skips("skip", self.skip, self.grid)]
        schemes = self.grid.get(SCHEME, {})
        for label, variant in self.variants.items():
            if SCHEME not in self.grid:
                problems.append(f"variants.{label} needs an axis `{SCHEME}` in the grid")
            elif variant.scheme not in schemes:
                problems.append(
                    f"variants.{label}.scheme = {variant.scheme} is not in the grid: {', '.join(schemes)}"
                )
            if label in schemes and (variant.scheme, variant.rule) != (label, TRAINED):
                problems.append(f"variants.{label}: a scheme has this name; choose another")
        for name, entry in self.evaluations.items():
            problems += _of_skips(f"evaluations.{name}.skip", entry.skip, self.grid)
            if not _NAME.match(name):
                problems.append(f"evaluations.{name}: a folder gets this name: use letters, digits, . + - _")
        known = [*schemes, *self.variants]
        if self.report.baseline is not None and self.report.baseline not in known:
            problems.append(
                f"report.baseline = {self.report.baseline} is none of {', '.join(known) or 'nothing'}"
            )
        if self.report.primary is not None and self.report.primary not in self.evaluations:
            names = ", ".join(self.evaluations) or "none"
            problems.append(f"report.primary = {self.report.primary} is no evaluation; there are: {names}")
        if problems:
            raise ValueError("\n       ".join(problems))
        return self


def _lists_of_labels(entries: Any) -> Any:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("skip must be a list of mappings such as {scheme: fox, seed: [1, 2]}")
    return [
        {
            axis: [_text(one) for one in (value if isinstance(value, list) else [value])]
            for axis, value in e.items()
        }
        for e in entries
    ]


def _words_by_label(axis: str, value: Any) -> Any:
    if isinstance(value, list):
        labels = [_text(one) for one in value]
        if len(set(labels)) < len(labels):
            raise ValueError(f"grid.{axis} gives a value twice: {', '.join(labels)}")
        return {label: [f"{axis}={label}"] for label in labels}
    if isinstance(value, dict):
        return {
            label: [one] if isinstance(one, str) else [] if one is None else one
            for label, one in value.items()
        }
    return {_text(value): [f"{axis}={_text(value)}"]}


def _text(value: Any) -> str:
    """A plain value as it is written in a word, and as a label."""
    if isinstance(value, (dict, list)):
        raise ValueError(f"{value}: give such values a label: {{short: [setting={value}], ...}}")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _of_axes(grid: dict[str, dict[str, list[str]]]) -> list[str]:
    problems = [] if grid else ["grid is empty: give at least one axis, such as seed: [0]"]
    for axis, labels in grid.items():
        if not _LABEL.match(axis):
            problems.append(f"grid.{axis}: a folder gets this name: no spaces at its front, no / , =")
        if not labels:
            problems.append(f"grid.{axis} is empty: give at least one label")
        problems += [
            f"grid.{axis}.{label}: a folder gets this name: it may not begin with a dot or hold / , ="
            for label in labels
            if not _LABEL.match(label)
        ]
    return problems


def _of_skips(
    where: str, skip: list[dict[str, list[str]]], grid: dict[str, dict[str, list[str]]]
) -> list[str]:
    problems = []
    for i, entry in enumerate(skip):
        if not entry:
            problems.append(f"{where}.{i} is empty and would leave out every cell")
        for axis, labels in entry.items():
            if axis not in grid:
                problems.append(f"{where}.{i}.{axis}: no such axis; there are {', '.join(grid)}")
                continue
            unknown = [label for label in labels if label not in grid[axis]]
            if unknown:
                problems.append(f"{where}.{i}.{axis}: {', '.join(unknown)} not among {', '.join(grid[axis])}")
    return problems


def matches(axes: dict[str, str], skip: list[dict[str, list[str]]]) -> bool:
    """Whether an entry of `skip` holds for a cell on all of the entry's axes."""
    return any(all(axes[axis] in out for axis, out in entry.items()) for entry in skip)
