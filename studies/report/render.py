"""Render a document as HTML, one file without scripts or requests, and as Markdown with PNG figures."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from studies.report.document import ReportDocument, ReportFigure

TEMPLATES = Path(__file__).with_name("templates")
# Colours of the figures, and their counterparts on a dark background.
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
_MARKDOWN = re.compile(r"[\\|*_`<\[]")


def render_html(document: ReportDocument) -> str:
    """The HTML file."""
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return _template("report.html.j2", autoescape=True).render(
        d=document, css=Markup(css), palette=DARK.items()
    )


def render_markdown(document: ReportDocument) -> str:
    """The Markdown file; it refers to figures as figures/NAME.png."""
    text = _template("report.md.j2", autoescape=False).render(d=document)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _template(name: str, autoescape: bool):
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"slug": slug, "svg": inline_svg, "interval": _interval, "plain": _plain}
    return environment.get_template(name)


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _interval(text: str) -> Markup:
    """The brackets of an interval on a line of their own, to keep tables narrow."""
    return Markup(re.sub(r" (\[[^\]]*\])$", r'<span class="ends"> \1</span>', escape(text)))


def _plain(text: str) -> str:
    """Markdown without markup: special characters escaped, on one line."""
    return " ".join(_MARKDOWN.sub(r"\\\g<0>", text).split())


def inline_svg(figure: ReportFigure, prefix: str) -> Markup:
    """The SVG with unique ids, colours that follow the page, and the alternative text as label."""
    svg = figure.svg[figure.svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)[^>]*>.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r"#[0-9a-fA-F]{6}\b", _page_colour, svg)
    # Verdana has the same widths as DejaVu Sans, which few systems have.
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return Markup(f'{opening} role="img" aria-label="{escape(figure.alt, quote=True)}">{rest.strip()}')


def _page_colour(match: re.Match) -> str:
    colour = match[0].lower()
    return f"var(--f{colour[1:]}, {colour})" if colour in DARK else match[0]
