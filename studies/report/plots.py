"""The plots of a study: line charts, small multiples, dot plots and heat maps of given numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from evaluation.reports.charts import (
    COLOURS,
    DASHED,
    GRID,
    INK,
    MARKERS,
    STYLE,
    Curve,
    FigureText,
    Panel,
    canvas,
    mark,
    panels_figure,
    token_axis,
)
from evaluation.reports.length_charts import (
    BAND,
    ReferenceLines,
    frame,
    limits_of,
    padded,
    set_scale,
)
from evaluation.reports.text import plain
from studies.report.document import signed

WIDTH = 6.0  # inches; on a phone 390 pixels wide, 8-point text is 7 pixels high
# COLOURS without its grey, then dark colors of Tol's muted set; markers differ as well.
PALETTE = (*COLOURS[:7], "#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
SHAPES = (*MARKERS, "p", "h", "d", "8")
OTHERS = "#C9C9C9"
SHADES = "cividis"  # uniform in lightness, suitable for all kinds of color vision
# height of an exposure strip and the gap above it, inches
STRIP = 0.17
STRIP_GAP = 0.03
FAINTEST = 4.0  # decades of exposure that the shades of a strip cover
# (tokens of context, share of the training)
Exposure = Sequence[tuple[Sequence[float], Sequence[float]]]


def styles_of(names: Sequence[str], baseline: str | None) -> dict[str, tuple[str, str]]:
    """Color and marker of each variant, the same in all figures: ink for the baseline."""
    rest = [name for name in names if name != baseline]
    found = {
        name: (PALETTE[n % len(PALETTE)], SHAPES[n % len(SHAPES)]) for n, name in enumerate(rest)
    }
    return found | ({baseline: (INK, "o")} if baseline is not None else {})


def informative(curves: Sequence[Curve], top: float | None = None) -> list[Curve]:
    """The curves without intervals wider than the range of all points (up to `top`), which would flatten the
    lines."""
    values = [min(v, top or math.inf) for one in curves for v in one.y if v == v]
    most = max(values, default=0.0) - min(values, default=0.0)
    kept = []
    for one in curves:
        ends = [
            (a, b) if b - a <= most else (math.nan,) * 2
            for a, b in zip(one.low, one.high, strict=True)
        ]
        kept.append(replace(one, low=[a for a, _ in ends], high=[b for _, b in ends]))
    return kept


def barred(curves: Sequence[Curve]) -> int:
    """The number of intervals drawn."""
    return sum(b > a for one in curves for a, b in zip(one.low, one.high, strict=True))


def small_multiples(
    panels: Sequence[Panel],
    marks: ReferenceLines,
    text: FigureText,
    y: str = "",
    strips: Sequence[Exposure] = (),
) -> Figure:
    """Small charts. With a label `y` all have one scale; without, each has its own, and there is a key.
    `strips`: exposure in training below each panel."""
    every = [one for panel in panels for one in panel.curves]

    def scales(axes: Axes, panel: Panel) -> None:
        curves = every if y else panel.curves
        frame(axes, curves, marks, limits_of(curves, marks), 4)
        mark(axes, marks.trained_length)
        axes.tick_params(labelsize=7.5, length=2.5)
        last = panel.curves[-1]
        heading: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "color": last.color}
        heading = heading if y else {"fontsize": 7.5}
        axes.set_title(panel.heading, loc="left", pad=3, **heading)
        if last.y[-1] > axes.get_ylim()[1]:
            how = {"ha": "right", "va": "bottom", "fontsize": 8, "color": last.color}
            axes.annotate(
                f"{plain(float(last.y[-1]), 2)} ↑",
                (1, 1),
                (0, 3),
                "axes fraction",
                "offset points",
                **how,
            )

    columns = min(3, len(panels))
    height = 1.85 + (STRIP + STRIP_GAP if any(strips) else 0)
    figure = panels_figure(
        panels,
        text,
        scales,
        x="context length, tokens",
        y=y,
        columns=columns,
        height=height,
        names="below",
        width=WIDTH,
    )
    with rc_context(STYLE):
        for n, axes in enumerate(list(figure.axes)):
            axes.tick_params(labelleft=not (y and n % columns))
            axes.xaxis.label.set_fontsize(8)
            axes.yaxis.label.set_fontsize(8)
            if any(strips):
                _strip(figure, axes, strips[n])
    return figure


def _strip(figure: Figure, axes: Axes, exposure: Exposure) -> None:
    """Below a panel, the exposure in training of positions (upper row) and distances (lower row): darker is
    more, empty is none. Shades are transparent, so that they adapt to a dark page."""
    place = axes.get_position()
    inch = 1 / figure.get_figheight()
    up = (STRIP + STRIP_GAP) * inch
    axes.set_position((place.x0, place.y0 + up, place.width, place.height - up))
    strip = figure.add_axes(
        (place.x0, place.y0, place.width, STRIP * inch), label=f"strip {axes.get_label()}"
    )
    low, high = axes.get_xlim()
    token_axis(strip, list(axes.get_xticks()))
    strip.set(xlim=(low, high), ylim=(0, 2))
    for row, (context, share) in enumerate(reversed(exposure)):
        # Bins meet at geometric means; the first one begins, and the last one ends, at its own center.
        middles = np.sqrt(np.multiply(context[1:], context[:-1]))
        edges = np.clip([context[0], *middles, context[-1]], low, high)
        bins = [
            (x, right - x, value)
            for x, right, value in zip(edges[:-1], edges[1:], share, strict=True)
        ]
        spans = [(x, width, value) for x, width, value in bins if value > 0 and width > 0]
        colors = [
            (INK, min(1.0, max(0.12, 1 + math.log10(value) / FAINTEST))) for *_, value in spans
        ]
        strip.broken_barh([one[:2] for one in spans], (row + 0.1, 0.8), facecolors=colors, lw=0)
    strip.yaxis.set_major_locator(NullLocator())
    strip.tick_params(labelsize=7.5, length=2.5)
    strip.spines[["top", "right", "left"]].set_visible(False)
    strip.set_xlabel(axes.get_xlabel(), fontsize=8, color=INK)
    axes.set_xlabel("")
    axes.tick_params(axis="x", labelbottom=False, length=0)


@dataclass(frozen=True)
class DotEstimate:
    """One row of a dot plot; the ends are NaN for a point estimate. `each`: the values of single seeds."""

    label: str
    value: float
    low: float
    high: float
    color: str = INK
    marker: str = "o"
    each: Sequence[float] = ()


def dots_figure(
    panels: Sequence[tuple[str, Sequence[DotEstimate]]],
    text: FigureText,
    x: str,
    band: float | None = None,
) -> Figure:
    """Points with intervals, one row each; panels (heading, rows) from top to bottom, on one scale. `band`:
    values are differences; ± it is shaded, and the scale is linear inside and logarithmic outside."""
    with rc_context(STYLE):
        heights = [0.215 * len(dots) + 0.36 for _, dots in panels]
        figure, (_, top) = canvas(text, sum(heights) + 0.45, WIDTH)
        inch = 1 / figure.get_figheight()
        longest = max((len(dot.label) for _, dots in panels for dot in dots), default=4)
        left = (0.25 + 0.075 * longest) / WIDTH
        right = 1 - 0.62 / WIDTH
        values = [
            v
            for _, dots in panels
            for d in dots
            for v in (d.value, d.low, d.high, *d.each)
            if v == v
        ]
        number = signed if band else plain
        for n, ((heading, dots), tall) in enumerate(zip(panels, heights, strict=True)):
            axes = figure.add_axes(
                (left, top - (tall - 0.12) * inch, right - left, (tall - 0.36) * inch), label=str(n)
            )
            top -= tall * inch
            set_scale(axes, "x", padded(values, band), band)
            axes.set_ylim(len(dots) - 0.5, -0.5)
            axes.set_yticks(range(len(dots)), [dot.label for dot in dots], fontsize=9)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "left"]].set_visible(False)
            if band:
                axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
                axes.axvspan(-band, band, color=BAND, alpha=0.13, lw=0, zorder=0.5)
            for at, dot in enumerate(dots):
                _draw_dot(axes, at, dot)
                spot = (1, at), (5, 0), ("axes fraction", "data"), "offset points"
                axes.annotate(
                    number(dot.value, 3), *spot, va="center", fontsize=8.5, color=dot.color
                )
            axes.set_title(heading, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=4)
            axes.tick_params(labelbottom=n == len(panels) - 1)
            axes.set_xlabel(x if n == len(panels) - 1 else "", color=INK)
        return figure


def _draw_dot(axes: Axes, at: int, dot: DotEstimate) -> None:
    """Strokes for single seeds, a bar for the interval, a hollow marker for a point estimate."""
    strokes = {"ls": "", "marker": "|", "ms": 11, "mew": 1.3, "color": dot.color, "zorder": 3}
    axes.plot(dot.each, [at] * len(dot.each), **strokes)
    claim = dot.low == dot.low
    if claim:
        bar = {"lw": 1.8, "solid_capstyle": "butt", "color": dot.color, "zorder": 3}
        axes.plot([dot.low, dot.high], [at, at], **bar)
    inside, around = (dot.color, "white") if claim or len(dot.each) > 1 else ("white", dot.color)
    axes.plot(dot.value, at, marker=dot.marker, ms=5.5, mfc=inside, mec=around, ls="", zorder=4)


def heat_figure(
    maps: Sequence[tuple[str, str, dict[tuple[float, int], float]]], text: FigureText
) -> Figure:
    """One depth × length heat map per (label, color, (depth, length) -> share), with numbers."""
    lengths = sorted({length for _, _, cells in maps for _, length in cells})
    depths = sorted({depth for _, _, cells in maps for depth, _ in cells})
    with rc_context(STYLE):
        columns = min(len(maps), max(1, int((WIDTH - 0.6) / max(1.6, 0.36 * len(lengths)))))
        rows = math.ceil(len(maps) / columns)
        cell = 0.2
        shades = colormaps[SHADES]
        tall = cell * len(depths) + 0.62
        wide = (WIDTH - 0.62) / columns
        figure, (bottom, top) = canvas(text, rows * tall, WIDTH)
        inch = 1 / figure.get_figheight()
        for n, (label, color, cells) in enumerate(maps):
            row, column = divmod(n, columns)
            under = top - (row * tall + cell * len(depths) + 0.12) * inch
            area = (
                (0.55 + column * wide) / WIDTH,
                under,
                (wide - 0.16) / WIDTH,
                cell * len(depths) * inch,
            )
            axes = figure.add_axes(area, label=str(n))
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.set_ylim(len(depths) - 0.5, -0.5)
            for (depth, length), share in cells.items():
                x = lengths.index(length)
                y = depths.index(depth)
                look = {"facecolor": shades(share), "edgecolor": "white", "lw": 0.6}
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
                # like the cells, the same on a dark page
                ink = "#fefefe" if share < 0.55 else "#111111"
                axes.text(
                    x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink
                )
            axes.set_title(label, loc="left", fontsize=9, color=color, fontweight="bold", pad=3)
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
            shown = [f"{depth:.2g}" for depth in depths] if column == 0 else [""] * len(depths)
            axes.set_yticks(range(len(depths)), shown, fontsize=7)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        how = {"rotation": 90, "va": "center", "fontsize": 8.5, "color": INK}
        figure.text(0.02, (bottom + top) / 2, "depth of the answer", **how)
        return figure
