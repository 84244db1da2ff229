"""Figures in one style: a grid of panels with curves and a key, below a title. PNG and SVG, legible
at column width and without color.

`panels` draws panels into one figure; the other functions make panels from rows of results
(`ResultRow`, or objects with its attributes):

    panel = length_panel(select(table, "nll"), styles_of(names), LengthAxis([64], trained=[64]))
    save(panels([panel], FigureText("Loss by context length")), folder, "nll_by_length")
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    SymmetricalLogLocator,
)

from data.files import atomic
from evaluation.reports.document import plain, signed
from evaluation.statistics.results_table import ResultRow

# Okabe and Ito 2008 without its yellow, which is too light for a line on white, then dark colors of
# Tol's muted set. Markers differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
COLOURS += ("#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d", "8")
INK = "#222222"
SOFT = "#6E6E6E"
FAINT = "#767676"
GRID = "#E6E6E6"
Numbers = Sequence[float] | np.ndarray
DOTTED = (0, (1, 2))
DASHED = (0, (5, 3))
WIDTH = 7.2  # inches
DPI = 200
HEAD = 0.62  # inches for title and subtitle
KEY_ROW = 0.19  # inches per row of a key
KEY: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0, "labelspacing": 0.3}
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.formatter.useoffset": False,  # an offset at the end of an axis is easily missed
    "text.parse_math": False,  # names of runs and methods may contain `$`; axis labels set it
    "svg.fonttype": "none",
    "svg.hashsalt": "sextant",
}


@dataclass(frozen=True)
class FigureText:
    """Title, subtitle and note; empty if the caption is elsewhere."""

    title: str = ""
    subtitle: str = ""
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """The content of one pair of axes.

    Attributes:
        draw: draws everything except the labels of the axes. A key names the lines that have a
            label.
        x, y: labels of the axes.
        named: whether the key is beside the panel.
        height: minimum height in inches; a long key increases it.
    """

    draw: Callable[[Axes], object]
    heading: str = ""
    x: str = ""
    y: str = ""
    named: bool = True
    height: float = 2.9


def draw_line(
    axes: Axes,
    x: Numbers,
    y: Numbers,
    low: Numbers = (),
    high: Numbers = (),
    *,
    label: str = "",
    color: str = INK,
    across: bool = False,
    hollow: bool = False,
    **style: Any,
) -> None:
    """A line with intervals.

    Args:
        label: name in the key; '' for none.
        low, high: ends of the interval of each y, or of each x if `across`; NaN or empty for no
            interval.
        hollow: draw markers as outlines.
        style: further arguments of `Axes.plot`.
    """
    style = {
        "lw": 1.5,
        "ms": 4.6,
        "zorder": 3,
        "mfc": "white" if hollow else color,
        "mec": color if hollow else "white",
        "mew": 0.9 if hollow else 0.6,
        **style,
    }
    axes.plot(x, y, label=label or "_", color=color, **style)
    wide = np.greater(high, low)
    if wide.any():
        value = x if across else y
        ends = np.stack([np.subtract(value, low), np.subtract(high, value)])[:, wide]
        axes.errorbar(
            np.asarray(x)[wide],
            np.asarray(y)[wide],
            fmt="none",
            color=color,
            elinewidth=1.0,
            capsize=2.2,
            alpha=0.75,
            zorder=style["zorder"] - 0.5,
            xerr=ends if across else None,
            yerr=None if across else ends,
        )


def draw_level(axes: Axes, y: float, label: str = "", color: str = SOFT) -> None:
    """A dashed horizontal line across the axes."""
    axes.axhline(y, label=label or "_", color=color, lw=1.1, ls=DASHED, zorder=2)


def panels(
    content: Iterable[Panel | None],
    text: FigureText,
    *,
    x: str = "",
    y: str = "",
    columns: int = 1,
    names: Literal["beside", "below"] = "beside",
    width: float = WIDTH,
) -> Figure:
    """A grid of panels; None (an empty panel) is left out.

    Args:
        x, y: labels of the x axes in the last row and of the y axes in the first column, for panels
            without labels of their own.
        names: `beside`: a key beside each panel, highest line first; `below`: one key below all
            panels.
    """
    shown = [panel for panel in content if panel is not None]
    columns = max(1, min(columns, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    with rc_context(STYLE):
        figure = Figure(dpi=DPI)
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(shown) :]:
            axes.remove()
        heights = [0.0] * rows
        known: dict[str, Artist] = {}
        for n, (panel, axes) in enumerate(zip(shown, grid.flat, strict=False)):
            axes.set_title(panel.heading, loc="left", fontsize=9.5, color=INK, pad=4)
            axes.grid(axis="y", color=GRID, lw=0.7, zorder=0)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            panel.draw(axes)
            across = x if n + columns >= len(shown) else ""
            up = y if n % columns == 0 else ""
            axes.set_xlabel(panel.x or across, color=INK, parse_math=True)
            axes.set_ylabel(panel.y or up, color=INK, parse_math=True)
            lines, labels = axes.get_legend_handles_labels()
            known |= dict(zip(labels, lines, strict=True))
            room = 0.0
            if names == "beside" and panel.named and lines:
                room = 0.8 + KEY_ROW * len(lines)
                key_beside(axes)
            heights[n // columns] = max(heights[n // columns], panel.height, room)
        key_columns = max(1, int(13 * width / (10 + max(map(len, known), default=0))))
        has_key = names == "below" and len(known) > 1
        key_height = KEY_ROW * math.ceil(len(known) / key_columns) + 0.1 if has_key else 0.0
        head = HEAD if text.title else 0.1
        foot = 0.24 + 0.14 * text.note.count("\n") if text.note else 0.06
        total = head + sum(heights) + key_height + foot
        figure.set_size_inches(width, total)
        grid[0, 0].get_gridspec().set_height_ratios(heights)
        title: Any = {"fontsize": 11.5, "fontweight": "bold", "color": INK, "va": "top"}
        figure.text(0.02, 1 - 0.12 / total, text.title, **title)
        small: Any = {"fontsize": 8.5, "color": SOFT, "va": "top"}
        figure.text(0.02, 1 - 0.36 / total, text.subtitle, **small)
        figure.text(0.02, 0.07 / total, text.note, fontsize=8, color=SOFT, va="bottom")
        under = (foot + key_height) / total
        area = (0.008, under, 0.984, 1 - head / total - under)
        figure.set_layout_engine(ConstrainedLayoutEngine(rect=area, h_pad=0.06, w_pad=0.02))
        if has_key:
            place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, foot / total)}
            figure.legend(handles=known.values(), ncols=key_columns, **place, **KEY)
        return figure


def key_beside(axes: Axes) -> None:
    """A key right of the axes, in descending order of the lines' last values."""

    def end(line: Any) -> float:
        y = np.asarray(line.get_ydata(), dtype=float)
        return y[np.isfinite(y)][-1]

    lines: list[Any] = sorted(axes.get_legend_handles_labels()[0], key=end, reverse=True)
    key = axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.02, 0.5), **KEY)
    for line, label in zip(lines, key.get_texts(), strict=True):
        label.set_color(line.get_color())


