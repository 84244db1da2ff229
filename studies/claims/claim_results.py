"""What was measured for a claim, by seed (results.csv), and the verdict."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from errors import StudyError
from evaluation.statistics.loss_table import is_undertrained
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


class MeasuredValues:
    """The values that a claim reads from the cells of its study (`results.json`)."""

    def __init__(self, claim: ClaimSettings, cells: Sequence[dict]):
        self.claim = claim
        self._cells = {frozenset(cell["axes"].items()): cell for cell in cells}

    def cell(self, value: dict, seed: str) -> dict:
        axes = self.claim.arm(value) | {SEED: seed}
        return self._cells[frozenset(axes.items())]

    def evaluation(self, value: dict, seed: str) -> str:
        """The evaluation that a value names, or the first one of its cell."""
        name = value.get("evaluation")
        return name or next(iter(self.cell(value, seed)["evaluations"]))

    def record(self, value: dict, seed: str) -> dict:
        """The results of the evaluation of a value."""
        return self.cell(value, seed)["evaluations"][self.evaluation(value, seed)]

    def row(self, value: dict, seed: str) -> dict:
        """The stored row of a value. Raises StudyError if it was not measured."""
        asked = DEFAULTS | value
        metric = asked["metric"]
        ignored = (*self.claim.grid, "evaluation", "metric")
        wanted = {k: v for k, v in asked.items() if k not in ignored and v is not None}
        for row in self.record(value, seed).get("cells", ()):
            is_asked = all(row.get(key) == each for key, each in wanted.items())
            if is_asked and row.get(metric) is not None:
                return row
        cell = self.cell(value, seed)["id"]
        raise StudyError(f"{cell}: {self.evaluation(value, seed)} has no {metric} of {wanted}")

    def comparison(self, tree: Expression, seed: str) -> tuple[float, float]:
        """(value, standard error over the units of the evaluations), by the jackknife."""
        number = float(evaluate(tree, lambda value: self.mean(value, seed)))
        variance = 0.0
        for name in {self.evaluation(value, seed) for value in values_in(tree)}:

            def without_one(value: dict, name: str = name) -> np.ndarray | float:
                if self.evaluation(value, seed) != name:
                    return self.mean(value, seed)
                means, counts = self._units(value, seed)
                sums = means * counts
                return (sums.sum() - sums) / np.maximum(counts.sum() - counts, 1)

            replicates = evaluate(tree, without_one)
            n = len(replicates)
            changes = replicates - replicates.mean()
            variance += (n - 1) / n * float((changes**2).sum())
        return number, variance**0.5

    def mean(self, value: dict, seed: str) -> float:
        return self.row(value, seed)[value.get("metric", DEFAULTS["metric"])]

    def is_undertrained(self, value: dict, seed: str) -> bool:
        """Whether the run of a value is hardly better than a unigram model on the same targets."""
        record = self.record(value, seed)
        return is_undertrained(record.get("truncated_nll"), record.get("unigram_nll"))

    def _units(self, value: dict, seed: str) -> tuple[np.ndarray, np.ndarray]:
        """Means of the units of a value and their numbers of targets or items."""
        metric = value.get("metric", DEFAULTS["metric"])
        row = self.row(value, seed)
        means = np.array(row.get(f"unit_{metric}") or [row[metric]])
        units = self.record(value, seed).get("units", {})  # items on symbols are units of one
        counts = units.get("targets") or units.get("items") or [1] * len(means)
        return means, np.array(counts)


def measured_rows(claim: ClaimSettings, cells: Sequence[dict]) -> list[dict]:
    """The rows of results.csv: for each comparison and seed its value, with the standard error of
    the evaluation, and the values of arms that it is made of; then those of the conditions of
    learning, NaN for an undertrained model, which fulfils none. Raises StudyError for one that is
    missing."""
    values = MeasuredValues(claim, cells)
    columns = [*claim.axes, *DEFAULTS]
    rows: list[dict] = []

    def add(comparison: str, seed: str, value: dict) -> None:
        training = values.cell(value, seed)["training"]
        keys = DEFAULTS | value | claim.arm(value)
        keys["evaluation"] = values.evaluation(value, seed)
        row = {"comparison": comparison, "seed": seed}
        row |= {column: keys[column] for column in columns}
        not_learned = comparison == LEARNED and values.is_undertrained(value, seed)
        row |= {"value": math.nan if not_learned else values.mean(value, seed), "error": None}
        rows.append(row | {"weights": training["checkpoint_hash"][:16]})

    for name, comparison in claim.comparisons.items():
        for seed in claim.seeds:
            number, error = values.comparison(comparison.value, seed)
            own = {"comparison": name, "seed": seed, **dict.fromkeys(columns)}
            rows.append(own | {"value": number, "error": error, "weights": ""})
            for value in values_in(comparison.value):
                add(name, seed, value)
    for arm in claim.arms:
        for condition in claim.conditions(arm):
            for seed in claim.seeds:
                add(LEARNED, seed, condition.value | arm)
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
        rows = table[table["comparison"] == name]
        own = rows[rows["evaluation"] == ""]
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
        if not enough_learned(runs):
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
    rows = table[table["comparison"] == LEARNED]
    fulfilled = np.ones(len(claim.seeds), dtype=bool)
    for condition in claim.conditions(arm):
        (values,) = _by_arm(condition.value | arm, rows)
        fulfilled &= [condition.holds(value) for value in values]
    return fulfilled


def _by_arm(tree: Expression, rows: pd.DataFrame) -> Iterator[np.ndarray]:
    """The values of each arm of an expression, by seed."""
    for value in values_in(tree):
        own = rows[rows["evaluation"] != ""]
        for key, label in value.items():
            own = own[own[key] == str(label)]
        yield own["value"].to_numpy()
