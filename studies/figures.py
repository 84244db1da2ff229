"""Figures of a study in the house style: numbers in, a figure out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evaluation.figures import COLOURS, INK, LABEL_GAP, MARKERS, SOFT, STYLE, label_ends

WIDTH = 6.4  # inches
# The eight of the house without its grey, then dark ones of Tol's muted set; the markers differ as well.
PALETTE = (*COLOURS[:7], "#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
SHAPES = (*MARKERS, "p", "h", "d", "8")
OTHERS = "#C9C9C9"
DASHED, DOTTED = (0, (5, 3)), (0, (1, 2))
LEFT, HEAD, FOOT = 0.72, 0.64, 0.78  # inches left of, above and below the axes
PANEL = 1.45  # inches of a small axes' height
STRIP = 0.17  # inches of what training has shown, below it
FAINTEST = 4.0  # decades of a share below which a strip is as light as it gets


@dataclass(frozen=True)
class Series:
    """One line with its intervals, in a colour and a marker that are its own in every figure.

    `low`, `high`: ends at each x, NaN where there is none. `own`: its own truncation baseline.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = INK
    marker: str = "o"
    own: float | None = None
    shown: Sequence[tuple[Sequence[float], Sequence[float]]] = ()  # of training: (tokens of context, share)


def look(names: Sequence[str], baseline: str | None) -> dict[str, tuple[str, str]]:
    """Colour and marker of each: ink for the baseline, the palette in order for the others."""
    rest = [name for name in names if name != baseline]
    found = {name: (PALETTE[n % len(PALETTE)], SHAPES[n % len(SHAPES)]) for n, name in enumerate(rest)}
    return found | ({baseline: (INK, "o")} if baseline is not None else {})


@dataclass(frozen=True)
class Marks:
    """What is drawn beside the lines: the trained length, level lines (label, y), a band of indifference."""

    trained_length: int
    levels: Sequence[tuple[str, float]] = ()
    band: float | None = None
    linear: float | None = None  # the axis is linear within ± this and logarithmic outside
    top: float | None = None  # the axis ends here at the latest; what lies above is told by its label
    ceiling: float | None = None  # nothing can lie above: no room is left there
    ticks: Sequence[float] = ()  # of the x axis; none: the points of the lines


def joint_figure(
    series: Sequence[Series],
    marks: Marks,
    title: str,
    subtitle: str,
    y: str,
    note: str,
    x: str = "context length, tokens (log scale)",
) -> Figure:
    """Every line in one picture, labelled at its end."""
    with rc_context(STYLE):
        labels = len(series) + len(marks.levels)
        height = max(4.3, HEAD + FOOT + 1.35 * (labels + 1) * LABEL_GAP / 72)
        names = [f"{one.label}  −0.000" for one in series] + [label for label, _ in marks.levels]
        right = 0.3 + 0.072 * max(map(len, names))
        figure = sheet(height, title, subtitle, note)
        axes = figure.add_axes(
            (LEFT / WIDTH, FOOT / height, 1 - (LEFT + right) / WIDTH, 1 - (HEAD + FOOT) / height)
        )
        _frame(axes, series, marks)
        for one in series:
            _draw(axes, one)
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        edge, top = axes.get_xlim()[1], axes.get_ylim()[1]
        about_zero = marks.linear is not None
        digits = 3 if about_zero else 0 if marks.ceiling else 2
        longest = max((one.x[-1] for one in series if one.x), default=0.0)
        ended = []
        for one in (one for one in series if one.y):
            told = f"{one.label}  {_number(one.y[-1], digits, about_zero)}"
            told += " ↑" if one.y[-1] > top else f" at {one.x[-1]:,.0f}" if one.x[-1] < longest else ""
            ended.append((told, one.x[-1], one.y[-1], one.colour))
        ended += [(label, edge, at, SOFT) for label, at in marks.levels]
        label_ends(figure, axes, ended)
        return figure


