"""Charts of rows of results (`ResultRow`, or anything with its attributes): each function makes a
panel, and `figures.panels` draws panels into a figure.

    panel = length_panel(table.select("nll"), styles_of(names), LengthAxis([64, 256], trained=[64]))
    save(panels([panel], FigureText("Loss by context length")), folder, "nll_by_length")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
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
    Panel,
    fix_ticks,
    mark,
    token_axis,
)
from evaluation.reports.results_table import ResultRow
from evaluation.reports.text import plain, signed

TOKENS = "context length, tokens (log scale)"
BAND = "#999999"
SHADES = "cividis"  # even in lightness, and the same to every kind of color vision


class LineStyle(NamedTuple):
    """`marked`: the variant is undertrained; its markers are outlines and its label has a †."""

    color: str
    marker: str
    marked: bool = False

    @property
    def is_faint(self) -> bool:
        return self.color == FAINT


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
        ticks: of which at most eight are shown.
        trained: trained lengths, marked by dotted lines.
        place: the x of a row.
        log: log2 or linear.
    """

    ticks: Sequence[float]
    trained: Sequence[float] = ()
    place: Callable[[ResultRow], float] = attrgetter("length")
    log: bool = True

    def apply(self, axes: Axes, name_marks: bool) -> None:
        points = [float(x) for line in axes.lines for x in line.get_xdata()]
        points = [x for x in points if math.isfinite(x)] if not self.ticks else []
        ends = [*points, *self.ticks, *self.trained]
        low = min(ends)
        high = max(ends)
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
    ceiling: float | None = None,
    log_y: bool = False,
    from_zero: bool = False,
    dash: str | tuple = "-",
    named: bool = True,
    height: float = 3.2,
) -> Panel:
    """A line for each variant, named with its last value; rows of single seeds are thin lines.

    Args:
        levels: horizontal lines (label, y); `{}` in a label is replaced by the value.
        band: ± this is shaded; the scale is linear inside and logarithmic outside.
        top: upper limit of the axis; lines may leave it.
        share: values from 0 to 1, in per cent.
        ceiling: largest possible value; the axis ends there.
        from_zero: the axis begins at 0.
        named: at the ends of lines; else by the label alone, for a key.
    """
    by_line: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        if math.isfinite(row.value):
            by_line.setdefault((row.variant, row.seed), []).append(row)
    curves = []
    for (variant, seed), own in by_line.items():
        style = styles[variant]
        curve = Curve(
            "" if seed else variant + (" †" if style.marked else ""),
            x=[float(axis.place(row)) for row in own],
            y=[row.value for row in own],
            color=style.color,
            low=() if seed else [row.low for row in own],
            high=() if seed else [row.high for row in own],
            width=0.6 if seed else 0.8 if style.is_faint else 1.6,
            dash="-" if seed else dash,
            marker="" if seed else style.marker or "o" * (len(own) == 1),
            size=3.5 if style.is_faint else 4.6,
            hollow=style.marked,
            order=2.5 if seed or style.is_faint else 4,
        )
        curves.append(curve)
    if top is None:
        top = _top_of_colored(curves, [at for _, at in levels])
    if log_y:
        limits = _log_limits(curves)
    elif share or from_zero:
        limits = _limits_from_zero(curves, share, ceiling)
    else:
        limits = limits_of(curves, [at for _, at in levels], band, top)
    digits = 0 if share else 3 if band else decimals(*limits)
    number = (lambda value, _: f"{value:.0%}") if share else signed if band else plain
    longest = max((curve.end[0] for curve in curves), default=0.0)

    def named_curve(curve: Curve) -> Curve:
        if not named or not curve.label:
            return curve
        x, value = curve.end
        label = f"{curve.label}  {number(value, digits)}"
        return replace(curve, label=label if x == longest else f"{label} at {x:,.0f}")

    def scales(axes: Axes) -> None:
        axis.apply(axes, name_marks=named and not heading)
        if log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.set_ylim(*limits)
        elif share or from_zero:
            axes.yaxis.set_major_locator(MaxNLocator(4))
            if share:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.set_ylim(*limits)
        else:
            set_scale(axes, "y", limits, band)
        if not named:
            axes.tick_params(labelsize=8, length=2.5)

    note = linear_note(band)
    return Panel(
        [named_curve(curve) for curve in curves],
        heading + note if heading else "",
        [(label.replace("{}", number(at, digits)), at, SOFT) for label, at in levels],
        y=y if heading else y + note,
        scales=scales,
        named=named,
        height=height,
    )


