"""The measured values of a claim by seed (results.csv), and the verdict.

A comparison has one paired value for each seed, positive as predicted, and a smallest effect δ that
counts. Its interval [low, high] is mean ± t·s/√n or, for solved tasks, the difference of two
Clopper-Pearson intervals. The m primary comparisons of a claim share its error probability α.

- Reproduced: low ≥ δ in every primary comparison. Refuted: high < δ in any comparison.
- A claim of no difference is reproduced if −δ < low and high < δ in every comparison, refuted if
  low ≥ δ or high ≤ −δ in any comparison.
- Otherwise inconclusive, with "sign only" if low > 0 in every comparison. Also inconclusive if more
  than one in eight runs of an arm has not learned within the trained length.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import betaincinv, chdtri, nctdtrinc, stdtrit

from evaluation.fixed_target_loss import half_width
from evaluation.statistics.loss_verdicts import is_undertrained
from studies.arm_values import evaluation_of, mean_of, means_without_unit, unit_values
from studies.claims.claim_settings import ClaimSettings
from studies.expressions import DEFAULTS, Expression, evaluate, values_in
from studies.study_results_reader import SEED

ALPHA = 0.05
POWER = 0.8
# Level of the upper bound of a pilot's SD; Browne 1995, Statistics in Medicine 14:1933.
SD_LEVEL = 0.8
REPRODUCED = "reproduced"
REFUTED = "refuted"
INCONCLUSIVE = "inconclusive"
SIGN_ONLY = "inconclusive (sign only)"
NOT_LEARNED = "inconclusive (not learned)"
LEARNED = "learned"  # the comparison in rows that decide whether a run has learned


@dataclass(frozen=True)
class PrimaryComparison:
    """The measured values of one primary comparison.

    Attributes:
        values: (n,) the value of each seed, positive as predicted; empty with `solved`.
        error: standard error of one seed's value from the evaluation, a lower bound of s.
        solved: for each of one or two arms, whether each of its seeds has solved the task.
        difference: whether a difference is predicted; False: no difference is predicted.
    """

    delta: float
    values: np.ndarray
    error: float = 0.0
    solved: tuple[np.ndarray, ...] = ()
    difference: bool = True

    @property
    def estimate(self) -> float:
        if not self.solved:
            return float(self.values.mean())
        share, *other = [float(arm.mean()) for arm in self.solved]
        return share - sum(other)

    def interval(self, alpha: float) -> tuple[float, float]:
        """(low, high) at level 1 − alpha."""
        if not self.solved:
            n = len(self.values)
            s = max(float(self.values.std(ddof=1)), self.error)
            half = half_width(s / math.sqrt(n), n - 1, alpha)
            return self.estimate - half, self.estimate + half
        alpha /= len(self.solved)
        ends = [clopper_pearson(int(arm.sum()), len(arm), alpha) for arm in self.solved]
        if len(ends) == 1:
            return ends[0]
        (low, high), (other_low, other_high) = ends
        return low - other_high, high - other_low


def clopper_pearson(hits: int, n: int, alpha: float) -> tuple[float, float]:
    """The interval (low, high) of a share at level 1 − alpha (Clopper and Pearson 1934)."""
    low = betaincinv(hits, n - hits + 1, alpha / 2) if hits > 0 else 0.0
    high = betaincinv(hits + 1, n - hits, 1 - alpha / 2) if hits < n else 1.0
    return float(low), float(high)


def enough_learned(learned: Sequence[bool]) -> bool:
    """Whether at most one in eight runs of an arm has not learned."""
    return sum(learned) >= len(learned) - len(learned) // 8


def decide(primaries: Sequence[PrimaryComparison], alpha: float = ALPHA) -> str:
    """The verdict if every arm has learned."""
    ends = [primary.interval(alpha / len(primaries)) for primary in primaries]
    reproduced = []
    refuted = []
    for primary, (low, high) in zip(primaries, ends, strict=True):
        delta = primary.delta
        if primary.difference:
            reproduced.append(low >= delta)
            refuted.append(high < delta)
        else:
            reproduced.append(-delta < low and high < delta)
            refuted.append(low >= delta or high <= -delta)
    if any(refuted):
        return REFUTED
    if all(reproduced):
        return REPRODUCED
    are_differences = all(primary.difference for primary in primaries)
    if are_differences and all(low > 0 for low, _ in ends):
        return SIGN_ONLY
    return INCONCLUSIVE


def p_value(primaries: Sequence[PrimaryComparison]) -> float:
    """The smallest α at which the verdict would be the same, within 0.04%; 1 if it is
    inconclusive."""
    verdict = decide(primaries)
    if verdict not in (REPRODUCED, REFUTED):
        return 1.0
    alphas = np.geomspace(1e-15, ALPHA, 100_000)
    smallest = bisect_left(alphas, True, key=lambda alpha: decide(primaries, alpha) == verdict)
    return float(alphas[smallest])


def holm(p_values: Sequence[float]) -> list[bool]:
    """Whether each verdict holds simultaneously with the others at level 1 − ALPHA (Holm 1979)."""
    ordered = np.sort(p_values)
    hold = ordered <= ALPHA / (len(ordered) - np.arange(len(ordered)))
    failed = ordered[~hold][:1]  # the smallest p that fails; all larger ones fail too
    return [bool((p < failed).all()) for p in p_values]


def detectable(seeds: int, primaries: int) -> float:
    """The effect beyond δ, in standard deviations, that is detected with probability POWER: 1.16
    for eight seeds and one comparison."""
    df = seeds - 1
    t = float(stdtrit(df, 1 - ALPHA / (2 * primaries)))
    return float(nctdtrinc(df, 1 - POWER, t)) / math.sqrt(seeds)


def sd_bound(values: np.ndarray) -> float:
    """Upper bound of the SD of normal values, at level SD_LEVEL."""
    df = len(values) - 1
    quantile = float(chdtri(df, SD_LEVEL))
    return float(values.std(ddof=1)) * math.sqrt(df / quantile)


# From the results of a study to the verdict.


class MeasuredValues:
    """The values that a claim reads from the cells of its study (`results.json`)."""

    def __init__(self, claim: ClaimSettings, cells: Sequence[dict]):
        self.claim = claim
        self._cells = {frozenset(cell["axes"].items()): cell for cell in cells}

    def cell(self, value: dict, seed: str) -> dict:
        """The cell of a value's arm and a seed."""
        return self._cells[frozenset((self.claim.arm(value) | {SEED: seed}).items())]

    def units(self, value: dict, seed: str) -> pd.DataFrame:
        """A value by unit. Raises StudyError if it was not measured."""
        return unit_values(self.cell(value, seed), value)

    def comparison(self, tree: Expression, seed: str) -> tuple[float, float]:
        """(value, standard error over the units of the evaluations), by the jackknife."""
        number = float(evaluate(tree, lambda value: mean_of(self.units(value, seed))))
        variance = 0.0
        for name in {evaluation_of(self.cell(value, seed), value) for value in values_in(tree)}:

            def without_one(value: dict, name: str = name) -> np.ndarray | float:
                units = self.units(value, seed)
                is_own = evaluation_of(self.cell(value, seed), value) == name
                return means_without_unit(units) if is_own else mean_of(units)

            replicates = evaluate(tree, without_one)
            variance += (len(replicates) - 1) * float(replicates.var())
        return number, variance**0.5


