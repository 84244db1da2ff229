"""The long results table of a study, from which the report and results.csv are made.

One row is one metric of one variant, at one length, of one seed or over all seeds and units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluation.reports.results_table import finite
from evaluation.reports.text import with_ends
from evaluation.statistics.seeds import SeedInterval
from studies.results.stored import Group, StoredStudy, StudyVariant

FACTS = ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash", "targets_hash")


@dataclass(frozen=True)
class StudyResult:
    """One row.

    Attributes:
        length: number of input tokens; None for a metric of all lengths.
        where: a depth, a range of positions or a part of the units.
        seed: '' for all seeds.
        note: the reason of a failure, or how seeds were paired.
    """

    variant: str
    metric: str
    length: Any
    where: tuple
    seed: str
    value: float
    interval: SeedInterval | None = None
    verdict: str = ""
    note: str = ""

    @property
    def low(self) -> float:
        return math.nan if self.interval is None else self.interval.low

    @property
    def high(self) -> float:
        return math.nan if self.interval is None else self.interval.high

    @property
    def text(self) -> str:
        """`+0.011 [−0.012, +0.034]`; without brackets for a point estimate."""
        return with_ends(self.value, self.low, self.high)

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclass
class ResultsTable:
    """All rows of one evaluation in one group of cells. `facts`: of the first cell's results."""

    name: str
    group: Group
    variants: list[StudyVariant]
    facts: dict
    rows: dict[tuple, StudyResult] = field(default_factory=dict)

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]

    @property
    def title(self) -> str:
        """`held-out, width 64`."""
        return ", ".join([self.name, *(f"{axis} {label}" for axis, label in self.group)])

    @property
    def names(self) -> list[str]:
        """The variants with results, in the order of the study."""
        measured = {row.variant for row in self.rows.values()}
        return [variant.name for variant in self.variants if variant.name in measured]

    def add(
        self,
        variant: str,
        metric: str,
        value: SeedInterval | float,
        length: int | None = None,
        where: tuple = (),
        seed: str = "",
        verdict: str = "",
        note: str = "",
    ) -> None:
        if isinstance(value, SeedInterval):
            number = value.estimate
            interval = value
        else:
            number = float(value)
            interval = None
        row = StudyResult(
            variant,
            metric,
            length,
            where,
            seed,
            number,
            interval,
            verdict,
            note,
        )
        self.rows[variant, metric, length, where, seed] = row

    def get(
        self, variant: str, metric: str, length: int | None = None, where: tuple = ()
    ) -> StudyResult | None:
        """The row over all seeds."""
        return self.rows.get((variant, metric, length, where, ""))

    def value(
        self,
        variant: str,
        metric: str,
        length: int | None = None,
    ) -> float | None:
        """The value over all seeds; None if there is none."""
        row = self.get(variant, metric, length)
        return None if row is None else row.value

    def select(
        self,
        metric: str,
        variant: str | None = None,
        seed: str | None = "",
        where: tuple | None = (),
    ) -> list[StudyResult]:
        """The rows of a metric in their order; None selects every variant, seed or place."""
        return [
            row
            for row in self.rows.values()
            if row.metric == metric
            and variant in (None, row.variant)
            and seed in (None, row.seed)
            and where in (None, row.where)
        ]


def csv_records(study: StoredStudy, tables: Sequence[ResultsTable]) -> list[dict]:
    """The rows of results.csv: those of all tables, with the facts about their evaluation."""
    axes = dict.fromkeys(axis for table in tables for axis, _ in table.group)
    variants = {variant.name: variant for variant in study.variants}
    records = []
    for table in tables:
        place = {"study": study.name, "evaluation": table.name, **axes, **dict(table.group)}
        facts = {key: table.facts.get(key) for key in FACTS}
        for row in table.rows.values():
            record = {
                "variant": row.variant,
                "scheme": variants[row.variant].scheme,
                "method": variants[row.variant].method,
                "metric": row.metric,
                "length": row.length,
                "where": "–".join(map(str, row.where)),
                "seed": row.seed,
                "value": finite(row.value),
                "low": finite(row.low),
                "high": finite(row.high),
                "verdict": row.verdict,
                "note": row.note,
            }
            records.append(place | record | _sample(row.interval) | facts)
    return records


def _sample(interval: SeedInterval | None) -> dict:
    """`level`: the simultaneous level of the whole family."""
    if interval is None:
        return dict.fromkeys(("seeds", "units", "family", "level"))
    return {
        "seeds": " and ".join(map(str, interval.seeds)),
        "units": interval.units,
        "family": interval.family,
        "level": f"{1 - (1 - interval.level) * interval.family:.6g}",
    }
