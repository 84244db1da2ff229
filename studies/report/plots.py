"""The plots of a study: line charts, small multiples, dot plots and heat maps of given numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evaluation.reports.figures import (
    COLOURS,
    INK,
    LABEL_GAP,
    MARKERS,
    SOFT,
    STYLE,
    decimals,
    fit_left,
    label_ends,
)
from studies.report.document import plain, signed

WIDTH = 6.0  # inches; on a phone 390 pixels wide, 8-point text is 7 pixels high
# COLOURS without its grey, then dark colours of Tol's muted set; markers differ as well.
PALETTE = (*COLOURS[:7], "#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
SHAPES = (*MARKERS, "p", "h", "d", "8")
OTHERS = "#C9C9C9"
SHADES = "cividis"  # uniform in lightness, suitable for all kinds of colour vision
DASHED, DOTTED = (0, (5, 3)), (0, (1, 2))
LEFT, HEAD, FOOT = 0.72, 0.64, 0.88  # inches left of, above and below the axes
PANEL = 1.45  # height of a small panel, inches
STRIP = 0.17  # height of the exposure strip below it, inches
FAINTEST = 4.0  # decades of exposure that the shades of a strip cover
TOKENS = "context length, tokens (log scale)"


@dataclass(frozen=True)
class SeedSeries:
    """One line with its intervals.

    `low`, `high`: ends at each x, or NaN. `own`: its truncation baseline. `each`: y of every seed at each x.
    `shown`: exposure in training, (tokens of context, share) of positions and of distances.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = INK
    marker: str = "o"
    own: float | None = None
    each: Sequence[Sequence[float]] = ()
    shown: Sequence[tuple[Sequence[float], Sequence[float]]] = ()


def styles_of(names: Sequence[str], baseline: str | None) -> dict[str, tuple[str, str]]:
    """Colour and marker of each variant, the same in all figures: ink for the baseline."""
    rest = [name for name in names if name != baseline]
    found = {name: (PALETTE[n % len(PALETTE)], SHAPES[n % len(SHAPES)]) for n, name in enumerate(rest)}
    return found | ({baseline: (INK, "o")} if baseline is not None else {})


def informative(series: Sequence[SeedSeries], top: float | None = None) -> list[SeedSeries]:
    """The series without intervals wider than the range of all points (up to `top`), which would flatten the
    lines."""
    values = [min(v, top or math.inf) for one in series for v in one.y if v == v]
    most = max(values, default=0.0) - min(values, default=0.0)
    kept = []
    for one in series:
        ends = [(a, b) if b - a <= most else (math.nan,) * 2 for a, b in zip(one.low, one.high, strict=True)]
        kept.append(replace(one, low=[a for a, _ in ends], high=[b for _, b in ends]))
    return kept


def barred(series: Sequence[SeedSeries]) -> int:
    """The number of intervals drawn."""
    return sum(b > a for one in series for a, b in zip(one.low, one.high, strict=True))


@dataclass(frozen=True)
class ReferenceLines:
    """Everything in the axes besides the series: training length, level lines (label, y), tolerance band."""

    trained_length: int
    levels: Sequence[tuple[str, float]] = ()
    band: float | None = None  # ± this is shaded; the scale is linear inside and logarithmic outside
    top: float | None = None  # upper limit of the axis; the label of a clipped line has its value
    ceiling: float | None = None  # largest possible value; the axis ends there
    ticks: Sequence[float] = ()  # of the x axis; default: the points of the lines