def measured_rows(claim: ClaimSettings, cells: Sequence[dict]) -> list[dict]:
    """The rows of results.csv. For each comparison and seed: its value with the standard error of
    the evaluation, and the values of arms in it. Then the values of the conditions of learning, NaN
    for an undertrained model, which meets none. Raises StudyError for a missing value."""
    values = MeasuredValues(claim, cells)
    columns = [*claim.axes, *DEFAULTS]

    def row_of(comparison: str, seed: str, value: dict) -> dict:
        cell = values.cell(value, seed)
        name = evaluation_of(cell, value)
        record = cell["evaluations"][name]
        keys = DEFAULTS | value | claim.arm(value) | {"evaluation": name}
        losses = (record.get("truncated_nll"), record.get("unigram_nll"))
        is_void = comparison == LEARNED and is_undertrained(*losses)
        return {
            "comparison": comparison,
            "seed": seed,
            **{column: keys[column] for column in columns},
            "value": math.nan if is_void else mean_of(values.units(value, seed)),
            "error": None,
            "weights": cell["training"]["checkpoint_hash"][:16],
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


@dataclass(frozen=True)
class ClaimVerdict:
    """The verdict on a claim.

    Attributes:
        word: reproduced, refuted or inconclusive.
        comparisons: primary comparisons by name; `ends`: their intervals by name.
        learned: by arm, the number of its `seeds` runs that have learned.
        p: the smallest error probability at which the verdict would be the same.
    """

    word: str
    comparisons: dict[str, PrimaryComparison]
    ends: dict[str, tuple[float, float]]
    learned: dict[str, int]
    seeds: int
    p: float


def read_verdict(claim: ClaimSettings, file: Path) -> ClaimVerdict:
    """The verdict on a claim from its results.csv."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)  # labels and seeds are strings
    for column in ("value", "error"):
        table[column] = pd.to_numeric(table[column])

    def values_of(comparison: str, value: dict) -> np.ndarray:
        """The values of an arm, by seed."""
        rows = table.loc[(table["comparison"] == comparison) & (table["evaluation"] != "")]
        for key, label in value.items():
            rows = rows.loc[rows[key] == str(label)]
        return rows["value"].to_numpy()

    comparisons = {}
    for name, settings in claim.comparisons.items():
        own = table.loc[(table["comparison"] == name) & (table["evaluation"] == "")]
        arms = () if settings.solved is None else values_in(settings.value)
        comparisons[name] = PrimaryComparison(
            delta=settings.delta,
            values=own["value"].to_numpy(),
            error=float((own["error"] ** 2).mean() ** 0.5),
            solved=tuple(values_of(name, arm) >= settings.solved for arm in arms),
            difference=settings.expect == "positive",
        )
    primaries = list(comparisons.values())
    word = decide(primaries)
    p = p_value(primaries)
    learned = {}
    for arm in claim.arms:
        fulfilled = [
            condition.holds(values_of(LEARNED, condition.value | arm))
            for condition in claim.conditions(arm)
        ]
        runs = np.all(fulfilled, axis=0)
        learned[", ".join(arm.values())] = int(runs.sum())
        if not enough_learned(runs.tolist()):
            word = NOT_LEARNED
            p = 1.0
    share = ALPHA / len(comparisons)
    ends = {name: comparison.interval(share) for name, comparison in comparisons.items()}
    return ClaimVerdict(word, comparisons, ends, learned, len(claim.seeds), p)
