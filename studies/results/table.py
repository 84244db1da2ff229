"""The long results table of a study, from which the report and results.csv are made.

One row is one metric of one variant, at one length, of one seed or over all seeds and units.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from evaluation.statistics.seeds import SeedInterval
from studies.results.stored import Group, StoredStudy, StudyVariant

FACTS = ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash", "targets_hash")


@dataclass(frozen=True)
class StudyResult:
    """One row. `where`: a depth, a range of positions or a part of the units; `seed`: '' for all seeds;
    `note`: the reason of a failure, or how seeds were paired."""

    variant: str
    metric: str
    length: int | None
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
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def at(self) -> int:
        """The length of a row that has one."""
        assert self.length is not None
        return self.length


@dataclass
class ResultsTable:
    """All rows of one evaluation in one group of cells. `facts`: from the results of the first cell."""

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
        found = {row.variant for row in self.rows.values()}
        return [variant.name for variant in self.variants if variant.name in found]

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
        interval = value if isinstance(value, SeedInterval) else None
        estimate = value.estimate if isinstance(value, SeedInterval) else float(value)
        self.rows[variant, metric, length, where, seed] = StudyResult(
            variant, metric, length, where, seed, estimate, interval, verdict, note
        )

    def get(
        self,
        variant: str,
        metric: str,
        length: int | None = None,
        where: tuple = (),
        seed: str = "",
    ) -> StudyResult | None:
        return self.rows.get((variant, metric, length, where, seed))

    def value(
        self, variant: str, metric: str, length: int | None = None, where: tuple = ()
    ) -> float | None:
        """The value over all seeds; None if there is none."""
        row = self.get(variant, metric, length, where)
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
            and (variant is None or row.variant == variant)
            and (seed is None or row.seed == seed)
            and (where is None or row.where == where)
        ]


def csv_text(study: StoredStudy, tables: Sequence[ResultsTable]) -> str:
    """results.csv: the rows of all tables, with the facts about their evaluation."""
    axes = list(dict.fromkeys(axis for table in tables for axis, _ in table.group))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    where = ("variant", "scheme", "method", "metric", "length", "where", "seed")
    numbers = ("value", "low", "high", "verdict", "note", "seeds", "units", "family", "level")
    writer.writerow(["study", "evaluation", *axes, *where, *numbers, *FACTS])
    variants = {variant.name: variant for variant in study.variants}
    for table in tables:
        labels = dict(table.group)
        facts = [table.facts.get(key) for key in FACTS]
        for row in table.rows.values():
            variant = variants[row.variant]
            one = row.interval
            sample = ["", "", "", ""]
            if one is not None:
                seeds = " and ".join(map(str, one.seeds))
                sample = [seeds, one.units, one.family, f"{1 - (1 - one.level) * one.family:.6g}"]
            writer.writerow(
                [study.name, table.name, *(labels.get(axis) for axis in axes)]
                + [row.variant, variant.scheme, variant.method, row.metric, row.length]
                + ["–".join(map(str, row.where)), row.seed]
                + [
                    "" if math.isnan(number) else number
                    for number in (row.value, row.low, row.high)
                ]
                + [row.verdict, row.note, *sample, *facts]
            )
    return text.getvalue()
