"""What was measured for a claim, by seed (results.csv), and the verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from errors import StudyError
from evaluation.reports.results_table import write_table
from studies.claims.claim_settings import ClaimSettings
from studies.claims.expressions import DEFAULTS, Expression, evaluate, values_in
from studies.claims.verdicts import (
    ALPHA,
    NOT_LEARNED,
    PrimaryComparison,
    decide,
    enough_learned,
    p_value,
)
from studies.results.stored import SEED

LEARNED = "learned"  # the comparison of rows that decide whether a run has learned


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        word: reproduced, refuted or inconclusive.
        comparisons: by name, with `ends`, their intervals.
        learned: by arm, the number of runs that have learned, of `seeds`.
        p: the smallest error probability at which the verdict would be the same.
    """

    word: str
    comparisons: dict[str, PrimaryComparison]
    ends: dict[str, tuple[float, float]]
    learned: dict[str, int]
    seeds: int
    p: float


class MeasuredValues:
    """The values that a claim reads from the cells of its study (`results.json`)."""

    def __init__(self, claim: ClaimSettings, cells: Sequence[dict]):
        self.claim = claim
        self._cells = {tuple(cell["axes"].items()): cell for cell in cells}

    def cell(self, value: dict, seed: str) -> dict:
        """The cell of a value: the label of each axis that it names, or the only one."""
        axes = {
            axis: seed if axis == SEED else str(value.get(axis, next(iter(labels))))
            for axis, labels in self.claim.grid.items()
        }
        return self._cells[tuple(axes.items())]

    def row(self, value: dict, seed: str) -> dict:
        """The stored row of a value. Raises StudyError if it was not measured."""
        asked = DEFAULTS | value
        evaluation = self._evaluation(value)
        cell = self.cell(value, seed)
        keys = {key: asked[key] for key in asked if key not in self.claim.grid}
        wanted = {k: v for k, v in keys.items() if k not in ("evaluation", "metric") and v}
        for row in cell["evaluations"].get(evaluation, {}).get("cells", ()):
            is_asked = all(row.get(key) == each for key, each in wanted.items())
            if is_asked and row.get(asked["metric"]) is not None:
                return row
        raise StudyError(f"{cell['id']}: {evaluation} has no {asked['metric']} of {wanted}")

    def comparison(self, tree: Expression, seed: str) -> tuple[float, float]:
        """(value, standard error over the units of the evaluation), by the jackknife."""
        number = float(evaluate(tree, lambda value: self._mean(value, seed)))
        variance = 0.0
        for name in {self._evaluation(value) for value in values_in(tree)}:

            def without_one(value: dict, name: str = name) -> np.ndarray | float:
                if self._evaluation(value) != name:
                    return self._mean(value, seed)
                units = self._units(value, seed)
                return (units.sum() - units) / max(1, len(units) - 1)

            replicates = evaluate(tree, without_one)
            n = len(replicates)
            variance += (n - 1) / n * float(((replicates - replicates.mean()) ** 2).sum())
        return number, variance**0.5

    def _evaluation(self, value: dict) -> str:
        return value.get("evaluation") or next(iter(self.claim.evaluations))

    def _mean(self, value: dict, seed: str) -> float:
        return self.row(value, seed)[value.get("metric", DEFAULTS["metric"])]

    def _units(self, value: dict, seed: str) -> np.ndarray:
        metric = value.get("metric", DEFAULTS["metric"])
        row = self.row(value, seed)
        return np.array(row.get(f"unit_{metric}") or [row[metric]])


def arms_of(claim: ClaimSettings) -> list[dict[str, str]]:
    """The labels on all axes but the seed of each arm that a primary comparison reads."""
    arms = {}
    for comparison in claim.primary.values():
        for value in values_in(comparison.value):
            arm = {
                axis: str(value.get(axis, next(iter(labels))))
                for axis, labels in claim.grid.items()
                if axis != SEED
            }
            arms[tuple(arm.items())] = arm
    return list(arms.values())


