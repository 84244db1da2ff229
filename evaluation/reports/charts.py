"""Charts of rows of results (`ResultRow`, or anything with its attributes): each function makes a
panel, and `figures.panels` draws panels into a figure.

    panel = length_panel(table.select("nll"), styles_of(names), LengthAxis([64, 256], trained=[64]))
    save(panels([panel], FigureText("Loss by context length")), folder, "nll_by_length")
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    MaxNLocator,
    PercentFormatter,
    SymmetricalLogLocator,
)

from evaluation.reports.figures import (
    COLOURS,
    FAINT,
    INK,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Panel,
    mark,
    name_rows,
    panels,
    token_axis,
)
from evaluation.reports.text import plain, signed
from evaluation.results_table import ResultRow

BAND = "#999999"
PER_OCTAVE = 12  # points of a line for each doubling of the context
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
        ink: the variant in black.
        rows: losses. Of more variants than there are colors the best at the longest length have
            colors, and the others are thin grey lines.
        marked: undertrained variants.
    """
    colored = [name for name in names if name != ink]
    if len(colored) > len(COLOURS):
        last = {row.variant: (-row.length, row.value) for row in rows if not row.seed}
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
    """Colors from dark to light for ordered variants, told apart without color too."""
    places = np.linspace(0.0, 0.82, max(len(names), 1))
    return {
        name: LineStyle(to_hex(colormaps["viridis"](at)), "")
        for name, at in zip(names, places, strict=True)
    }


@dataclass(frozen=True)
class LengthAxis:
    """The x axis that the panels of a figure share.

    Attributes:
        ticks: its range; at most eight are shown.
        trained: trained lengths, marked by dotted lines.
        place: the x of a row, on a log2 scale.
    """

    ticks: Sequence[float]
    trained: Sequence[float] = ()
    place: Callable[[ResultRow], float] = attrgetter("length")

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


def curves_of(rows: Iterable[ResultRow], styles: Styles, axis: LengthAxis) -> list[Curve]:
    """A line for each variant; rows of single seeds are thin lines without a name."""
    by_line: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        if math.isfinite(row.value):
            by_line.setdefault((row.variant, row.seed), []).append(row)
    curves = []
    for (variant, seed), own in by_line.items():
        style = styles[variant]
        curve = Curve(
            style.label(variant),
            x=[float(axis.place(row)) for row in own],
            y=[row.value for row in own],
            color=style.color,
            low=[row.low for row in own],
            high=[row.high for row in own],
            width=1.6,
            marker=style.marker,
            hollow=style.marked,
            order=4,
        )
        if style.color == FAINT:
            curve = replace(curve, width=0.8, size=3.5, order=2.5)
        if seed:
            curve = replace(curve, label="", low=(), high=(), width=0.6, marker="", order=2.5)
        curves.append(curve)
    return curves


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
) -> Panel:
    """A line for each variant, named with its last value.

    Args:
        levels: horizontal lines (label, y); `{}` in a label is replaced by the value.
        band: ± this is shaded; the scale is linear inside and logarithmic outside.
        top: upper limit of the axis; lines may leave it.
        share: values from 0 to 1, in per cent.
        named: with a key beside the panel; else on an axis from 0.
    """
    rows = list(rows)
    curves = curves_of(rows, styles, axis)
    number = signed if band else plain
    if share:
        number = "{:.0%}".format
    longest = max((curve.end[0] for curve in curves), default=0.0)
    if named:
        for n, curve in enumerate(curves):
            x, value = curve.end
            text = number(value) if x == longest else f"{number(value)} at {x:,.0f}"
            if curve.label:
                curves[n] = replace(curve, label=f"{curve.label}  {text}")

    def scales(axes: Axes) -> None:
        axis.apply(axes, name_marks=named and not heading)
        values = [at for _, at in levels] + ends_of(rows)
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
    return Panel(
        curves,
        heading and heading + note,
        [(label.replace("{}", number(at)), at, SOFT) for label, at in levels],
        y=y and y + note,
        scales=scales,
        named=named,
        height=height,
    )


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
        shares: headings of panels whose values are in per cent.
        top: upper limit of all panels; default: of each its own.
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
) -> Panel:
    """Differences with their intervals below a panel that names the lines; ± `band` is shaded.
    Without the variants that are grey."""
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
    return replace(panel, named=False)


def dots_panel(
    rows: Sequence[ResultRow],
    styles: Styles,
    *,
    band: float,
    heading: str = "",
    shared: Iterable[ResultRow] = (),
) -> Panel:
    """Differences with intervals, one row each from top to bottom, hollow for a point estimate.

    Args:
        band: ± it is shaded, and the scale is linear inside and logarithmic outside.
        shared: all rows of the panels that have a common scale.
    """
    curves = [
        Curve(
            "",
            x=[row.value],
            y=[at],
            color=styles[row.variant].color,
            low=[row.low],
            high=[row.high],
            across=True,
            marker=styles[row.variant].marker,
            size=5.5,
            hollow=math.isnan(row.low),
        )
        for at, row in enumerate(rows)
    ]

    def scales(axes: Axes) -> None:
        set_scale(axes, "x", ends_of([*rows, *shared]), band)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        name_rows(axes, [styles[row.variant].label(row.variant) for row in rows])

    height = 0.215 * len(rows) + 0.55
    return Panel(curves, heading, scales=scales, named=False, height=height)


def ends_of(rows: Iterable[ResultRow]) -> list[float]:
    """All finite values and ends of intervals."""
    values = [value for row in rows for value in (row.value, row.low, row.high)]
    return [value for value in values if math.isfinite(value)]


def heat_map(
    rows: Sequence[ResultRow],
    *,
    lengths: Sequence[int],
    name: Callable[[ResultRow], str],
    y: str,
    down: bool = False,
) -> Panel:
    """Shaded cells with a share and its interval: by length, and by place (`at`), which `name`
    names.

    Args:
        down: the first place is the upper one.
    """
    names = {row.at: name(row) for row in sorted(rows, key=attrgetter("at"))}
    places = list(names)

    def draw(axes: Axes) -> None:
        for row in rows:
            left = lengths.index(row.length)
            low = places.index(row.at)
            x = [left, left + 1, left + 1, left]
            y = [low, low, low + 1, low + 1]
            axes.fill(x, y, color=colormaps[SHADES](row.value))
            axes.text(
                left + 0.5,
                low + 0.5,
                f"{100 * row.value:.0f}\n({100 * row.low:.0f}–{100 * row.high:.0f})",
                fontsize=7.5,
                color="white" if row.value < 0.5 else INK,
                ha="center",
                va="center",
            )
        axes.grid(visible=False)
        axes.set(xlim=(0, len(lengths)), ylim=(0, len(places)))
        axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{n:,}" for n in lengths])
        axes.set_yticks(np.arange(len(places)) + 0.5, names.values())
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if down:
            axes.invert_yaxis()

    height = 0.9 + 0.42 * max(3, len(places))
    return Panel(y=y, scales=draw, is_filled=bool(rows), height=height)


def top_of_colored(rows: Sequence[ResultRow], styles: Styles) -> float | None:
    """A limit below grey lines that are far above all colored ones; None without colored ones."""
    colored = [row.value for row in rows if styles[row.variant].color != FAINT]
    if not colored:
        return None
    highest = max(colored)
    lowest = min(row.value for row in rows)
    return highest + 0.5 * (highest - lowest)


def set_scale(axes: Axes, which: str, values: Sequence[float], band: float | None) -> None:
    """Limits of the x or y axis around values; with `band`, a symlog scale that is linear within ±
    it, with the band shaded."""
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