def joint_figure(
    series: Sequence[SeedSeries],
    marks: ReferenceLines,
    title: str,
    subtitle: str,
    y: str,
    note: str,
    x: str = TOKENS,
) -> Figure:
    """All series in one chart, labelled at their ends."""
    with rc_context(STYLE):
        labels = len(series) + len(marks.levels)
        height = max(4.3, HEAD + FOOT + 1.35 * (labels + 1) * LABEL_GAP / 72)
        figure = sheet(height, title, subtitle, note)
        axes = figure.add_axes((0, 0, 1, 1))
        _frame(axes, series, marks)
        for one in series:
            _draw(axes, one)
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        edge, top = axes.get_xlim()[1], axes.get_ylim()[1]
        number = signed if marks.band else plain
        digits = 3 if marks.band else 0 if marks.ceiling else decimals(*axes.get_ylim())
        longest = max((one.x[-1] for one in series if one.x), default=0.0)
        ends = []
        for one in (one for one in series if one.y):
            label = f"{one.label}  {number(one.y[-1], digits)}"
            label += " ↑" if one.y[-1] > top else f" at {one.x[-1]:,.0f}" if one.x[-1] < longest else ""
            ends.append((label, one.x[-1], one.y[-1], one.colour))
        ends += [(label, edge, at, SOFT) for label, at in marks.levels]
        right = 0.3 + 0.072 * max(len(text) for text, *_ in ends)
        place(axes, height, (LEFT, FOOT, WIDTH - LEFT - right, height - HEAD - FOOT))
        fit_left(figure, axes)
        label_ends(figure, axes, ends)
        return figure


@dataclass(frozen=True)
class SeriesPanel:
    """Lines of one small chart; its heading has the colour of its only line."""

    heading: str
    series: Sequence[SeedSeries]
    others: Sequence[SeedSeries] = ()  # in grey


def panels_figure(
    panels: Sequence[SeriesPanel], marks: ReferenceLines, title: str, subtitle: str, note: str, y: str = ""
) -> Figure:
    """Small charts. With a label `y` all have one scale; without, each has its own, and there is a legend."""
    every = [one for panel in panels for one in panel.series]
    with rc_context(STYLE):
        columns = min(3, len(panels))
        rows = math.ceil(len(panels) / columns)
        strips = any(one.shown for one in every)
        step = PANEL + (0.34 if y else 0.48) + (STRIP + 0.03 if strips else 0)
        legend = [] if y else list({one.label: one for one in every}.values())
        foot = FOOT if y else 0.5 + 0.2 * math.ceil(len(legend) / 4)
        left, gap = (LEFT, 0.14) if y else (0.52, 0.45)
        height = HEAD + foot + rows * step
        figure = sheet(height, title, subtitle, note)
        wide = (WIDTH - left - (0.12 if y else 0.13 - gap)) / columns
        for n, panel in enumerate(panels):
            row, column = divmod(n, columns)
            bottom = height - HEAD - row * step - PANEL - 0.22
            axes = figure.add_axes((0, 0, 1, 1))
            place(axes, height, (left + column * wide, bottom, wide - gap, PANEL))
            _frame(axes, every if y else panel.series, marks, small=True)
            for other in panel.others:
                axes.plot(other.x, other.y, color=OTHERS, lw=0.8, zorder=1.5)
            for one in panel.series:
                if one.own is not None:
                    axes.axhline(one.own, color=SOFT, lw=1.0, ls=DASHED, zorder=2)
                _draw(axes, one)
            colour, weight = (panel.series[0].colour, "bold") if y else (INK, "normal")
            heading = {"fontsize": 9 if y else 8, "color": colour, "fontweight": weight}
            axes.set_title(panel.heading, loc="left", pad=3, **heading)
            if y:
                _share_scale(figure, axes, panel.series[0], height, strips, column, n + columns < len(panels))
        if y:
            middle = (height - HEAD - rows * step / 2) / height
            figure.text(0.02, middle, y, rotation=90, va="center", fontsize=9, color=INK)
            centre = (left + (WIDTH - left) / 2) / WIDTH
            figure.text(centre, (foot - 0.36) / height, TOKENS, ha="center", fontsize=9, color=INK)
        else:
            handles = [
                Line2D([], [], color=one.colour, marker=one.marker, lw=1.3, ms=4, label=one.label)
                for one in legend
            ]
            figure.legend(
                handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.26 / height), ncols=4, fontsize=8,
                frameon=False, handlelength=1.6, columnspacing=1.4, labelcolor=[one.colour for one in legend],
            )  # fmt: skip
        return figure


