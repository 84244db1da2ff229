"""The long table of results, the same for every evaluation and study: one row for one number.

Tables and charts of reports are views of it; results.csv is the table, with the facts about the
evaluation in each row.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from data.files import write_text
from evaluation.reports.text import with_ends
from evaluation.statistics.intervals import MeanInterval, interval, unit_means

# Facts about an evaluation that results.csv repeats in each row.
FACTS = ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash", "tokenizer_hash")
FACTS += ("targets_hash", "items_hash", "checkpoint_hash", "targets", "documents", "unit")


class ResultRow(NamedTuple):
    """One number.

    Attributes:
        variant: the row of a report: a method, a run, or a scheme of a study under a method.
        length: number of input tokens; None for a metric of all lengths.
        where: the part of the text, model or units: `unseen`, `layer 1, head 2`, `greedy`.
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
    def text(self) -> str:
        """`+0.011 [−0.012, +0.034]`; without brackets for a point estimate."""
        return with_ends(self.value, self.low, self.high)

    @property
    def negated(self) -> "ResultRow":
        return self._replace(value=-self.value, low=-self.high, high=-self.low)


class ResultsTable:
    """Rows in their order, one for each (variant, metric, length, place, seed)."""

    def __init__(self, rows: Iterable[ResultRow] = ()):
        self.rows: dict[tuple, ResultRow] = {}
        for row in rows:
            self.put(row)

    def put(self, row: ResultRow) -> None:
        place = (row.length, row.where, row.at)
        self.rows[row.variant, row.metric, *place, row.seed] = row

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
            seeds = getattr(value, "seeds", ())
            columns |= {
                "low": value.low,
                "high": value.high,
                "seeds": " and ".join(map(str, seeds)),
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


def write_results(
    path: Path,
    tables: Sequence[tuple[dict, Mapping[str, dict], ResultsTable, Mapping]],
) -> None:
    """results.csv: the rows of each table.

    Args:
        tables: columns before the rows (such as study and evaluation), more columns of each variant
            (such as its run and method), the rows, and the facts of results.json.
    """
    records = [
        {
            **place,
            "variant": row.variant,
            **variants.get(row.variant, {}),
            **dict(zip(row._fields[1:], row[1:], strict=True)),
            **{key: facts.get(key) for key in FACTS},
        }
        for place, variants, table, facts in tables
        for row in table.rows.values()
    ]
    write_table(path, records)


def write_table(path: Path, rows: Sequence[Mapping] | pd.DataFrame) -> None:
    """Write a table as CSV; None and NaN are empty. Whole numbers stay whole where other rows have
    none."""
    if not isinstance(rows, pd.DataFrame):
        rows = pd.DataFrame(list(rows), dtype=object)
    write_text(path, rows.to_csv(index=False, lineterminator="\n"))


def write_clean_json(path: Path, value) -> None:
    """Write JSON with null for NaN and infinity."""
    write_text(path, json.dumps(_clean(value), indent=1) + "\n")


def markdown_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    texts: int = 1,
) -> str:
    """A Markdown table; columns after the first `texts` are aligned as numbers."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, rule, *rows))


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def rounded(value: float) -> float | None:
    """The value with six significant digits; None for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def rounded_record(record: dict) -> dict:
    """A record whose floats are `rounded`."""
    return {
        key: rounded(value) if isinstance(value, float) else value for key, value in record.items()
    }


def interval_columns(name: str, one: MeanInterval | None) -> dict[str, float | None]:
    """`name`, `name_low` and `name_high` of an interval; None for what does not exist."""
    if one is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {
        name: one.estimate,
        f"{name}_low": finite(one.low),
        f"{name}_high": finite(one.high),
    }


def mean_over_units(
    values: np.ndarray,
    unit: np.ndarray,
    confidence: float,
) -> dict:
    """value, low and high: mean and interval over units of the finite values (n,)."""
    known = np.isfinite(values)
    if not known.any():
        return {"value": None, "low": None, "high": None}
    means = unit_means(values[known], unit[known])
    mean = interval(means, alpha=1 - confidence)
    return rounded_record({"value": mean.estimate, "low": mean.low, "high": mean.high})


def _clean(value):
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
