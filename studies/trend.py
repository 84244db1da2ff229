"""Whether an effect holds with size: the same comparison on every rung of a ladder, and a line
through the effects.

An effect is a difference of losses or read gains, positive as predicted. The effect on a rung is
the mean over seeds and targets; seeds and units are both random samples. The line is

    effect = a + b · log10(parameters) + c · log2(trained length),

by least squares over the rungs, whose variances add up as those of every linear contrast of the
rungs, with Welch-Satterthwaite degrees of freedom. The term of the length is left out if all rungs
have one length, or if there are too few rungs to separate length from size. The change is the line
at the largest size minus the line at the smallest, both at the mean length; δ is the smallest
effect that counts:

- steady: the interval of the change lies within ±δ;
- turns: otherwise, the intervals of the line at both ends exclude 0, with opposite signs;
- grows, shrinks: otherwise, the interval of the change excludes 0, and the line is farther from 0
  at the largest size, or at the smallest;
- not resolved: otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from data.preparation.summary import POINTS_ONLY_BELOW
from errors import StudyError
from evaluation.fixed_target_loss import mean_over_targets
from evaluation.reports.document import NONE, Cell, ReportTable, with_ends
from evaluation.reports.figures import (
    BAND,
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    FigureText,
    Panel,
    draw_level,
    draw_line,
    panels,
)
from evaluation.statistics.intervals import LEAST_SEEDS, half_width_of_sum, seed_means
from studies.arm_values import unit_values
from studies.expressions import Expression, evaluate, values_in
from studies.study_results_reader import SEED
from studies.study_settings import PredictedRung, TrendSettings

STEADY = "steady"
TURNS = "turns"
GROWS = "grows"
SHRINKS = "shrinks"
NOT_RESOLVED = "not resolved"
WORDS = (GROWS, SHRINKS, TURNS, STEADY, NOT_RESOLVED)
ALPHA = 0.05
REPEAT = ["effect", "rung", "seed"]  # columns that name one measurement of an effect
COLUMNS = ["effect", "rung", "parameters", "length", "seed", "unit", "targets", "value"]


# The values of a rung.


def effect_rows(trend: TrendSettings, cells: Sequence[dict]) -> pd.DataFrame:
    """The rows of effects.csv (COLUMNS): each effect by rung, seed and unit, from the measured
    cells.

    Args:
        cells: the cells of results.json.
    """
    measured = {frozenset(cell["axes"].items()): cell for cell in cells if cell["status"] == "done"}
    repeats = dict.fromkeys((cell["axes"][trend.axis], cell["axes"][SEED]) for cell in cells)
    axes = [axis for axis in cells[0]["axes"] if axis not in (trend.axis, SEED)]
    rows: list[tuple] = []
    for name, tree in trend.expressions(cells[0]["axes"]).items():
        for rung, seed in repeats:
            repeat = {trend.axis: rung, SEED: seed}
            labels = [{axis: str(value[axis]) for axis in axes} for value in values_in(tree)]
            arms = [measured.get(frozenset((repeat | own).items())) for own in labels]
            if None not in arms:
                own = effect_by_unit(tree, [cell for cell in arms if cell is not None])
                training = next(iter(filter(None, arms)))["training"]
                size = (training["layer_parameters"], training["train_length"])
                rows += [(name, rung, *size, seed, *row) for row in own.itertuples()]
    return pd.DataFrame(rows, columns=COLUMNS)


def effect_by_unit(tree: Expression, arms: Sequence[dict]) -> pd.DataFrame:
    """An effect of one seed by unit, with columns targets and value.

    Args:
        arms: the cells of the values in `tree`, in their order.

    Raises StudyError if the values have different targets.
    """
    values = [unit_values(cell, value) for cell, value in zip(arms, values_in(tree), strict=True)]
    targets = values[0]["targets"]
    for cell, value in zip(arms, values, strict=True):
        if not value["targets"].equals(targets):
            raise StudyError(f"{cell['id']} was evaluated on other targets than {arms[0]['id']}")
    order = iter(values)
    effect = evaluate(tree, lambda value: next(order)["mean"])
    return pd.DataFrame({"targets": targets, "value": effect})


def with_stored_rows(rows: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The rows, together with the rows of effects.csv, if it exists, for effects, rungs and seeds
    that `rows` lacks."""
    if not file.is_file():
        return rows
    stored = _stored_rows(file)
    new = set(rows[REPEAT].itertuples(index=False, name=None))
    is_new = [row in new for row in stored[REPEAT].itertuples(index=False, name=None)]
    is_new = np.array(is_new, dtype=bool)
    return pd.concat([stored.loc[~is_new], rows]).sort_values("parameters", kind="stable")