def _share_scale(
    figure: Figure, axes: Axes, one: SeedSeries, height: float, strips: bool, column: int, above: bool
) -> None:
    """Tick labels at the edges only, the value of a line above the axis, and the exposure strip."""
    if strips:
        _strip(figure, axes, one, height)
    top = axes.get_ylim()[1]
    if one.y and one.y[-1] > top:
        axes.annotate(
            f"{plain(one.y[-1], 2)} ↑", (1, 1), (0, 3), "axes fraction", "offset points",
            ha="right", va="bottom", fontsize=8, color=one.colour,
        )  # fmt: skip
    if column:
        axes.tick_params(labelleft=False)
    if above:
        for under in figure.axes[-2 if strips else -1 :]:
            under.tick_params(labelbottom=False)


def _strip(figure: Figure, axes: Axes, one: SeedSeries, height: float) -> None:
    """Below a panel, the exposure in training of positions (upper row) and distances (lower row): darker is
    more, empty is none. Shades are transparent, so that they adapt to a dark page."""
    place = axes.get_position()
    strip = figure.add_axes((place.x0, place.y0 - (STRIP + 0.03) / height, place.width, STRIP / height))
    strip.set_xscale("log", base=2)
    strip.set_xlim(*axes.get_xlim())
    strip.set_ylim(0, 2)
    low, high = axes.get_xlim()
    for row, (context, share) in enumerate(reversed(one.shown)):
        edges = [math.sqrt(a * b) for a, b in pairwise(context)]
        # The first bin begins, and the last one ends, at its own centre.
        for left, right, value in zip([context[0], *edges], [*edges, context[-1]], share, strict=True):
            if value > 0 and right > low and left < high:
                shade = min(1.0, max(0.12, 1 + math.log10(value) / FAINTEST))
                span = (max(left, low), min(right, high) - max(left, low))
                strip.broken_barh([span], (row + 0.1, 0.8), facecolors=INK, alpha=shade, lw=0)
    strip.yaxis.set_major_locator(NullLocator())
    _token_ticks(strip, list(axes.get_xticks()))
    strip.tick_params(labelsize=7.5, length=2.5)
    strip.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="x", labelbottom=False, length=0)


@dataclass(frozen=True)
class DotEstimate:
    """One row of a dot plot; the ends are NaN for a point estimate. `each`: the values of single seeds."""

    label: str
    value: float
    low: float
    high: float
    colour: str = INK
    marker: str = "o"
    each: Sequence[float] = ()


def dots_figure(
    panels: Sequence[tuple[str, Sequence[DotEstimate]]],
    title: str,
    subtitle: str,
    x: str,
    note: str,
    band: float | None = None,
) -> Figure:
    """Points with intervals, one row each; panels (heading, rows) from top to bottom, on one scale. `band`:
    values are differences; ± it is shaded, and the scale is linear inside and logarithmic outside."""
    with rc_context(STYLE):
        heights = [0.215 * len(dots) + 0.36 for _, dots in panels]
        height = HEAD + FOOT + sum(heights) - 0.1
        figure = sheet(height, title, subtitle, note)
        longest = max((len(dot.label) for _, dots in panels for dot in dots), default=4)
        left, right = 0.25 + 0.075 * longest, 0.62
        values = [v for _, dots in panels for d in dots for v in (d.value, d.low, d.high, *d.each) if v == v]
        top, number = height - HEAD, signed if band else plain
        for n, ((heading, dots), tall) in enumerate(zip(panels, heights, strict=True)):
            axes = figure.add_axes((0, 0, 1, 1))
            place(axes, height, (left, top - tall + 0.12, WIDTH - left - right, tall - 0.36))
            top -= tall
            _scale(axes, "x", [*values, 0.0] if band else values, band)
            axes.set_ylim(len(dots) - 0.5, -0.5)
            axes.yaxis.set_major_locator(FixedLocator(list(range(len(dots)))))
            axes.set_yticklabels([dot.label for dot in dots], fontsize=9)
            axes.tick_params(axis="y", length=0)
            clean(axes, "x", ("top", "right", "left"))
            if band:
                axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
                axes.axvspan(-band, band, color="#999999", alpha=0.13, lw=0, zorder=0.5)
            for at, dot in enumerate(dots):
                claim = dot.low == dot.low
                strokes = {"ls": "", "marker": "|", "ms": 11, "mew": 1.3, "color": dot.colour, "zorder": 3}
                axes.plot(dot.each, [at] * len(dot.each), **strokes)
                if claim:
                    bar = {"lw": 1.8, "solid_capstyle": "butt", "color": dot.colour, "zorder": 3}
                    axes.plot([dot.low, dot.high], [at, at], **bar)
                solid = claim or len(dot.each) > 1
                inside, around = (dot.colour, "white") if solid else ("white", dot.colour)
                axes.plot(dot.value, at, marker=dot.marker, ms=5.5, mfc=inside, mec=around, ls="", zorder=4)
                axes.annotate(
                    number(dot.value, 3), (1, at), (5, 0), ("axes fraction", "data"),
                    "offset points", va="center", fontsize=8.5, color=dot.colour,
                )  # fmt: skip
            axes.set_title(heading, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=4)
            if n < len(panels) - 1:
                axes.tick_params(labelbottom=False)
            else:
                axes.set_xlabel(x, color=INK)
        return figure