def difference_panel(
    rows: Iterable[ResultRow],
    styles: Styles,
    axis: LengthAxis,
    heading: str,
    band: float,
) -> Panel:
    """Differences with their intervals below a panel that names the lines; ± `band` is shaded.
    Without the variants that are grey."""
    shown = [row for row in rows if not styles[row.variant].is_faint]
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
        style = styles.get(row.variant) or LineStyle(INK, "o")
        curves.append(
            Curve(
                "",
                [row.value],
                [at],
                style.color,
                low=[row.low],
                high=[row.high],
                across=True,
                marker=style.marker,
                size=5.5,
                hollow=math.isnan(row.low),
            )
        )
    values = [value for row in [*rows, *shared] for value in (row.value, row.low, row.high)]
    limits = padded([value for value in values if math.isfinite(value)], band)

    def scales(axes: Axes) -> None:
        set_scale(axes, "x", limits, band)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        names = [f"{row.variant} †" if curve_marked(row) else row.variant for row in rows]
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

    def curve_marked(row: ResultRow) -> bool:
        style = styles.get(row.variant)
        return style is not None and style.marked

    height = 0.215 * len(rows) + 0.55
    return Panel(curves, heading, x=x, scales=scales, named=False, height=height)


@dataclass(frozen=True)
class HeatMap(Panel):
    """Shaded cells with a share and its interval: `columns` and `rows` are the names of the places,
    `cells` (column, row, row of results)."""

    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    cells: Sequence[tuple[int, int, ResultRow]] = ()
    down: bool = False  # the first row is the upper one

    @property
    def is_empty(self) -> bool:
        return not self.cells

    def draw(self, axes: Axes) -> list[Line2D]:
        for x, y, row in self.cells:
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
        axes.set(xlim=(0, len(self.columns)), ylim=(0, len(self.rows)))
        axes.set_xticks([n + 0.5 for n in range(len(self.columns))], self.columns)
        axes.set_yticks([n + 0.5 for n in range(len(self.rows))], self.rows)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if self.down:
            axes.invert_yaxis()
        return []


def heat_map(
    rows: Sequence[ResultRow],
    *,
    lengths: Sequence[int],
    name: Callable[[ResultRow], str],
    y: str,
    down: bool = False,
) -> HeatMap:
    """Shares by length and by place (`at`), which `name` names."""
    names = {row.at: name(row) for row in rows}
    places = sorted(names)
    return HeatMap(
        x="length, input tokens",
        y=y,
        columns=[f"{length:,}" for length in lengths],
        rows=[names[place] for place in places],
        cells=[(lengths.index(row.length), places.index(row.at), row) for row in rows],
        down=down,
        height=0.9 + 0.42 * max(3, len(places)),
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
    curves: Sequence[Curve], share: bool, ceiling: float | None
) -> tuple[float, float]:
    """From 0 where that does not hide the differences, and never beyond what a share can be."""
    if ceiling is not None:
        return -0.03 * ceiling, 1.03 * ceiling
    values = [0.0, *(y for curve in curves for y in curve.y)]
    low = min(values)
    high = max(values)
    top = high + 0.08 * max(high - low, 1e-3)
    return low, min(top, 1.0) if share and high < 0.93 else top


def _log_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    values = [y for curve in curves for y in curve.y] or [1.0]
    return min(values) / 1.2, max(values) * 1.2


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