def measured_rows(claim: ClaimSettings, cells: Sequence[dict]) -> list[dict]:
    """The rows of results.csv: the values of each comparison and its arms, by seed. Raises
    StudyError for one that is missing."""
    values = MeasuredValues(claim, cells)
    rows = []
    for name, comparison in claim.primary.items():
        for seed in claim.seeds:
            number, error = values.comparison(comparison.value, seed)
            rows.append(_row(claim, name, {}, seed, number, error=error))
            for value in values_in(comparison.value):
                rows.append(_value_row(claim, values, name, value, seed))
    for arm in arms_of(claim):
        for seed in claim.seeds:
            rows.append(_value_row(claim, values, LEARNED, claim.learned.value | arm, seed))
    return rows


def _value_row(
    claim: ClaimSettings, values: MeasuredValues, comparison: str, value: dict, seed: str
) -> dict:
    row = values.row(value, seed)
    metric = value.get("metric", DEFAULTS["metric"])
    weights = values.cell(value, seed)["training"]["checkpoint_hash"][:16]
    return _row(claim, comparison, value, seed, row[metric], weights=weights)


def _row(
    claim: ClaimSettings,
    comparison: str,
    value: dict,
    seed: str,
    number: float,
    error: float | None = None,
    weights: str = "",
) -> dict:
    """A row with the keys of a value, which are empty for the comparison itself."""
    keys = {}
    if value:
        labels = {axis: value.get(axis, next(iter(claim.grid[axis]))) for axis in claim.grid}
        keys = DEFAULTS | {"evaluation": next(iter(claim.evaluations))} | labels | value
    columns = [axis for axis in claim.grid if axis != SEED] + [*DEFAULTS]
    return {
        "comparison": comparison,
        "seed": seed,
        **{column: keys.get(column) for column in columns},
        "value": number,
        "error": error,
        "weights": weights,
    }


def write_rows(folder: Path, rows: Sequence[dict]) -> None:
    write_table(folder / "results.csv", rows)


def read_rows(file: Path) -> pd.DataFrame:
    """results.csv, with labels and seeds as text."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    for column in ("value", "error"):
        table[column] = pd.to_numeric(table[column])
    return table


def verdict_of(claim: ClaimSettings, table: pd.DataFrame) -> Verdict:
    """The verdict on a claim from its results.csv."""
    comparisons = {}
    for name, settings in claim.primary.items():
        rows = table[table["comparison"] == name]
        own = rows[rows["evaluation"] == ""]
        solved = ()
        if settings.solved is not None:
            solved = tuple(
                values >= settings.solved for values in _by_arm(claim, settings.value, rows)
            )
        comparisons[name] = PrimaryComparison(
            delta=settings.delta,
            values=own["value"].to_numpy(),
            error=float((own["error"] ** 2).mean() ** 0.5),
            solved=solved,
            difference=settings.expect == "positive",
        )
    learned = {}
    runs = table[table["comparison"] == LEARNED]
    for arm in arms_of(claim):
        own = runs
        for axis, label in arm.items():
            own = own[own[axis] == label]
        learned[", ".join(arm.values())] = [claim.learned.holds(value) for value in own["value"]]
    word = decide(list(comparisons.values()))
    p = p_value(list(comparisons.values()))
    if not all(map(enough_learned, learned.values())):
        word = NOT_LEARNED
        p = 1.0
    share = ALPHA / len(comparisons)
    return Verdict(
        word=word,
        comparisons=comparisons,
        ends={name: comparison.interval(share) for name, comparison in comparisons.items()},
        learned={arm: sum(values) for arm, values in learned.items()},
        seeds=len(claim.seeds),
        p=p,
    )


def _by_arm(claim: ClaimSettings, tree: Expression, rows: pd.DataFrame) -> Iterator[np.ndarray]:
    """The values of each arm of a comparison, by seed."""
    for value in values_in(tree):
        own = rows[rows["evaluation"] != ""]
        for key, label in value.items():
            own = own[own[key] == str(label)]
        yield own["value"].to_numpy()
