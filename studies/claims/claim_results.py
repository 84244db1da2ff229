"""What was measured for a claim, by seed (results.csv), and the verdict."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from errors import StudyError
from evaluation.statistics.loss_table import is_undertrained
from studies.claims.claim_settings import ClaimSettings
from studies.claims.claim_verdicts import (
    ALPHA,
    NOT_LEARNED,
    PrimaryComparison,
    decide,
    enough_learned,
    p_value,
)
from studies.claims.expressions import DEFAULTS, Expression, evaluate, values_in
from studies.results.stored import SEED

LEARNED = "learned"  # the comparison of rows that decide whether a run has learned


@dataclass(frozen=True)
class ClaimVerdict:
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


class MeasuredValue(NamedTuple):
    """A value of one arm that an evaluation measured: its cell, the name and record of the
    evaluation, and the row of the record with the metric."""

    cell: dict
    evaluation: str
    record: dict
    row: dict
    metric: str

    @property
    def mean(self) -> float:
        return self.row[self.metric]

    def without_each_unit(self) -> np.ndarray:
        """Means over all units but one, weighted by their targets or items."""
        means = np.array(self.row.get(f"unit_{self.metric}") or [self.mean])
        units = self.record.get("units", {})  # items on symbols are units of one
        counts = np.array(units.get("targets") or units.get("items") or [1] * len(means))
        sums = means * counts
        return (sums.sum() - sums) / np.maximum(counts.sum() - counts, 1)


class MeasuredValues:
    """The values that a claim reads from the cells of its study (`results.json`)."""

    def __init__(self, claim: ClaimSettings, cells: Sequence[dict]):
        self.claim = claim
        self._cells = {frozenset(cell["axes"].items()): cell for cell in cells}

    def find(self, value: dict, seed: str) -> MeasuredValue:
        """Raises StudyError if the value was not measured."""
        cell = self._cells[frozenset((self.claim.arm(value) | {SEED: seed}).items())]
        asked = DEFAULTS | value
        metric = asked["metric"]
        # the evaluation that a value names, or the first one of its cell
        name = asked["evaluation"] or next(iter(cell["evaluations"]))
        record = cell["evaluations"][name]
        ignored = (*self.claim.grid, "evaluation", "metric")
        wanted = {k: v for k, v in asked.items() if k not in ignored and v is not None}
        for row in record.get("cells", ()):
            if row.get(metric) is not None and wanted.items() <= row.items():
                return MeasuredValue(cell, name, record, row, metric)
        raise StudyError(f"{cell['id']}: {name} has no {metric} of {wanted}")

    def comparison(self, tree: Expression, seed: str) -> tuple[float, float]:
        """(value, standard error over the units of the evaluations), by the jackknife."""
        found = [self.find(value, seed) for value in values_in(tree)]
        number = float(evaluate(tree, lambda value: self.find(value, seed).mean))
        variance = 0.0
        for name in {each.evaluation for each in found}:

            def without_one(value: dict, name: str = name) -> np.ndarray | float:
                each = self.find(value, seed)
                return each.without_each_unit() if each.evaluation == name else each.mean

            replicates = evaluate(tree, without_one)
            n = len(replicates)
            changes = replicates - replicates.mean()
            variance += (n - 1) / n * float((changes**2).sum())
        return number, variance**0.5


def measured_rows(claim: ClaimSettings, cells: Sequence[dict]) -> list[dict]:
    """The rows of results.csv: for each comparison and seed its value, with the standard error of
    the evaluation, and the values of arms that it is made of; then those of the conditions of
    learning, NaN for an undertrained model, which fulfils none. Raises StudyError for one that is
    missing."""
    values = MeasuredValues(claim, cells)
    columns = [*claim.axes, *DEFAULTS]

    def row_of(comparison: str, seed: str, value: dict) -> dict:
        each = values.find(value, seed)
        keys = DEFAULTS | value | claim.arm(value) | {"evaluation": each.evaluation}
        losses = (each.record.get("truncated_nll"), each.record.get("unigram_nll"))
        is_void = comparison == LEARNED and is_undertrained(*losses)
        return {
            "comparison": comparison,
            "seed": seed,
            **{column: keys[column] for column in columns},
            "value": math.nan if is_void else each.mean,
            "error": None,
            "weights": each.cell["training"]["checkpoint_hash"][:16],
        }

    rows: list[dict] = []
    for name, comparison in claim.comparisons.items():
        for seed in claim.seeds:
            number, error = values.comparison(comparison.value, seed)
            own = {"comparison": name, "seed": seed, **dict.fromkeys(columns)}
            rows.append(own | {"value": number, "error": error, "weights": ""})
            rows += [row_of(name, seed, value) for value in values_in(comparison.value)]
    for arm in claim.arms:
        for condition in claim.conditions(arm):
            rows += [row_of(LEARNED, seed, condition.value | arm) for seed in claim.seeds]
    return rows


def read_rows(file: Path) -> pd.DataFrame:
    """results.csv, with labels and seeds as text."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    for column in ("value", "error"):
        table[column] = pd.to_numeric(table[column])
    return table


def verdict_of(claim: ClaimSettings, table: pd.DataFrame) -> ClaimVerdict:
    """The verdict on a claim from its results.csv."""
    comparisons = {}
    for name, settings in claim.comparisons.items():
        rows = table.loc[table["comparison"] == name]
        own = rows.loc[rows["evaluation"] == ""]
        solved = ()
        if settings.solved is not None:
            arms = _by_arm(settings.value, rows)
            solved = tuple(values >= settings.solved for values in arms)
        comparisons[name] = PrimaryComparison(
            delta=settings.delta,
            values=own["value"].to_numpy(),
            error=float((own["error"] ** 2).mean() ** 0.5),
            solved=solved,
            difference=settings.expect == "positive",
        )
    primaries = list(comparisons.values())
    word = decide(primaries)
    p = p_value(primaries)
    learned = {}
    for arm in claim.arms:
        runs = _learned(claim, arm, table)
        learned[", ".join(arm.values())] = int(runs.sum())
        if not enough_learned(runs.tolist()):
            word = NOT_LEARNED
            p = 1.0
    share = ALPHA / len(comparisons)
    return ClaimVerdict(
        word=word,
        comparisons=comparisons,
        ends={name: comparison.interval(share) for name, comparison in comparisons.items()},
        learned=learned,
        seeds=len(claim.seeds),
        p=p,
    )


def _learned(claim: ClaimSettings, arm: dict[str, str], table: pd.DataFrame) -> np.ndarray:
    """Whether each run of an arm fulfils all its conditions, by seed."""
    rows = table.loc[table["comparison"] == LEARNED]
    fulfilled = np.ones(len(claim.seeds), dtype=bool)
    for condition in claim.conditions(arm):
        (values,) = _by_arm(condition.value | arm, rows)
        fulfilled &= [condition.holds(value) for value in values]
    return fulfilled


def _by_arm(tree: Expression, rows: pd.DataFrame) -> Iterator[np.ndarray]:
    """The values of each arm of an expression, by seed."""
    for value in values_in(tree):
        own = rows.loc[rows["evaluation"] != ""]
        for key, label in value.items():
            own = own.loc[own[key] == str(label)]
        yield own["value"].to_numpy()
