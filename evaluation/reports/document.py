"""The content of a report, sections of text, lists, tables and pictures, and its rendering as
Markdown and HTML.

HTML is one file without scripts or requests; Markdown refers to pictures by their paths.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.results_table import ResultRow

CSS = Path(__file__).with_name("page.css")
EMPHASIS = ("held", "broken", "better", "worse")  # tones that are bold in Markdown


class TableCell(NamedTuple):
    """`tone` selects a style: held, broken, inconclusive, better, worse, faint or none."""

    text: str
    tone: str = ""


Cell = TableCell | str
NONE = TableCell("—", "faint")


@dataclass(frozen=True)
class ReportTable:
    """Rows of text; the first column names the row. Columns from `numbers` on are aligned as
    numbers."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    note: str = ""
    numbers: int = 1

    @property
    def cells(self) -> list[list[TableCell]]:
        return [
            [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row]
            for row in self.rows
        ]

    def markdown(self) -> str:
        rule = ["---" if n < self.numbers else "---:" for n in range(len(self.columns))]
        lines = [[_plain(name) or " " for name in self.columns], rule]
        for row in self.cells:
            marks = ["**" if cell.tone in EMPHASIS else "" for cell in row]
            lines.append([f"{m}{_plain(c.text)}{m}" for c, m in zip(row, marks, strict=True)])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        note = f"\n\n*{_plain(self.note)}*" if self.note else ""
        return f"**{_plain(self.title)}**\n\n{table}{note}"

    def html(self, number: int) -> str:
        kinds = ["w" if n < self.numbers else "n" for n in range(len(self.columns))]
        head = "".join(
            f'<th scope="col" class="{kind}">{escape(name)}</th>'
            for kind, name in zip(kinds, self.columns, strict=True)
        )
        body = ""
        for first, *rest in self.cells:
            cells = "".join(
                f'<td class="{kind} {cell.tone}">{_interval(cell.text)}</td>'
                for kind, cell in zip(kinds[1:], rest, strict=True)
            )
            body += f'<tr><th scope="row">{escape(first.text)}</th>{cells}</tr>\n'
        name = escape(self.title)
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        thead = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        return (
            f'<div class="table"><p class="title">{name}</p>\n'
            f'<div class="scroll" role="region" tabindex="0" aria-label="{name}">'
            f'<table aria-label="{name}">{thead}\n<tbody>\n{body}</tbody></table></div>{note}</div>'
        )


def pivot(
    title: str,
    rows: Iterable[ResultRow],
    write: Callable[[ResultRow], Cell],
    *,
    index: Mapping[str, Callable[[ResultRow], str]] | None = None,
    columns: Callable[[ResultRow], Any] = lambda row: row.length,
    headings: Mapping[Any, str] | None = None,
    note: str = "",
) -> ReportTable:
    """A table of rows of results: a row for each index, a column for each value of `columns`, and a
    dash where there is no number.

    Args:
        index: headings of the first columns and their texts; default: the variant.
        headings: of the columns, in their order; default: the values, which are lengths.
    """
    index = {"": lambda row: row.variant} if index is None else index
    by_index: dict[tuple[str, ...], dict[Any, Cell]] = {}
    for row in rows:
        key = tuple(text(row) for text in index.values())
        by_index.setdefault(key, {})[columns(row)] = write(row)
    if headings is None:
        found = sorted({column for cells in by_index.values() for column in cells})
        headings = {column: f"{column:,}" for column in found}
    lines = [
        [*key, *(cells.get(column, NONE) for column in headings)] for key, cells in by_index.items()
    ]
    return ReportTable(title, [*index, *headings.values()], lines, note, len(index))


@dataclass(frozen=True)
class ReportFigure:
    """A figure stored as `file`.png and .svg. `alt`: alternative text; `link`: its path from the
    Markdown file."""

    file: Path
    caption: str
    alt: str
    link: str

    def markdown(self) -> str:
        return f"![{_plain(self.alt)}]({self.link})\n\n*{_plain(self.caption)}*"

    def image(self) -> str:
        """The picture as an HTML element that needs no other file."""
        svg = self.file.with_suffix(".svg").read_text(encoding="utf-8")
        # Verdana has the same widths as DejaVu Sans, which few systems have.
        svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
        data = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
        return f'<img src="{data}" alt="{escape(self.alt)}">'

    def html(self, number: int) -> str:
        label = f"Figure {number}"
        return (
            f'<figure id="figure-{number}"><div class="pan" tabindex="0" role="region" '
            f'aria-label="{label}">{self.image()}</div>\n'
            f"<figcaption><b>{label}.</b> {escape(self.caption)}</figcaption></figure>"
        )


