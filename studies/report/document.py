"""The content of a report before it is rendered: sections of text, lists, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from evaluation.statistics.intervals import Interval
from evaluation.statistics.seeds import SeedInterval


class TableCell(NamedTuple):
    """`tone` selects a style: held, broken, inconclusive, better, worse, faint or none."""

    text: str
    tone: str = ""


Cell = TableCell | str


@dataclass(frozen=True)
class ReportTable:
    """Rows of text; the first column names the row. Columns from `numbers` on are aligned as numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    numbers: int = 1
    kind: ClassVar = "table"

    @property
    def cells(self) -> list[list[TableCell]]:
        return [[one if isinstance(one, TableCell) else TableCell(one) for one in row] for row in self.rows]


@dataclass(frozen=True)
class ReportFigure:
    """A figure: its name in the directory `figures`, its SVG, a caption and an alternative text."""

    name: str
    svg: str
    caption: str
    alt: str
    kind: ClassVar = "figure"


@dataclass(frozen=True)
class BulletList:
    """Items: (heading or '', text)."""

    items: Sequence[tuple[str, str]]
    kind: ClassVar = "list"


@dataclass(frozen=True)
class CodeBlock:
    text: str
    kind: ClassVar = "code"


Block = str | BulletList | CodeBlock | ReportTable | ReportFigure


@dataclass
class ReportSection:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class ReportDocument:
    """`lead`: the findings, one sentence each; `downloads`: (file in the same directory, description)."""

    title: str
    subtitle: str
    lead: Sequence[str]
    sections: Sequence[ReportSection]
    downloads: Sequence[tuple[str, str]] = ()


def signed(value: float, digits: int = 3) -> str:
    """`+0.012` or `−0.012`, no sign for zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def plain(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def with_ends(interval: SeedInterval | Interval) -> str:
    """`+0.011 [−0.012, +0.034]`; without brackets for a point estimate."""
    estimate = signed(interval.estimate)
    if math.isnan(interval.low):
        return estimate
    return f"{estimate} [{signed(interval.low)}, {signed(interval.high)}]"


def listed(items: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