def panels_figure(
    series: Sequence[Series], marks: Marks, title: str, subtitle: str, y: str, note: str
) -> Figure:
    """A small picture for each line, in colour before all others in grey; one scale for all."""
    with rc_context(STYLE):
        columns = min(3, len(series))
        rows = math.ceil(len(series) / columns)
        strips = any(one.shown for one in series)
        step = PANEL + 0.34 + (STRIP + 0.03 if strips else 0)
        height = HEAD + FOOT + rows * step
        figure = sheet(height, title, subtitle, note)
        wide = (WIDTH - LEFT - 0.12) / columns
        for n, one in enumerate(series):
            row, column = divmod(n, columns)
            bottom = height - HEAD - row * step - PANEL - 0.22
            axes = figure.add_axes(
                ((LEFT + column * wide) / WIDTH, bottom / height, (wide - 0.14) / WIDTH, PANEL / height)
            )
            _frame(axes, series, marks, small=True)
            for other in series:
                if other is not one:
                    axes.plot(other.x, other.y, color=OTHERS, lw=0.8, zorder=1.5)
            if one.own is not None:
                axes.axhline(one.own, color=SOFT, lw=1.0, ls=DASHED, zorder=2)
            _draw(axes, one)
            axes.set_title(one.label, loc="left", fontsize=9, color=one.colour, fontweight="bold", pad=3)
            if strips:
                _strip(figure, axes, one, height)
            if one.y and one.y[-1] > axes.get_ylim()[1]:
                axes.annotate(
                    f"{_number(one.y[-1], 2)} ↑", (1, 1), (0, 3), "axes fraction", "offset points",
                    ha="right", va="bottom", fontsize=8, color=one.colour,
                )  # fmt: skip
            if column:
                axes.tick_params(labelleft=False)
            if n + columns < len(series):
                for under in figure.axes[-2:]:
                    under.tick_params(labelbottom=False)
        figure.text(
            0.02,
            (height - HEAD - rows * step / 2) / height,
            y,
            rotation=90,
            va="center",
            fontsize=9,
            color=INK,
        )
        figure.text(
            (LEFT + (WIDTH - LEFT) / 2) / WIDTH, (FOOT - 0.36) / height, "context length, tokens (log scale)",
            ha="center", fontsize=9, color=INK,
        )  # fmt: skip
        return figure


def _strip(figure: Figure, axes: Axes, one: Series, height: float) -> None:
    """Below small axes, how often training has shown each position (upper row) and distance (lower): the
    darker the oftener, empty where never. Shades are see-through, so that they follow a dark page."""
    place = axes.get_position()
    area = (place.x0, place.y0 - (STRIP + 0.03) / height, place.width, STRIP / height)
    strip = figure.add_axes(area)
    strip.set_xscale("log", base=2)
    strip.set_xlim(*axes.get_xlim())
    strip.set_ylim(0, 2)
    low, high = axes.get_xlim()
    for row, (context, share) in enumerate(reversed(one.shown)):
        edges = [math.sqrt(a * b) for a, b in pairwise(context)]
        # The first bin begins at its own centre, the last one ends there: where training ends.
        for left, right, value in zip([context[0], *edges], [*edges, context[-1]], share, strict=True):
            if value > 0 and right > low and left < high:
                shade = min(1.0, max(0.12, 1 + math.log10(value) / FAINTEST))
                span = (max(left, low), min(right, high) - max(left, low))
                strip.broken_barh([span], (row + 0.1, 0.8), facecolors=INK, alpha=shade, lw=0)
    strip.yaxis.set_major_locator(NullLocator())
    strip.xaxis.set_major_locator(FixedLocator(list(axes.get_xticks())))
    strip.xaxis.set_minor_locator(NullLocator())
    strip.xaxis.set_major_formatter(axes.xaxis.get_major_formatter())
    strip.tick_params(labelsize=7.5, length=2.5)
    for side in ("top", "right", "left"):
        strip.spines[side].set_visible(False)
    axes.tick_params(axis="x", labelbottom=False, length=0)


@dataclass(frozen=True)
class Dot:
    """One row of an interval plot; ends NaN for a point without a claim. `each`: smaller points behind it."""

    label: str
    value: float
    low: float
    high: float
    colour: str = INK
    marker: str = "o"
    each: Sequence[float] = ()


def dots_figure(
    panels: Sequence[tuple[str, Sequence[Dot]]],
    title: str,
    subtitle: str,
    x: str,
    note: str,
    *,
    zero: str = "",
    band: float | None = None,
    linear: float | None = None,
) -> Figure:
    """Points with intervals, one row each, one panel under the other, on one scale."""
    with rc_context(STYLE):
        row = 0.215
        heights = [row * len(dots) + 0.36 for _, dots in panels]
        height = HEAD + FOOT + sum(heights) - 0.1
        figure = sheet(height, title, subtitle, note)
        longest = max((len(dot.label) for _, dots in panels for dot in dots), default=4)
        left, right = 0.25 + 0.075 * longest, 0.62
        values = [v for _, dots in panels for d in dots for v in (d.value, d.low, d.high, *d.each) if v == v]
        top = height - HEAD
        for n, ((heading, dots), tall) in enumerate(zip(panels, heights, strict=True)):
            area = (
                left / WIDTH,
                (top - tall + 0.12) / height,
                1 - (left + right) / WIDTH,
                (tall - 0.36) / height,
            )
            axes = figure.add_axes(area)
            top -= tall
            _scale(axes, "x", [*values, 0.0] if zero else values, linear)
            axes.set_ylim(len(dots) - 0.5, -0.5)
            axes.yaxis.set_major_locator(FixedLocator(list(range(len(dots)))))
            axes.set_yticklabels([dot.label for dot in dots], fontsize=9)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", color="#E6E6E6", lw=0.7, zorder=0)
            axes.set_axisbelow(True)
            if zero:
                axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
            if band:
                axes.axvspan(-band, band, color="#999999", alpha=0.13, lw=0, zorder=0.5)
            for at, dot in enumerate(dots):
                claim = dot.low == dot.low
                solid = claim or len(dot.each) > 1
                strokes = {"ls": "", "marker": "|", "ms": 11, "mew": 1.3, "color": dot.colour, "zorder": 3}
                axes.plot(dot.each, [at] * len(dot.each), **strokes)
                if claim:
                    axes.plot(
                        [dot.low, dot.high],
                        [at, at],
                        color=dot.colour,
                        lw=1.8,
                        solid_capstyle="butt",
                        zorder=3,
                    )
                inside, around = (dot.colour, "white") if solid else ("white", dot.colour)
                axes.plot(dot.value, at, marker=dot.marker, ms=5.5, mfc=inside, mec=around, ls="", zorder=4)
                axes.annotate(
                    _number(dot.value, 3, bool(zero)), (1, at), (5, 0), ("axes fraction", "data"),
                    "offset points", va="center", fontsize=8.5, color=dot.colour,
                )  # fmt: skip
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
            axes.annotate(
                heading,
                (0, 1),
                (0, 4),
                "axes fraction",
                "offset points",
                fontsize=9.5,
                fontweight="bold",
                color=INK,
            )
            if n < len(panels) - 1:
                axes.tick_params(labelbottom=False)
            else:
                axes.set_xlabel(x, color=INK)
        return figure


