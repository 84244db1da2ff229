"""The long table of results, the same for every evaluation and study: a DataFrame with a row for
each number.

Tables and charts of reports are views of it.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from evaluation.statistics.intervals import MeanInterval


def number(value: float | None) -> float:
    """A number from JSON; NaN for null, a missing number."""
    return math.nan if value is None else value


class ResultRow(NamedTuple):
    """One number.

    Attributes:
        variant: what a report compares: a method, a run, or a scheme of a study under a method.
        length: number of input tokens; None for a metric of all lengths.
        where: the part of the text or model: `layer 1, head 2`, `greedy`.
        at, until: the place within that part: a depth, or positions or distances from `at` to
            before `until`.
        seed: '' for all seeds, or for an evaluation of one run.
        low, high: ends of the interval; NaN without an interval.
        verdict: held, broken, inconclusive or points only; for accuracies, the comparison with
            chance.
        note: why the number is missing, or how it was computed.
        seeds, units: sizes of the sample; `family`: number of simultaneous intervals.
        level: simultaneous level of all intervals of the family.
    """

    variant: str
    metric: str
    value: float = math.nan
    length: int | None = None
    where: str = ""
    at: float | None = None
    until: float | None = None
    seed: str = ""
    low: float = math.nan
    high: float = math.nan
    verdict: str = ""
    note: str = ""
    seeds: str = ""
    units: int | None = None
    family: int | None = None
    level: float | None = None

    @property
    def key(self) -> tuple:
        """The columns that distinguish this row from others."""
        return (self.variant, self.metric, self.length, self.where, self.at, self.seed)

    @property
    def inputs(self) -> int:
        """`length`; the row must have one."""
        assert self.length is not None
        return self.length

    @property
    def bounds(self) -> tuple[float, float]:
        """`at` and `until`; the row must have both."""
        assert self.at is not None
        assert self.until is not None
        return self.at, self.until

    @property
    def negated(self) -> "ResultRow":
        return self._replace(value=-self.value, low=-self.high, high=-self.low)


def row_of(
    variant: str,
    metric: str,
    value: MeanInterval | float,
    length: int | None = None,
    **columns,
) -> ResultRow:
    """The row of a number, or of an interval with its sample."""
    if isinstance(value, MeanInterval):
        return ResultRow(variant, metric, length=length, **value._asdict(), **columns)
    return ResultRow(variant, metric, float(value), length, **columns)


def results_table(rows: Iterable[ResultRow] = ()) -> pd.DataFrame:
    """The table of these rows; empty cells are None, '' or NaN."""
    return pd.DataFrame(rows, columns=ResultRow._fields, dtype=object)


def select(
    table: pd.DataFrame,
    metric: str,
    variant: str | None = None,
    *,
    seed: str | None = "",
    where: str | None = "",
) -> list[ResultRow]:
    """The rows of a metric in their order; None selects every variant, seed or part."""
    is_shown = table["metric"] == metric
    for column, wanted in (("variant", variant), ("seed", seed), ("where", where)):
        if wanted is not None:
            is_shown &= table[column] == wanted
    return [ResultRow(*row) for row in table.loc[is_shown].itertuples(index=False)]


def select_one(
    table: pd.DataFrame,
    metric: str,
    variant: str,
    length: int | None = None,
) -> ResultRow | None:
    """The row over all seeds, for a length or for all lengths; None if it is missing."""
    rows = (row for row in select(table, metric, variant) if row.length == length)
    return next(rows, None)
