"""Formats of numbers in summaries, tables and figures.

Reports as Markdown, and as one HTML page that is made from the Markdown, without scripts or
requests."""

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

from errors import printable
from evaluation.statistics.results_table import ResultRow
from run_directory.console import Console


def plain(value: float, digits: int = 3) -> str:
    """`0.012` or `−0.012`; no sign for zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """`+0.012` or `−0.012`; no sign for zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def with_ends(value: float, low: float, high: float, digits: int = 3) -> str:
    """`+0.123 [+0.100, +0.146]`, or the value alone for a point estimate."""
    if math.isnan(low):
        return signed(value, digits)
    return f"{signed(value, digits)} [{signed(low, digits)}, {signed(high, digits)}]"


def interval_text(row: ResultRow) -> str:
    return with_ends(row.value, row.low, row.high)


def percent(share: float, low: float = math.nan, high: float = math.nan) -> str:
    """`12.3% [10.0%, 14.6%]`, or the share alone if an end is NaN."""
    return f"{share:.1%}" if math.isnan(low) else f"{share:.1%} [{low:.1%}, {high:.1%}]"


def listed(items: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def counted(n: int, noun: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def dtype_note(dtype: str) -> str:
    """`, bfloat16` for titles of results that were not measured in float32, else ''."""
    return "" if dtype == "float32" else f", {dtype}"


CSS = Path(__file__).with_name("page.css")
EMPHASIS = {"good": "**", "bad": "***"}  # Markdown around a cell, by its tone
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
<main>
{body}
</main>
</body>
</html>
"""


class TableCell(NamedTuple):
    """`tone`: good (bold), bad (bold italic) or neither."""

    text: str
    tone: str = ""


Cell = TableCell | str
NONE = "—"


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
        if not self.rows:
            return ""
        lines = []
        for row in self.cells:
            texts = []
            for text, tone in row:
                mark = EMPHASIS.get(tone, "")
                texts.append(f"{mark}{plain_text(text)}{mark}")
            lines.append(texts)
        table = markdown_table([*map(plain_text, self.columns)], lines, self.numbers)
        note = f"\n\n*{plain_text(self.note)}*" if self.note else ""
        return f"**{plain_text(self.title)}**\n\n{table}{note}"


def print_table(table: ReportTable) -> None:
    cells = [[cell.text for cell in row] for row in table.cells]
    if cells:
        print(printable(table.title))
        Console().table("", table.columns, cells)
        print(printable(table.note), end="\n" if table.note else "")


def markdown_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    texts: int = 1,
) -> str:
    """A Markdown table; columns after the first `texts` are aligned as numbers."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, rule, *rows))


def pivot(
    title: str,
    rows: Iterable[ResultRow],
    write: Callable[[ResultRow], Cell],
    *,
    index: Mapping[str, Callable[[ResultRow], str]],
    columns: Callable[[ResultRow], Any] = lambda row: row.length,
    headings: Mapping[Any, str] | None = None,
    note: str = "",
) -> ReportTable:
    """A table of rows of results: a row for each index, a column for each value of `columns`, and a
    dash for a missing number.

    Args:
        index: headings of the first columns and their texts.
        headings: headings of the columns in their order, without columns that no row has; default:
            the values, which are lengths.
    """
    by_index: dict[tuple[str, ...], dict[Any, Cell]] = {}
    known = set()
    for row in rows:
        key = tuple(text(row) for text in index.values())
        column = columns(row)
        by_index.setdefault(key, {})[column] = write(row)
        known.add(column)
    if headings is None:
        headings = {column: f"{column:,}" for column in sorted(known)}
    shown = {column: heading for column, heading in headings.items() if column in known}
    lines = []
    for key, cells in by_index.items():
        lines.append([*key, *(cells.get(column, NONE) for column in shown)])
    return ReportTable(title, [*index, *shown.values()], lines, note, numbers=len(index))


def plain_text(text: str) -> str:
    """Markdown without markup: special characters escaped, on one line."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())


def picture(link: str, caption: str, alt: str) -> str:
    """Markdown of a figure. `alt`: text for readers who cannot see it."""
    return f"![{plain_text(alt)}]({link})\n\n*{plain_text(caption)}*"


def markdown(
    title: str,
    lead: Sequence[str],
    sections: Mapping[str, Sequence[str | ReportTable]],
    downloads: Mapping[str, str] | None = None,
) -> str:
    """A document: findings, one sentence each; sections of Markdown and tables, without empty ones;
    and links to the files beside it with their descriptions."""
    first, *rest = (plain_text(line) for line in lead if line)
    parts = [f"# {plain_text(title)}", f"**{first}**", *rest]
    for heading, blocks in sections.items():
        texts = [block if isinstance(block, str) else block.markdown() for block in blocks]
        if any(texts):
            parts += [f"## {plain_text(heading)}", *filter(None, texts)]
    if downloads:
        links = [f"[{name}]({name}) ({what})" for name, what in downloads.items()]
        parts.append(f"Files: {', '.join(links)}.")
    return "\n\n".join(parts) + "\n"


def page(text: str, folder: Path) -> str:
    """The HTML page of a Markdown document, which may contain HTML. Pictures, whose links are
    relative to `folder`, are embedded as SVG."""
    parser = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table")
    parser.add_render_rule("table_open", _open_table)
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(text)
    links = []
    for n, token in enumerate(tokens):
        content = tokens[n + 1].content if n + 1 < len(tokens) else ""
        if token.type == "heading_open" and token.tag == "h2":
            name = "".join(part.content for part in tokens[n + 1].children or ())
            token.attrSet("id", slug(name))
            links.append(f'<li><a href="#{slug(name)}">{escape(name)}</a></li>')
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type == "td_open" and tokens[n - 1].type == "tr_open":
            token.tag = tokens[n + 2].tag = "th"
            token.attrSet("scope", "row")
        elif token.type == "td_open":
            tones = [tone for tone, mark in EMPHASIS.items() if content.startswith(mark)]
            token.attrSet("class", tones[-1] if tones else "")
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", embedded(folder / str(child.attrs["src"])))
    html = parser.renderer.render(tokens, parser.options, {})
    # intervals in brackets get their own line, to keep tables narrow
    ends = r" (\[[^\]<]*\])(?=(</strong>|</em>)*</td>)"
    html = re.sub(ends, r'<span class="ends"> \1</span>', html)
    head, *sections = re.split(r"(?=<h2 )", html)
    nav = f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>'
    heading = tokens[1].children
    assert heading is not None
    title = escape(heading[0].content)
    body = [head, nav, *(f"<section>\n{section}</section>" for section in sections)]
    css = CSS.read_text(encoding="utf-8")
    return PAGE.format(title=title, css=css, body="\n".join(body))


def embedded(file: Path) -> str:
    """A data URL with the SVG beside a picture."""
    svg = file.with_suffix(".svg").read_text(encoding="utf-8")
    # Verdana has the same widths as DejaVu Sans, which few systems have.
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _open_table(renderer, tokens, n: int, options, env) -> str:
    """The scrollable region of a table, named by the paragraph above it."""
    title = tokens[n - 2].content if n > 1 else ""
    name = escape(re.sub(r"\\(.)|\*\*", r"\1", title))
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table>\n'
