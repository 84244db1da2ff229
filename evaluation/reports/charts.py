"""Charts of rows of results (`ResultRow`, or anything with its attributes): each function makes a
panel, and `figures.panels` draws panels into a figure.

    panel = length_panel(table.select("nll"), styles_of(names), LengthAxis([64, 256], trained=[64]))
    save(panels([panel], FigureText("Loss by context length")), folder, "nll_by_length")
"""

from __future__ import annotations

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
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from evaluation.reports.figures import (
    COLOURS,
    DASHED,
    FAINT,
    GRID,
    INK,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Panel,
    fix_ticks,
    mark,
    panels,
    token_axis,
)
from evaluation.reports.text import plain, signed
from evaluation.results_table import ResultRow

TOKENS = "context length, tokens (log scale)"
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
        ink: the variant in black.
        rows: losses. Of more variants than there are colors the best at the longest length have
            colors, and the others are thin grey lines.
        marked: undertrained variants.
    """
    last = {row.variant: (-(row.length or 0), row.value) for row in rows if not row.seed}
    colored = [name for name in names if name != ink]
    if len(colored) > len(COLOURS):
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
        place: the x of a row.
        log: log2 or linear.
    """

    ticks: Sequence[float]
    trained: Sequence[float] = ()
    place: Callable[[ResultRow], float] = attrgetter("length")
    log: bool = True

    def apply(self, axes: Axes, name_marks: bool = False) -> None:
        low = min(*self.ticks, *self.trained)
        high = max(*self.ticks, *self.trained)
        ticks = list(self.ticks)
        while len(ticks) > 8:
            ticks = ticks[::-2][::-1]
        if self.log:
            token_axis(axes, ticks)
            axes.set_xlim(low / 2**0.25, high * 2**0.25)
        else:
            fix_ticks(axes, ticks)
            room = max(0.03 * (high - low), 1.0)
            axes.set_xlim(low - room, high + room)
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
        named: at the ends of lines; else by the label alone, for a key, on an axis from 0.
    """
    curves = curves_of(rows, styles, axis)
    heights = [at for _, at in levels]
    if top is None:
        top = _top_of_colored(curves, heights)
    limits = limits_of(curves, heights, band, top)
    if share or not named:
        limits = _limits_from_zero(curves, share, top)
    digits = 0 if share else 3 if band else decimals(*limits)
    number = (lambda value, _: f"{value:.0%}") if share else signed if band else plain
    longest = max((curve.end[0] for curve in curves), default=0.0)

    def with_value(curve: Curve) -> Curve:
        if not named or not curve.label:
            return curve
        x, value = curve.end
        label = f"{curve.label}  {number(value, digits)}"
        return replace(curve, label=label if x == longest else f"{label} at {x:,.0f}")

    def scales(axes: Axes) -> None:
        axis.apply(axes, name_marks=named and not heading)
        set_scale(axes, "y", limits, band)
        if not named:
            axes.tick_params(labelsize=8, length=2.5)
        if share or not named:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))

    note = linear_note(band)
    return Panel(
        [with_value(curve) for curve in curves],
        heading + note if heading else "",
        [(label.replace("{}", number(at, digits)), at, SOFT) for label, at in levels],
        y=y if heading else y + note,
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
        shown, styles, axis, heading=heading, levels=[("", 0.0)], band=band, height=1.7
    )
    return replace(panel, named=False)


def dots_panel(
    rows: Sequence[ResultRow],
    styles: Styles,
    *,
    heading: str = "",
    x: str = "",
    band: float | None = None,
    shared: Iterable[ResultRow] = (),
) -> Panel:
    """Values with intervals, one row each from top to bottom, hollow for a point estimate.

    Args:
        band: values are differences; ± it is shaded, and the scale is linear inside and logarithmic
            outside.
        shared: all rows of the panels that have a common scale.
    """
    curves = []
    for at, row in enumerate(rows):
        color, marker, _ = styles[row.variant]
        curve = Curve("", [row.value], [at], color, [row.low], [row.high], across=True)
        is_point = math.isnan(row.low)
        curves.append(replace(curve, marker=marker, size=5.5, hollow=is_point))
    values = [value for row in [*rows, *shared] for value in (row.value, row.low, row.high)]
    limits = padded([value for value in values if math.isfinite(value)], band)

    def scales(axes: Axes) -> None:
        set_scale(axes, "x", limits, band)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        names = [styles[row.variant].label(row.variant) for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
        axes.spines["left"].set_visible(False)
        if band:
            axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
        for at, (row, curve) in enumerate(zip(rows, curves, strict=True)):
            text = (signed if band else plain)(row.value, 3)
            place = ((1, at), (5, 0), ("axes fraction", "data"), "offset points")
            axes.annotate(text, *place, va="center", fontsize=8.5, color=curve.color)

    height = 0.215 * len(rows) + 0.55
    return Panel(curves, heading, x=x, scales=scales, named=False, height=height)


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
    names = {row.at: name(row) for row in rows}
    places = sorted(names)

    def draw(axes: Axes) -> None:
        for row in rows:
            _shade(axes, lengths.index(row.length), places.index(row.at), row)
        axes.grid(visible=False)
        axes.set(xlim=(0, len(lengths)), ylim=(0, len(places)))
        axes.set_xticks([n + 0.5 for n in range(len(lengths))], [f"{n:,}" for n in lengths])
        axes.set_yticks([n + 0.5 for n in range(len(places))], [names[at] for at in places])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if down:
            axes.invert_yaxis()

    height = 0.9 + 0.42 * max(3, len(places))
    return Panel(y=y, scales=draw, is_filled=bool(rows), height=height)


def _shade(axes: Axes, x: int, y: int, row: ResultRow) -> None:
    """One cell of a heat map."""
    red, green, blue, _ = shade = colormaps[SHADES](row.value)
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK
    axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=shade, ec="white", lw=1.2)
    ends = f"({100 * row.low:.0f}–{100 * row.high:.0f})"
    for text, up, size in ((f"{100 * row.value:.0f}", 4, 9.5), (ends, -7, 6.5)):
        axes.annotate(
            text,
            (x + 0.5, y + 0.5),
            xytext=(0, up),
            textcoords="offset points",
            fontsize=size,
            ha="center",
            va="center",
            color=ink,
        )


def linear_note(band: float | None) -> str:
    """For the label of an axis that is linear within ± `band` and logarithmic beyond."""
    return f" (linear within ±{band:g})" if band else ""


def decimals(low: float, high: float) -> int:
    """Decimals that resolve a twentieth of an axis from `low` to `high`."""
    return min(5, max(2, math.ceil(1.3 - math.log10(high - low))))


def _top_of_colored(curves: Sequence[Curve], levels: Sequence[float]) -> float | None:
    """A limit below grey lines that are far above all colored ones; None if there is none."""
    colored = [y for curve in curves if curve.color != FAINT for y in curve.y]
    values = [y for curve in curves for y in curve.y]
    if not colored:
        return None
    limit = max(colored) + 0.5 * (max(colored) - min(values))
    kept = [y for curve in curves if max(curve.y) <= limit for y in curve.y]
    return max([*kept, *levels]) if max(values) > limit else None


def limits_of(
    curves: Sequence[Curve], levels: Sequence[float], band: float | None, top: float | None
) -> tuple[float, float]:
    """Limits of the y axis, around the lines, bars and levels up to `top`."""
    values = list(levels)
    for curve in curves:
        values += [*curve.y, *curve.low, *curve.high]
    limit = math.inf if top is None else top
    return padded([min(value, limit) for value in values if math.isfinite(value)], band)


def padded(values: Sequence[float], band: float | None) -> tuple[float, float]:
    """The values with margins, and zero and the band if there is one."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if band:
        return 1.35 * min(low, -1.5 * band), 1.35 * max(high, 1.5 * band)
    room = max(high - low, 0.05)
    return low - 0.06 * room, high + 0.12 * room


