"""A report before it is HTML or Markdown: headings, sentences, tables, pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from evaluation.seeds import SeedInterval
from evaluation.statistics import Interval


class Cell(NamedTuple):
    """Words in a table; `tone`: held, broken, undecided, better, worse, faint, or nothing."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """`rows` of words; the first column names the row. Columns from `numbers` on are set as numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    note: str = ""
    numbers: int = 1


@dataclass(frozen=True)
class Picture:
    """A figure: its name in the folder `figures`, its SVG, a caption, and words in its place."""

    name: str
    svg: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Bullets:
    """Items: (a name that stands out or nothing, the words)."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Words to be typed as they stand."""

    text: str


Block = str | Bullets | Code | Table | Picture


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    """`lead`: what happened, in sentences; `downloads`: (file beside this one, what it is)."""

    title: str
    subtitle: str
    lead: Sequence[str]
    sections: Sequence[Section]
    downloads: Sequence[tuple[str, str]] = ()


def signed(value: float, digits: int = 3) -> str:
    """`+0.012` or `−0.012`, no sign before a zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def plain(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def ends(interval: SeedInterval | Interval, digits: int = 3) -> str:
    """`[−0.012, +0.034]`, or nothing for a point."""
    if math.isnan(interval.low):
        return ""
    return f"[{signed(interval.low, digits)}, {signed(interval.high, digits)}]"


def with_ends(interval: SeedInterval | Interval, digits: int = 3) -> str:
    return f"{signed(interval.estimate, digits)} {ends(interval, digits)}".rstrip()


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
