"""The content of a report, sections of text, lists, tables and figures, and its rendering.

HTML is one file without scripts or requests; Markdown refers to figures as figures/NAME.png.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).with_name("templates")


class TableCell(NamedTuple):
    """`tone` selects a style: held, broken, inconclusive, better, worse, faint or none."""

    text: str
    tone: str = ""


Cell = TableCell | str
NONE = TableCell("—", "faint")


def verdict_cell(word: str) -> TableCell:
    """The word of a verdict in its color."""
    return TableCell(word, word if word in ("held", "broken", "inconclusive") else "")


@dataclass(frozen=True)
class ReportTable:
    """Rows of text; the first column names the row. Columns from `numbers` on are aligned as
    numbers."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    note: str = ""
    numbers: int = 1
    kind: ClassVar = "table"

    @property
    def cells(self) -> list[list[TableCell]]:
        return [
            [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row]
            for row in self.rows
        ]


@dataclass(frozen=True)
class ReportFigure:
    """A figure stored as `file`.png and .svg. `alt`: alternative text; `link`: its path from the
    Markdown file, `figures/NAME` by default."""

    file: Path
    caption: str
    alt: str
    link: str = ""
    kind: ClassVar = "figure"

    @property
    def data(self) -> str:
        """The SVG as the source of an image."""
        svg = self.file.with_suffix(".svg").read_text(encoding="utf-8")
        # Verdana has the same widths as DejaVu Sans, which few systems have.
        svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


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


class ReportSection:
    """A title and blocks, without empty texts and tables."""

    def __init__(self, title: str, blocks: Sequence[Block]):
        self.title = title
        self.blocks = [b for b in blocks if (b.rows if isinstance(b, ReportTable) else b)]


@dataclass(frozen=True)
class ReportDocument:
    """`lead`: the findings, one sentence each; `downloads`: (file beside it, description)."""

    title: str
    subtitle: str
    lead: Sequence[str]
    sections: Sequence[ReportSection]
    downloads: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        css = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
        return _template("report.html.j2", autoescape=True).render(d=self, css=css)

    def markdown(self) -> str:
        text = _template("report.md.j2", autoescape=False).render(d=self)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


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
    environment.filters |= {"slug": slug, "interval": _interval, "plain": _unmarked}
    return environment.get_template(name)


def _interval(text: str) -> Markup:
    """The brackets of an interval on a line of their own, to keep tables narrow."""
    return Markup(re.sub(r" (\[[^\]]*\])$", r'<span class="ends"> \1</span>', escape(text)))


def _unmarked(text: str) -> str:
    """Markdown without markup: special characters escaped, on one line."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())