def _limits_from_zero(
    curves: Sequence[Curve], share: bool, top: float | None
) -> tuple[float, float]:
    """From 0 where that does not hide the differences, and never beyond what a share can be."""
    if top is not None:
        return -0.03 * top, 1.03 * top
    values = [0.0, *(y for curve in curves for y in curve.y)]
    low = min(values)
    high = max(values)
    limit = high + 0.08 * max(high - low, 1e-3)
    return low, min(limit, 1.0) if share and high < 0.93 else limit


def set_scale(
    axes: Axes,
    which: str,
    limits: tuple[float, float],
    band: float | None,
) -> None:
    """Limits of the x or y axis; with `band`, a symlog scale that is linear within ± it, with round
    ticks and the band shaded."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale_of = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if band:
        set_scale_of("symlog", linthresh=band, linscale=0.6)
    set_limits(*limits)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    if not band:
        return
    shade = axes.axvspan if which == "x" else axes.axhspan
    shade(-band, band, color=BAND, alpha=0.13, lw=0, zorder=0.5)
    # Rounder ticks take precedence over those too close to them.
    round_numbers = [digit * 10.0**k for digit in (1, 3, 2, 5) for k in range(-4, 3)]
    sizes = [0.0, band, *(size for size in round_numbers if size > band), band / 2]
    place = axis.get_transform().transform
    low, high = limits
    gap = (0.1 if which == "x" else 0.08) * (place(high) - place(low))  # labels are wider than high
    ticks: list[float] = []
    for tick in [signed_tick for size in sizes for signed_tick in (size, -size)]:
        apart = all(abs(place(tick) - place(other)) >= gap for other in ticks)
        if apart and low <= tick <= high:
            ticks.append(tick)
    axis.set_major_locator(FixedLocator(sorted(ticks)))
    axis.set_minor_locator(NullLocator())
