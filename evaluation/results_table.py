"""The long table of results, the same for every evaluation and study: one row for one number.

Tables and charts of reports are views of it.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from evaluation.statistics.intervals import MeanInterval


def number(value: float | None) -> float:
    """NaN for a number that does not exist, which JSON has as null."""
    return math.nan if value is None else value


class ResultRow(NamedTuple):
    """One number.

    Attributes:
        variant: the row of a report: a method, a run, or a scheme of a study under a method.
        length: number of input tokens; None for a metric of all lengths.
        where: the part of the text or model: `layer 1, head 2`, `greedy`.
        at, until: the place within it: a depth, or positions or distances from `at` to before
            `until`.
        seed: '' for all seeds, or for an evaluation of one run.
        low, high: ends of the interval; NaN where there is none.
        verdict: held, broken, inconclusive or points only; compared with chance for accuracies.
        note: why there is no number, or how it was computed.
        seeds, units: sizes of the sample; `family`: number of simultaneous intervals.
        level: of the intervals of the whole family together.
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
    def place(self) -> tuple:
        """What sets it apart from other rows."""
        return (self.variant, self.metric, self.length, self.where, self.at, self.seed)

    @property
    def inputs(self) -> int:
        """`length`, of a row that has one."""
        assert self.length is not None
        return self.length

    @property
    def bounds(self) -> tuple[float, float]:
        """`at` and `until`, of a row that has both."""
        assert self.at is not None
        assert self.until is not None
        return self.at, self.until

    @property
    def negated(self) -> "ResultRow":
        return self._replace(value=-self.value, low=-self.high, high=-self.low)


class ResultsTable:
    """Rows in their order, one for each (variant, metric, length, place, seed)."""

    def __init__(self, rows: Iterable[ResultRow] = ()):
        self.rows: dict[tuple, ResultRow] = {}
        self.extend(rows)

    def extend(self, rows: Iterable[ResultRow]) -> None:
        for row in rows:
            self.put(row)

    def put(self, row: ResultRow) -> None:
        self.rows[row.place] = row

    def add(
        self,
        variant: str,
        metric: str,
        value: MeanInterval | float,
        length: int | None = None,
        **columns,
    ) -> None:
        """Add a number, or an interval with its sample."""
        if isinstance(value, MeanInterval):
            columns |= {
                "low": value.low,
                "high": value.high,
                "seeds": " and ".join(map(str, value.seeds)),
                "units": value.units,
                "family": value.family,
                "level": round(1 - (1 - value.level) * value.family, 9),
            }
            value = value.estimate
        self.put(ResultRow(variant, metric, float(value), length, **columns))

    def get(
        self,
        variant: str,
        metric: str,
        length: int | None = None,
        where: str = "",
        at: float | None = None,
    ) -> ResultRow | None:
        """The row over all seeds."""
        return self.rows.get((variant, metric, length, where, at, ""))

    def value(self, variant: str, metric: str, length: int | None = None) -> float | None:
        """The value over all seeds; None if there is none."""
        row = self.get(variant, metric, length)
        return None if row is None else row.value

    def select(
        self,
        metric: str,
        variant: str | None = None,
        *,
        seed: str | None = "",
        where: str | None = "",
    ) -> list[ResultRow]:
        """The rows of a metric in their order; None selects every variant, seed or part."""
        return [
            row
            for row in self.rows.values()
            if row.metric == metric
            and variant in (None, row.variant)
            and seed in (None, row.seed)
            and where in (None, row.where)
        ]

    def lengths(self, metric: str) -> list[int]:
        return sorted({row.length for row in self.select(metric) if row.length is not None})