def _stored_rows(file: Path) -> pd.DataFrame:
    """The rows of effects.csv. Raises StudyError if the file is damaged."""
    types: dict[Any, Any] = dict.fromkeys([*REPEAT, "unit"], str)
    types |= {"parameters": int, "length": int, "targets": int, "value": float}
    try:
        stored = pd.read_csv(file, dtype=types, keep_default_na=False)
        if list(stored.columns) != COLUMNS or stored.duplicated([*REPEAT, "unit"]).any():
            raise ValueError("not one row for each effect, rung, seed and unit")
    except ValueError as error:
        raise StudyError(
            f"{file} is damaged ({error}); restore or delete it: the report writes the rows of "
            "measured cells again"
        ) from None
    return stored


def rows_of_study(trend: TrendSettings, cells: Sequence[dict], rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the effects, rungs and seeds of the study. effects.csv may have others, of labels
    that were renamed or removed.

    Args:
        cells: the cells of results.json.
    """
    repeats = {(cell["axes"][trend.axis], cell["axes"][SEED]) for cell in cells}
    known = rows[REPEAT].itertuples(index=False, name=None)
    is_own = [effect in trend.effects and (rung, seed) in repeats for effect, rung, seed in known]
    return rows.loc[np.array(is_own, dtype=bool)]


# The line.


class Estimate(NamedTuple):
    """A number with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RungEffect:
    """An effect on one rung.

    Attributes:
        parameters: number of parameters of the first arm, without embeddings.
        length: trained length in tokens.
        seeds: (S,) the effect of each seed.
        mean: mean over seeds and targets.
        residuals: contribution of each unit to the deviation of `mean`: its targets · (value −
            mean) / all targets, with value averaged over seeds.
    """

    rung: str
    parameters: int
    length: int
    seeds: np.ndarray
    mean: float
    residuals: pd.Series


def rungs_of(rows: pd.DataFrame) -> list[RungEffect]:
    """The rungs of one effect, in the order of their rows. Raises StudyError if the seeds of a rung
    have different targets."""
    rungs = []
    for label, own in rows.groupby("rung", sort=False):
        values = own.pivot(index="seed", columns="unit", values="value")
        targets = own.groupby("unit")["targets"]
        if values.isna().any(axis=None) or (targets.agg("nunique") > 1).any():
            raise StudyError(
                f"effects.csv: the seeds of {own.iloc[0].effect} on rung {label} have different "
                "targets; delete its rows, which the report writes again if their cells are "
                "measured"
            )
        counts = np.asarray(targets.agg("first").loc[values.columns])
        matrix = values.to_numpy()  # (S, D)
        of_units = matrix.mean(axis=0)
        mean, _ = mean_over_targets(of_units * counts, counts)
        deviations = counts * (of_units - mean) / counts.sum()
        first = own.iloc[0]
        rungs.append(
            RungEffect(
                str(label),
                int(first.parameters),
                int(first.length),
                seed_means(matrix, counts),
                mean,
                pd.Series(deviations, index=values.columns),
            )
        )
    return rungs


class Trend:
    """The line through the rungs of an effect.

    Attributes:
        rungs: the measured rungs.
    """

    def __init__(self, rungs: Sequence[RungEffect], delta: float):
        self.rungs = rungs
        self.delta = delta
        lengths = np.log2([rung.length for rung in rungs])
        self._sizes = np.log10([rung.parameters for rung in rungs])
        self._mean_length = float(lengths.mean())
        design = np.column_stack([np.ones(len(rungs)), self._sizes, lengths])
        if len(rungs) < 4 or np.linalg.matrix_rank(design) < 3:
            design = design[:, :2]
        self._solution = np.linalg.pinv(design)  # coefficients = solution @ effects
        self.ends = float(self._sizes.min()), float(self._sizes.max())

    def weights(self, size: float, length: float | None = None) -> np.ndarray:
        """(R,) weights of the effects of the rungs in the line's value.

        Args:
            size: log10 of parameters.
            length: log2 of the trained length; None: the mean over the rungs.
        """
        at = [1.0, size, self._mean_length if length is None else length]
        return np.array(at[: len(self._solution)]) @ self._solution

    def at(self, size: float) -> Estimate:
        """The line at this log10 of parameters and the mean length."""
        return self.contrast(self.weights(size))

    @property
    def change(self) -> Estimate:
        """The line at the largest size minus the line at the smallest."""
        first, last = map(self.weights, self.ends)
        return self.contrast(last - first)

    def predict(self, rung: PredictedRung) -> Estimate:
        """The effect expected on a rung that was not measured, if the line holds, with the interval
        of its measurement on the same units."""
        weights = self.weights(math.log10(rung.parameters), math.log2(rung.length))
        return self.contrast(weights, pooled=1 / rung.seeds)

    def interval_of(self, rung: RungEffect) -> Estimate:
        """The effect on one rung."""
        return self.contrast(np.array([float(each is rung) for each in self.rungs]))

    def contrast(self, weights: np.ndarray, pooled: float = 0.0) -> Estimate:
        """The sum of the effects of the rungs times `weights`. Rungs on the same units deviate
        together; rungs with fewer than 3 seeds have the variance of the seeds of all rungs.

        Args:
            pooled: further multiple of the variance of the seeds of all rungs.
        """
        value = float(weights @ [rung.mean for rung in self.rungs])
        parts = []
        for weight, rung in zip(weights, self.rungs, strict=True):
            seeds = len(rung.seeds)
            if seeds < LEAST_SEEDS:
                pooled += weight**2 / seeds
            else:
                parts.append((weight**2 * float(rung.seeds.var(ddof=1)) / seeds, seeds - 1))
        if pooled:
            variance, df = self._pooled
            parts.append((pooled * variance, df))
        deviations = [w * rung.residuals for w, rung in zip(weights, self.rungs, strict=True) if w]
        of_units = pd.concat(deviations).groupby(level=0).agg("sum").to_numpy()
        units = min(len(each) for each in deviations)
        if units < POINTS_ONLY_BELOW or any(df == 0 for _, df in parts):
            return Estimate(value, math.nan, math.nan)
        parts.append((units / (units - 1) * float((of_units**2).sum()), units - 1))
        half = half_width_of_sum(parts, ALPHA)
        return Estimate(value, value - half, value + half)

    @property
    def _pooled(self) -> tuple[float, int]:
        """Variance of the effects of seeds within rungs, and its degrees of freedom."""
        squares = sum(float(rung.seeds.var()) * len(rung.seeds) for rung in self.rungs)
        df = sum(len(rung.seeds) - 1 for rung in self.rungs)
        return squares / max(df, 1), df

    @property
    def word(self) -> str:
        """The verdict on the trend, as defined in the module docstring."""
        first, last = map(self.at, self.ends)
        change = self.change  # NaN, thus not resolved, with too few units or seeds
        if -self.delta < change.low and change.high < self.delta:
            return STEADY
        shown = all(each.low > 0 or each.high < 0 for each in (first, last))
        if shown and first.value * last.value < 0:
            return TURNS
        if change.low > 0 or change.high < 0:
            return GROWS if abs(last.value) > abs(first.value) else SHRINKS
        return NOT_RESOLVED


# The table and the figure.


def trend_table(trend: TrendSettings, rows: pd.DataFrame) -> ReportTable:
    """The effect on every rung and its trend."""
    trends = trends_of(trend, rows)
    predicted = predictions(trend, rows)
    rungs = list(dict.fromkeys(rows["rung"]))
    lines: list[list[Cell]] = []
    for name, each in trends.items():
        effect = trend.effects[name]
        on = {rung.rung: each.interval_of(rung) for rung in each.rungs}
        texts = [with_ends(*on[rung]) if rung in on else NONE for rung in rungs]
        if trend.predicted:
            texts.append(with_ends(*predicted[name]) if name in predicted else NONE)
        change = with_ends(*each.change)
        lines.append(
            [effect.statement, *texts, change, each.word, effect.expect, f"{effect.delta:g}"]
        )
    if trend.predicted:
        rungs.append(f"{trend.predicted.label}, predicted")
    columns = ["effect, nats", *rungs, "change", "trend", "expected", "δ"]
    return ReportTable("Effects by size", columns, lines)


def trend_findings(trend: TrendSettings, rows: pd.DataFrame) -> list[str]:
    """The number of effects with each word, then their statements."""
    stated: dict[str, list[str]] = {word: [] for word in WORDS}
    for name, each in trends_of(trend, rows).items():
        stated[each.word].append(trend.effects[name].statement)
    stated = {word: own for word, own in stated.items() if own}
    first, *_, last = dict.fromkeys(rows["rung"])
    counts = ", ".join(f"{word} ({len(own)})" for word, own in stated.items())
    statements = [f"{word}: {'; '.join(own)}." for word, own in stated.items()]
    return [f"Effects from {first} to {last}: {counts}.", *statements]


def predictions(trend: TrendSettings, rows: pd.DataFrame) -> dict[str, Estimate]:
    """The effects on the predicted rung, by name, from the rows of all other rungs."""
    if trend.predicted is None:
        return {}
    others = rows.loc[rows["rung"] != trend.predicted.label]
    trends = trends_of(trend, others).items()
    return {name: each.predict(trend.predicted) for name, each in trends}


def trends_of(trend: TrendSettings, rows: pd.DataFrame) -> dict[str, Trend]:
    """The trends of the effects measured at two sizes at least, by name."""
    trends = {}
    for name, effect in trend.effects.items():
        rungs = rungs_of(rows.loc[rows["effect"] == name])
        if len({rung.parameters for rung in rungs}) > 1:
            trends[name] = Trend(rungs, effect.delta)
    return trends


def trend_figure(trend: TrendSettings, rows: pd.DataFrame) -> Figure:
    """A panel for each effect: its value on every rung, the line with its interval, and ±δ."""
    predicted = predictions(trend, rows)
    shown = [
        Panel(
            partial(_draw_trend, trend=each, rung=trend.predicted, predicted=predicted.get(name)),
            f"{trend.effects[name].statement}\n{each.word}",
            named=False,
            height=1.8,
        )
        for name, each in trends_of(trend, rows).items()
    ]
    x = "parameters without embeddings"
    return panels(shown, FigureText(), x=x, y="nats", columns=3, names="below", width=9.5)


def _draw_trend(
    axes: Axes, trend: Trend, rung: PredictedRung | None, predicted: Estimate | None
) -> None:
    draw_level(axes, 0.0, color=INK)
    if rung and predicted:
        ends = [np.array([each]) for each in predicted]
        style: Any = {"label": "predicted", "color": SOFT, "marker": "D", "ls": "", "hollow": True}
        beside = 1.2 * rung.parameters  # not on top of the measured effect
        draw_line(axes, [beside], *ends, **style)
    lengths = sorted({rung.length for rung in trend.rungs})
    for length, color, marker in zip(lengths, COLOURS, MARKERS, strict=False):
        own = [rung for rung in trend.rungs if rung.length == length]
        value, low, high = np.array([trend.interval_of(rung) for rung in own]).T
        style: Any = {"label": f"{length:,} tokens", "color": color, "marker": marker, "ls": ""}
        draw_line(axes, [rung.parameters for rung in own], value, low, high, **style)
    sizes = np.linspace(*trend.ends, 25)
    line, low, high = np.array([trend.at(size) for size in sizes]).T
    draw_line(axes, 10**sizes, line, color=SOFT)
    labels = {each.parameters: each.rung for each in reversed(trend.rungs)}  # the first of its size
    if rung and rung.label not in labels.values():
        labels[rung.parameters] = rung.label
    axes.set_xscale("log")
    axes.set_xticks(list(labels), list(labels.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.fill_between(10**sizes, low, high, color=SOFT, alpha=0.18, lw=0)
    axes.axhspan(-trend.delta, trend.delta, color=BAND, alpha=0.13, lw=0, zorder=0.5)