@dataclass(frozen=True)
class BulletList:
    """Items: (heading or '', text)."""

    items: Sequence[tuple[str, str]]

    def markdown(self) -> str:
        names = [f"**{_plain(name)}**: " if name else "" for name, _ in self.items]
        texts = [_plain(text) for _, text in self.items]
        return "\n".join(f"- {name}{text}" for name, text in zip(names, texts, strict=True))

    def html(self, number: int) -> str:
        names = [f"<b>{escape(name)}</b>: " if name else "" for name, _ in self.items]
        texts = [escape(text) for _, text in self.items]
        items = [f"<li>{name}{text}</li>" for name, text in zip(names, texts, strict=True)]
        return f'<ul class="findings">{"".join(items)}</ul>'


@dataclass(frozen=True)
class CodeBlock:
    text: str

    def markdown(self) -> str:
        return f"```\n{self.text}\n```"

    def html(self, number: int) -> str:
        return f'<pre tabindex="0">{escape(self.text)}</pre>'


@dataclass(frozen=True)
class Paragraph:
    text: str

    def markdown(self) -> str:
        return _plain(self.text)

    def html(self, number: int) -> str:
        return f"<p>{escape(self.text)}</p>"


Block = Paragraph | BulletList | CodeBlock | ReportTable | ReportFigure


class ReportSection:
    """A title and blocks, without empty texts and tables."""

    def __init__(self, title: str, blocks: Iterable[Block | str | None]):
        self.title = title
        self.slug = slug(title)
        made = [Paragraph(block) if isinstance(block, str) else block for block in blocks if block]
        self.blocks = [b for b in made if not isinstance(b, ReportTable) or b.rows]


@dataclass(frozen=True)
class ReportDocument:
    """`lead`: the findings, one sentence each; `downloads`: (file beside it, description)."""

    title: str
    subtitle: str
    lead: Sequence[str]
    sections: Sequence[ReportSection]
    downloads: Sequence[tuple[str, str]] = ()

    def markdown(self) -> str:
        first, *rest = map(_plain, self.lead)
        parts = [f"# {_plain(self.title)}", _plain(self.subtitle), f"**{first}**", *rest]
        for section in self.sections:
            parts += [f"## {_plain(section.title)}", *(b.markdown() for b in section.blocks)]
        files = [f"[{name}]({name}) ({what})" for name, what in self.downloads]
        parts.append(f"Files: {', '.join(files)}." if files else "")
        return "\n\n".join(part for part in parts if part) + "\n"

    def html(self) -> str:
        title = escape(self.title)
        lead = "".join(f"<p>{escape(line)}</p>" for line in self.lead)
        links = [f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in self.sections]
        body = []
        figures = 0
        for section in self.sections:
            body.append(f'<section id="{section.slug}">\n<h2>{escape(section.title)}</h2>')
            for block in section.blocks:
                figures += isinstance(block, ReportFigure)
                body.append(block.html(figures))
            body.append("</section>")
        files = [f'<a href="{name}">{name}</a> ({escape(what)})' for name, what in self.downloads]
        footer = f'<footer><p class="files">Files: {", ".join(files)}.</p></footer>'
        return PAGE.format(
            title=title,
            css=CSS.read_text(encoding="utf-8"),
            subtitle=escape(self.subtitle),
            lead=lead,
            links="".join(links),
            body="\n".join(body),
            footer=footer if files else "",
        )


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header><h1>{title}</h1><p class="kicker">{subtitle}</p>
<div class="lead" role="region" aria-label="Findings">{lead}</div>
<nav aria-label="Sections"><ul>{links}</ul></nav></header>
<main>
{body}
</main>
{footer}
</body>
</html>
"""


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _interval(text: str) -> str:
    """The brackets of an interval on a line of their own, to keep tables narrow."""
    return re.sub(r" (\[[^\]]*\])$", r'<span class="ends"> \1</span>', escape(text))


def _plain(text: str) -> str:
    """Markdown without markup: special characters escaped, on one line."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())