def heat_figure(
    maps: Sequence[tuple[str, str, dict[tuple[float, int], float]]], title: str, subtitle: str, note: str
) -> Figure:
    """One depth × length heat map per (label, colour, (depth, length) -> share), with numbers."""
    lengths = sorted({length for _, _, cells in maps for _, length in cells})
    depths = sorted({depth for _, _, cells in maps for depth, _ in cells})
    with rc_context(STYLE):
        columns = min(len(maps), max(1, int((WIDTH - 0.6) / max(1.6, 0.36 * len(lengths)))))
        rows, cell, shades = math.ceil(len(maps) / columns), 0.2, colormaps[SHADES]
        tall = cell * len(depths) + 0.62
        height = HEAD + rows * tall + 0.25
        figure = sheet(height, title, subtitle, note)
        wide = (WIDTH - 0.62) / columns
        for n, (label, colour, cells) in enumerate(maps):
            row, column = divmod(n, columns)
            bottom = height - HEAD - row * tall - cell * len(depths) - 0.12
            axes = figure.add_axes((0, 0, 1, 1))
            place(axes, height, (0.55 + column * wide, bottom, wide - 0.16, cell * len(depths)))
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.set_ylim(len(depths) - 0.5, -0.5)
            for (depth, length), share in cells.items():
                x, y = lengths.index(length), depths.index(depth)
                look = {"facecolor": shades(share), "edgecolor": "white", "lw": 0.6}
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
                ink = "#fefefe" if share < 0.55 else "#111111"  # like the cells, the same on a dark page
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
            axes.set_title(label, loc="left", fontsize=9, color=colour, fontweight="bold", pad=3)
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
            shown = [f"{depth:.2g}" for depth in depths] if column == 0 else [""] * len(depths)
            axes.set_yticks(range(len(depths)), shown, fontsize=7)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        middle = (height - HEAD - rows * tall / 2) / height
        figure.text(0.02, middle, "depth of the answer", rotation=90, va="center", fontsize=8.5, color=INK)
        return figure


def sheet(height: float, title: str, subtitle: str, note: str) -> Figure:
    """A figure with a title, a subtitle and a note at the bottom."""
    figure = Figure(figsize=(WIDTH, height), dpi=200)
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.1 / height, title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.34 / height, subtitle, fontsize=8.5, color=SOFT, va="top")
    figure.text(0.02, 0.08 / height, note, fontsize=8, color=SOFT, va="bottom")
    return figure