def token_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """A log2 x axis of tokens with these ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def mark(axes: Axes, x: float, text: str = "", height: float = 1.0) -> None:
    """A dotted vertical line, labelled at this fraction of the height."""
    axes.axvline(x, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    axes.annotate(
        text,
        xy=(x, height),
        xytext=(4, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=SOFT,
        fontsize=8.5,
        va="top",
    )


def save(
    figure: Figure,
    folder: Path,
    name: str,
    dpi: int = DPI,
    formats: Sequence[str] = ("png", "svg"),
) -> Path:
    """Write `name`.png and `name`.svg with reproducible bytes; returns the first."""
    with rc_context(STYLE):
        for kind in formats:
            metadata = {"Date": None} if kind == "svg" else None
            with atomic(folder / f"{name}.{kind}") as file:
                figure.savefig(file, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    return folder / f"{name}.{formats[0]}"


BAND = "#999999"
SHADES = "cividis"  # even in lightness, and the same to every kind of color vision


class LineStyle(NamedTuple):
    """`marked`: the variant is undertrained; its markers are outlines and its label has a †."""

    color: str
    marker: str
    marked: bool = False

    def label(self, variant: str) -> str:
        return f"{variant} †" if self.marked else variant


Styles = Mapping[str, LineStyle]


def styles_of(
    names: Sequence[str],
    ink: str | None = None,
    rows: Iterable[ResultRow] = (),
    marked: Iterable[str] = (),
) -> dict[str, LineStyle]:
    """Color and marker of each variant, the same in all figures.

    Args:
        ink: the variant drawn in black.
        rows: losses. With more variants than colors, the best at the longest length get colors, and
            the others thin grey lines.
        marked: undertrained variants.
    """
    colored = [name for name in names if name != ink]
    if len(colored) > len(COLOURS):
        last = {row.variant: (-row.inputs, row.value) for row in rows if not row.seed}
        colored.sort(key=lambda name: last.get(name, (0, math.inf)))
        # the last color is the grey of the remaining lines
        colored = colored[: len(COLOURS) - 1]
    free = iter(zip(COLOURS, MARKERS, strict=True))
    styles = {}
    for name in names:
        color, marker = (INK, "o") if name == ink else (FAINT, ".")
        if name in colored:
            color, marker = next(free)
        styles[name] = LineStyle(color, marker, name in marked)
    return styles


def shades(names: Sequence[str]) -> dict[str, LineStyle]:
    """Colors from dark to light for ordered variants, distinguishable by lightness alone."""
    places = np.linspace(0.0, 0.82, max(len(names), 1))
    return {
        name: LineStyle(to_hex(colormaps["viridis"](at)), "")
        for name, at in zip(names, places, strict=True)
    }


@dataclass(frozen=True)
class LengthAxis:
    """The x axis that the panels of a figure share.

    Attributes:
        ticks: their range is the range of the axis; at most eight are shown.
        trained: trained lengths, marked by dotted lines.
        x_of: maps a row to its x; the scale is log2.
    """

    ticks: Sequence[float]
    trained: Sequence[float] = ()
    x_of: Callable[[ResultRow], float] = attrgetter("length")

    def apply(self, axes: Axes, name_marks: bool = False) -> None:
        low = min(*self.ticks, *self.trained)
        high = max(*self.ticks, *self.trained)
        ticks = list(self.ticks)
        while len(ticks) > 8:
            ticks = ticks[::-2][::-1]
        token_axis(axes, ticks)
        axes.set_xlim(low / 2**0.25, high * 2**0.25)
        for length in self.trained:
            mark(axes, length, f"trained length {length:,}" if name_marks else "")


def length_panel(
    rows: Iterable[ResultRow],
    styles: Styles,
    axis: LengthAxis,
    *,
    heading: str = "",
    y: str = "",
    levels: Sequence[tuple[str, float]] = (),
    band: float | None = None,
    top: float | None = None,
    share: bool = False,
    named: bool = True,
    height: float = 3.2,
) -> Panel | None:
    """A line for each variant, named with its last value; rows of single seeds are thin lines
    without a name. None without rows.

    Args:
        levels: horizontal lines (label, y); `{}` in a label is replaced by y.
        band: the range ± `band` is shaded; the scale is linear inside and logarithmic outside.
        top: upper limit of the axis; lines may leave it.
        share: values are from 0 to 1 and shown in percent.
        named: show a key beside the panel; otherwise the y axis starts at 0.
    """
    by_line: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        if math.isfinite(row.value):
            by_line.setdefault((row.variant, row.seed), []).append(row)
    if not by_line:
        return None
    number = "{:.0%}".format if share else signed if band else plain
    longest = max(axis.x_of(own[-1]) for own in by_line.values())

    def name_of_line(own: Sequence[ResultRow]) -> str:
        label = styles[own[-1].variant].label(own[-1].variant)
        if not named:
            return label
        x = axis.x_of(own[-1])
        return f"{label}  {number(own[-1].value)}" + (f" at {x:,.0f}" if x < longest else "")

    def draw(axes: Axes) -> None:
        for label, at in levels:
            draw_level(axes, at, label.replace("{}", number(at)))
        for (variant, seed), own in by_line.items():
            style = styles[variant]
            line: dict[str, Any] = {
                "color": style.color,
                "lw": 1.6,
                "marker": style.marker,
                "zorder": 4,
            }
            if style.color == FAINT:
                line |= {"lw": 0.8, "ms": 3.5, "zorder": 2.5}
            if seed:
                line |= {"lw": 0.6, "marker": "", "zorder": 2.5}
            else:
                line |= {
                    "label": name_of_line(own),
                    "low": [row.low for row in own],
                    "high": [row.high for row in own],
                }
            x = [float(axis.x_of(row)) for row in own]
            draw_line(axes, x, [row.value for row in own], hollow=style.marked, **line)
        axis.apply(axes, name_marks=named and not heading)
        values = [at for _, at in levels] + ends_of(chain(*by_line.values()))
        if top is not None:
            values = [min(value, top) for value in values]
        if share or not named:
            values.append(0.0)
        set_scale(axes, "y", values, band)
        if not named:
            axes.tick_params(labelsize=8, length=2.5)
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))

    note = f" (linear within ±{band:g})" if band else ""
    return Panel(draw, heading and heading + note, y=y and y + note, named=named, height=height)


def multiples(
    by_heading: Mapping[str, Iterable[ResultRow]],
    styles: Styles,
    axis: LengthAxis,
    text: FigureText,
    *,
    x: str,
    y: str = "",
    shares: Collection[str] = (),
    top: float | None = None,
) -> Figure:
    """Small panels in two columns, without bars, and one key of the lines below them.

    Args:
        shares: headings of panels with values in percent.
        top: upper limit of all panels; None: one for each panel.
    """
    drawn = [
        length_panel(
            [row._replace(low=math.nan, high=math.nan) for row in rows],
            styles,
            axis,
            heading=heading,
            top=top,
            share=heading in shares,
            named=False,
            height=1.75,
        )
        for heading, rows in by_heading.items()
    ]
    return panels(drawn, text, x=x, y=y, columns=2, names="below")


def difference_panel(
    rows: Iterable[ResultRow],
    styles: Styles,
    axis: LengthAxis,
    heading: str,
    band: float,
) -> Panel | None:
    """Differences with their intervals, without variants drawn in grey, for use below a panel that
    names the lines; ± `band` is shaded."""
    shown = [row for row in rows if styles[row.variant].color != FAINT]
    panel = length_panel(
        shown,
        styles,
        axis,
        heading=heading,
        levels=[("", 0.0)],
        band=band,
        height=1.7,
    )
    return panel and replace(panel, named=False)


def rows_panel(
    names: Sequence[str],
    draw: Callable[[Axes], object],
    *,
    heading: str = "",
    x: str = "",
    row: float = 0.215,
) -> Panel:
    """Dots (`draw_dot`) in named rows 0, 1, ... from top to bottom, with a line at zero.

    Args:
        draw: draws the dots.
        row: height of each row in inches.
    """

    def draw_rows(axes: Axes) -> None:
        axes.locator_params(axis="x", nbins=7)
        draw(axes)
        axes.set_ylim(len(names) - 0.4, -0.5)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
        axes.spines["left"].set_visible(False)
        axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)

    return Panel(draw_rows, heading, x=x, named=False, height=0.5 + row * len(names))


def draw_dot(axes: Axes, at: float, ends: Sequence[float], color: str, **style: Any) -> None:
    """A value with its interval in row `at`; `ends`: value, low, high."""
    value, low, high = ends
    style = {"marker": "o", **style}
    draw_line(axes, [value], [at], [low], [high], color=color, across=True, **style)


def dots_panel(
    rows: Sequence[ResultRow],
    styles: Styles,
    *,
    band: float,
    heading: str = "",
    shared: Iterable[ResultRow] = (),
) -> Panel:
    """Differences with intervals, one per row from top to bottom; point estimates are hollow.

    Args:
        band: the range ± `band` is shaded; the scale is linear inside and logarithmic outside.
        shared: the rows of all panels that have the same scale.
    """

    def draw(axes: Axes) -> None:
        for at, row in enumerate(rows):
            color, marker, _ = styles[row.variant]
            ends = (row.value, row.low, row.high)
            draw_dot(axes, at, ends, color, marker=marker, ms=5.5, hollow=math.isnan(row.low))
        set_scale(axes, "x", ends_of([*rows, *shared]), band)

    names = [styles[row.variant].label(row.variant) for row in rows]
    return rows_panel(names, draw, heading=heading)


def ends_of(rows: Iterable[ResultRow]) -> list[float]:
    """All finite values and ends of intervals."""
    values = [value for row in rows for value in (row.value, row.low, row.high)]
    return [value for value in values if math.isfinite(value)]


def heat_map(rows: Sequence[ResultRow], lengths: Sequence[int], y: str) -> Panel | None:
    """Shaded cells, each with a share and its interval: length from left to right, place (`at`)
    from top to bottom. None without rows."""
    if not rows:
        return None
    places: list[Any] = sorted({row.at or 0.0 for row in rows})

    def draw(axes: Axes) -> None:
        shades = np.full((len(places), len(lengths)), np.nan)
        for row in rows:
            y = places.index(row.at)
            x = lengths.index(row.inputs)
            shades[y, x] = row.value
            color = "white" if row.value < 0.5 else INK
            text = f"{100 * row.value:.0f}\n({100 * row.low:.0f}–{100 * row.high:.0f})"
            axes.text(x, y, text, fontsize=7.5, color=color, ha="center", va="center")
        axes.imshow(shades, SHADES, vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(places)), [f"{at:.2f}" for at in places])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return Panel(draw, y=y, height=0.9 + 0.42 * max(3, len(places)))


def top_of_colored(rows: Sequence[ResultRow], styles: Styles) -> float | None:
    """An upper limit that cuts off grey lines far above all colored lines; None without colored
    lines."""
    colored = [row.value for row in rows if styles[row.variant].color != FAINT]
    if not colored:
        return None
    highest = max(colored)
    lowest = min(row.value for row in rows)
    return highest + 0.5 * (highest - lowest)


def set_scale(axes: Axes, which: str, values: Sequence[float], band: float | None) -> None:
    """Set the limits of the x or y axis around values. With `band`, the scale is symlog, linear
    within ± `band`, which is shaded."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if band:
        limits = (1.35 * min(low, -1.5 * band), 1.35 * max(high, 1.5 * band))
        getattr(axes, f"set_{which}scale")("symlog", linthresh=band, linscale=0.6)
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=band, subs=(1, 3)))
        shade = axes.axvspan if which == "x" else axes.axhspan
        shade(-band, band, color=BAND, alpha=0.13, lw=0, zorder=0.5)
    else:
        room = max(high - low, 1e-3)
        limits = (low - 0.06 * room, high + 0.1 * room)
        axis.set_major_locator(MaxNLocator(5))
    axes.set(**{f"{which}lim": limits})
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