def sheet(height: float, title: str, subtitle: str, note: str) -> Figure:
    """A figure of the usual width with its words above and below."""
    figure = Figure(figsize=(WIDTH, height), dpi=200)
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.1 / height, title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.34 / height, subtitle, fontsize=8.5, color=SOFT, va="top")
    figure.text(0.02, 0.08 / height, note, fontsize=8, color=SOFT, va="bottom")
    return figure


def _frame(axes: Axes, series: Sequence[Series], marks: Marks, small: bool = False) -> None:
    """Scales, limits, grid, the trained length and the level lines."""
    xs = sorted({x for one in series for x in one.x} | {float(marks.trained_length)})
    axes.set_xscale("log", base=2)
    axes.set_xlim(xs[0] / 2**0.25, xs[-1] * 2**0.25)
    ticks = list(marks.ticks) or xs
    while len(ticks) > (4 if small else 8):
        ticks = ticks[::-2][::-1]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    values = [at for _, at in marks.levels]
    for one in series:
        values += [v for v in (*one.y, *one.low, *one.high) if v == v]
    if marks.top is not None:
        values = [min(v, marks.top) for v in values]
    _scale(axes, "y", values, marks.linear)
    if marks.ceiling is not None:
        axes.set_ylim(-0.02 * marks.ceiling, 1.04 * marks.ceiling)
    axes.grid(axis="y", color="#E6E6E6", lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if small:
        axes.tick_params(labelsize=7.5, length=2.5)
    axes.axvline(marks.trained_length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    if not small:
        axes.annotate(
            f"trained length {marks.trained_length:,}", (marks.trained_length, 1), (4, -3),
            ("data", "axes fraction"), "offset points", va="top", color=SOFT, fontsize=8.5,
        )  # fmt: skip
        for _, at in marks.levels:
            axes.axhline(at, color=SOFT, lw=1.0, ls=DASHED, zorder=2)
    if marks.band:
        axes.axhspan(-marks.band, marks.band, color="#999999", alpha=0.13, lw=0, zorder=0.5)


def _scale(axes: Axes, which: str, values: Sequence[float], linear: float | None) -> None:
    """Limits with room on both sides; where `linear` is given, logarithmic beyond ± it, with round ticks."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if linear is None:
        room = max(high - low, 0.05)
        set_limits(low - 0.06 * room, high + 0.12 * room)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=linear, linscale=0.6)
    low, high = min(low, -1.5 * linear), max(high, 1.5 * linear)
    set_limits(1.35 * low, 1.35 * high)
    steps = [s * 10.0**k for k in range(-4, 3) for s in (1, 3)]
    # Ticks that would crowd each other next to zero are left out.
    ticks = [linear, *(s for s in steps if s > 2.2 * linear)]
    axis.set_major_locator(
        FixedLocator([-t for t in ticks if -t >= 1.35 * low] + [0] + [t for t in ticks if t <= 1.35 * high])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))


def _draw(axes: Axes, one: Series) -> None:
    axes.plot(
        one.x, one.y, color=one.colour, lw=1.6, marker=one.marker, ms=4.4, mec="white", mew=0.6, zorder=4
    )
    bars = [(x, y, a, b) for x, y, a, b in zip(one.x, one.y, one.low, one.high, strict=False) if a == a]
    for x, _, low, high in bars:
        axes.plot([x, x], [low, high], color=one.colour, lw=1.1, alpha=0.75, marker="_", ms=4.5, zorder=3)


def _number(value: float, digits: int, sign: bool = False) -> str:
    value = round(value, digits) + 0.0  # no minus before a zero
    text = f"{value:+.{digits}f}" if sign and value else f"{value:.{digits}f}"
    return text.replace("-", "−")