def place(axes: Axes, height: float, inches: tuple[float, float, float, float]) -> None:
    """Move axes to (left, bottom, width, height) in inches of a figure of that height."""
    left, bottom, wide, tall = inches
    axes.set_position((left / WIDTH, bottom / height, wide / WIDTH, tall / height))


def clean(axes: Axes, grid: Literal["x", "y"], hidden: Sequence[str]) -> None:
    """Draw a light grid below the data and hide the given spines."""
    axes.grid(axis=grid, color="#E6E6E6", lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[list(hidden)].set_visible(False)


def _token_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _frame(axes: Axes, series: Sequence[SeedSeries], marks: ReferenceLines, small: bool = False) -> None:
    """Scales, limits, grid, the training length and the level lines."""
    xs = sorted({x for one in series for x in one.x} | {float(marks.trained_length)})
    axes.set_xscale("log", base=2)
    axes.set_xlim(xs[0] / 2**0.25, xs[-1] * 2**0.25)
    ticks = list(marks.ticks) or xs
    while len(ticks) > (4 if small else 8):
        ticks = ticks[::-2][::-1]
    _token_ticks(axes, ticks)
    values = [at for _, at in marks.levels]
    for one in series:
        values += [v for y in (one.y, one.low, one.high, *one.each) for v in y if v == v]
    if marks.top is not None:
        values = [min(v, marks.top) for v in values]
    _scale(axes, "y", values, marks.band)
    if marks.ceiling is not None:
        axes.set_ylim(-0.02 * marks.ceiling, 1.04 * marks.ceiling)
    clean(axes, "y", ("top", "right"))
    if small:
        axes.tick_params(labelsize=7.5, length=2.5)
    axes.axvline(marks.trained_length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    if not small:
        axes.annotate(
            f"training length {marks.trained_length:,}", (marks.trained_length, 1), (4, -3),
            ("data", "axes fraction"), "offset points", va="top", color=SOFT, fontsize=8.5,
        )  # fmt: skip
        for _, at in marks.levels:
            axes.axhline(at, color=SOFT, lw=1.0, ls=DASHED, zorder=2)
    if marks.band:
        axes.axhspan(-marks.band, marks.band, color="#999999", alpha=0.13, lw=0, zorder=0.5)


def _scale(axes: Axes, which: str, values: Sequence[float], linear: float | None) -> None:
    """Limits with margins; with `linear`, a symlog scale that is linear within ± it, with round ticks."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    if linear is None:
        room = max(high - low, 0.05)
        set_limits(low - 0.06 * room, high + 0.12 * room)
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=linear, linscale=0.6)
    low, high = min(low, -1.5 * linear), max(high, 1.5 * linear)
    set_limits(1.35 * low, 1.35 * high)
    # Rounder ticks take precedence over those too close to them.
    sizes = [0.0, linear, *(s * 10.0**k for s in (1, 3, 2, 5) for k in range(-4, 3) if s * 10.0**k > linear)]
    place, ticks = axis.get_transform().transform, []
    gap = 0.08 * (place(1.35 * high) - place(1.35 * low))
    for tick in (sign * size for size in [*sizes, linear / 2] for sign in (1, -1)):
        if 1.35 * low <= tick <= 1.35 * high and all(abs(place(tick) - place(one)) >= gap for one in ticks):
            ticks.append(tick)
    axis.set_major_locator(FixedLocator(sorted(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))


def _draw(axes: Axes, one: SeedSeries) -> None:
    for y in one.each if len(one.each) > 1 else ():
        axes.plot(one.x, y, color=one.colour, lw=0.7, alpha=0.5, zorder=2.5)
    strokes = {"lw": 1.6, "ms": 4.4, "mec": "white", "mew": 0.6, "zorder": 4}
    axes.plot(one.x, one.y, color=one.colour, marker=one.marker, **strokes)
    for x, low, high in ((x, a, b) for x, a, b in zip(one.x, one.low, one.high, strict=False) if b > a):
        axes.plot([x, x], [low, high], color=one.colour, lw=1.1, alpha=0.75, marker="_", ms=4.5, zorder=3)
