"""A document as one HTML file: figures inline, no requests, no script; for screen, phone and paper."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from studies.document import Block, Bullets, Cell, Code, Document, Picture, Section, Table

# Colours of the figures and what stands for them on a dark screen.
DARK = {
    "#222222": "#ececec",
    "#6e6e6e": "#a9adb3",
    "#767676": "#a9adb3",
    "#999999": "#6b7078",
    "#e6e6e6": "#33373d",
    "#c9c9c9": "#4d525a",
    "#ffffff": "#1b1e22",
    "#0072b2": "#5ab4ea",
    "#d55e00": "#f08a3c",
    "#009e73": "#3fcf9f",
    "#cc79a7": "#e29ac4",
    "#e69f00": "#f2b93b",
    "#56b4e9": "#8fd0f5",
    "#7a5c00": "#c9a53c",
    "#332288": "#a79bf0",
    "#882255": "#e07fb0",
    "#117733": "#6cc784",
    "#8a8a2a": "#c8c860",
    "#5b5b5b": "#b5b5b5",
}

CSS = Path(__file__).with_name("page.css")


def render(document: Document) -> str:
    """The whole file."""
    links = "".join(
        f'<li><a href="#{slug(section.title)}">{escape(section.title)}</a></li>'
        for section in document.sections
    )
    figures = iter(range(1, 10_000))
    body = "".join(_section(section, figures) for section in document.sections)
    files = ", ".join(
        f'<a href="{escape(name)}">{escape(name)}</a> ({escape(what)})' for name, what in document.downloads
    )
    footer = f'<footer><p class="files">Beside this page: {files}.</p></footer>' if files else ""
    lead = "".join(f"<p>{escape(line)}</p>" for line in document.lead)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(document.title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(document.title)}</h1><p class="kicker">{escape(document.subtitle)}</p>\n'
        f'<div class="lead" role="region" aria-label="What was found">{lead}</div>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f"<main>\n{body}</main>\n{footer}\n</body>\n</html>\n"
    )


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _style() -> str:
    """The style sheet, and the colours of figures: as they are, and in a dark place."""

    def colours(chosen: dict[str, str]) -> str:
        return ":root { " + " ".join(f"--f{name[1:]}: {value};" for name, value in chosen.items()) + " }"

    as_they_are = colours({name: name for name in DARK})
    return (
        CSS.read_text(encoding="utf-8")
        + f"{as_they_are}\n@media screen and (prefers-color-scheme: dark) {{ {colours(DARK)} }}\n"
    )


def _section(section: Section, figures) -> str:
    inner = "\n".join(_block(block, figures) for block in section.blocks)
    return f'<section id="{slug(section.title)}">\n<h2>{escape(section.title)}</h2>\n{inner}\n</section>\n'


def _block(block: Block, figures) -> str:
    match block:
        case str():
            return f"<p>{escape(block)}</p>"
        case Bullets():
            items = "".join(
                f"<li>{f'<b>{escape(name)}</b>: ' if name else ''}{escape(text)}</li>"
                for name, text in block.items
            )
            return f'<ul class="findings">{items}</ul>'
        case Code():
            return f'<pre tabindex="0">{escape(block.text)}</pre>'
        case Picture():
            n = next(figures)
            return (
                f'<figure id="figure-{n}">'
                f'<div class="pan" tabindex="0" role="region" aria-label="Figure {n}">'
                f"{inline(block.svg, block.alt, f'f{n}-')}</div>"
                f"<figcaption><b>Figure {n}.</b> {escape(block.caption)}</figcaption></figure>"
            )
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    def kind(column: int) -> str:
        return "n" if column >= table.numbers else "w"

    columns = list(table.columns)
    head = "".join(f'<th scope="col" class="{kind(n)}">{escape(name)}</th>' for n, name in enumerate(columns))
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    rows = []
    for row in table.rows:
        cells = [one if isinstance(one, Cell) else Cell(one) for one in row]
        first, *rest = cells
        line = f'<th scope="row">{escape(first.text)}</th>'
        for n, one in enumerate(rest, start=1):
            line += f'<td class="{f"{kind(n)} {one.tone}".strip()}">{_stacked(one.text)}</td>'
        rows.append(f"<tr>{line}</tr>")
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    title = escape(table.title)
    return (
        f'<div class="table"><p class="title">{title}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table aria-label="{title}">'
        f"{head}<tbody>\n" + "\n".join(rows) + f"\n</tbody></table></div>{note}</div>"
    )


def _stacked(text: str) -> str:
    """An interval stands below its number, so that tables stay narrow."""
    return re.sub(r" (\[[^\]]*\])$", r'<span class="ends"> \1</span>', escape(text))


def inline(svg: str, alt: str, prefix: str) -> str:
    """An SVG file as a part of a page: its own names, colours that follow the page, words beside."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r"#[0-9a-fA-F]{6}\b", _follow, svg)
    # Verdana is as wide as DejaVu Sans and at hand where that is not.
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    opening = re.match(r"<svg[^>]*>", svg)
    assert opening is not None
    tag = re.sub(r'\s(width|height)="[^"]*"', "", opening[0])
    label = escape(alt, quote=True)
    return tag[:-1] + f' role="img" aria-label="{label}">' + svg[opening.end() :].strip()


def _follow(match: re.Match) -> str:
    colour = match[0].lower()
    return f"var(--f{colour[1:]}, {colour})" if colour in DARK else match[0]
