"""The content of a report, sections of text, lists, tables and figures, and its rendering.

HTML is one file without scripts or requests; Markdown refers to figures as figures/NAME.png.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from studies.results.compare import StudyComparison
from studies.results.table import StudyResult

TEMPLATES = Path(__file__).with_name("templates")
TEXTS: dict[str, dict[str, str]] = yaml.safe_load(
    (TEMPLATES / "texts.yaml").read_text(encoding="utf-8")
)
DARK = TEXTS["dark"]  # colors of the figures, and their counterparts on a dark background


class TableCell(NamedTuple):
    """`tone` selects a style: held, broken, inconclusive, better, worse, faint or none."""

    text: str
    tone: str = ""


Cell = TableCell | str
NONE = TableCell("—", "faint")


@dataclass(frozen=True)
class ReportTable:
    """Rows of text; the first column names the row. Columns from `numbers` on are aligned as numbers."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    note: str = ""
    numbers: int = 1
    kind: ClassVar = "table"

    @property
    def cells(self) -> list[list[TableCell]]:
        return [
            [one if isinstance(one, TableCell) else TableCell(one) for one in row]
            for row in self.rows
        ]


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

    def __post_init__(self) -> None:
        """Leave out empty texts and tables."""
        self.blocks = [
            one for one in self.blocks if (one.rows if isinstance(one, ReportTable) else one)
        ]


@dataclass(frozen=True)
class ReportDocument:
    """`lead`: the findings, one sentence each; `downloads`: (file in the same directory, description)."""

    title: str
    subtitle: str
    lead: Sequence[str]
    sections: Sequence[ReportSection]
    downloads: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        css = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
        return _template("report.html.j2", True).render(d=self, css=css, palette=DARK.items())

    def markdown(self) -> str:
        text = _template("report.md.j2", False).render(d=self)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def note(name: str, table: StudyComparison | None = None, **values: object) -> str:
    """A text of texts.yaml, filled with facts about a loss evaluation and with `values`."""
    if table is not None:
        values |= {
            "l0": table.trained_length,
            "kind": table.losses.kind,
            "baseline": table.baseline,
        }
        values |= {"family": table.family, "differences": table.difference_family}
        values |= {"tolerance": table.tolerance, "level": 100 * table.confidence}
    return TEXTS["notes"][name].format(**values)


def signed(value: float, digits: int = 3) -> str:
    """`+0.012` or `−0.012`, no sign for zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def with_ends(row: StudyResult | None) -> str:
    """`+0.011 [−0.012, +0.034]`; without brackets for a point estimate."""
    if row is None:
        return ""
    ends = "" if math.isnan(row.low) else f" [{signed(row.low)}, {signed(row.high)}]"
    return signed(row.value) + ends


def listed(items: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def seed_counts(table: StudyComparison, noun: str) -> str:
    """`3 seeds`, or `1 to 3 seeds` if the variants differ."""
    seeds = sorted({table.seed_count(name) for name in table.names})
    return (f"{seeds[0]} to " if len(seeds) > 1 else "") + counted(seeds[-1], noun)


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _template(name: str, autoescape: bool):
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "slug": slug,
        "svg": _inline_svg,
        "interval": _interval,
        "plain": _unmarked,
    }
    return environment.get_template(name)


def _interval(text: str) -> Markup:
    """The brackets of an interval on a line of their own, to keep tables narrow."""
    return Markup(re.sub(r" (\[[^\]]*\])$", r'<span class="ends"> \1</span>', escape(text)))


def _unmarked(text: str) -> str:
    """Markdown without markup: special characters escaped, on one line."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())


def _inline_svg(figure: ReportFigure, prefix: str) -> Markup:
    """The SVG with unique ids, colors that follow the page, and the alternative text as label."""
    svg = figure.svg[figure.svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)[^>]*>.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r"#[0-9a-fA-F]{6}\b", _page_color, svg)
    # Verdana has the same widths as DejaVu Sans, which few systems have.
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return Markup(
        f'{opening} role="img" aria-label="{escape(figure.alt, quote=True)}">{rest.strip()}'
    )


def _page_color(match: re.Match) -> str:
    color = match[0].lower()
    return f"var(--f{color[1:]}, {color})" if color in DARK else match[0]
