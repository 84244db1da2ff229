"""Loss and other measures against the length of the context: one chart of curves named at their
ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evaluation.reports.charts import (
    SOFT,
    WIDTH,
    Curve,
    FigureText,
    Panel,
    decimals,
    mark,
    panels_figure,
    token_axis,
)
from evaluation.reports.text import plain

TOKENS = "context length, tokens (log scale)"
HEIGHT_BELOW = 1.7  # inches of a panel below the chart
BAND = "#999999"


@dataclass(frozen=True)
class ReferenceLines:
    """Everything in the axes besides the curves: trained length, level lines (label, y), tolerance
    band. `{}` in the label of a level is replaced by its value."""

    trained_length: int
    levels: Sequence[tuple[str, float]] = ()
    # ± this is shaded; the scale is linear inside and logarithmic outside
    band: float | None = None
    top: float | None = None  # upper limit of the axis; the label of a clipped line has its value
    ceiling: float | None = None  # largest possible value; the axis ends there
    ticks: Sequence[float] = ()  # of the x axis; default: the points of the lines
    also: Sequence[int] = ()  # further trained lengths


def length_chart(
    curves: Sequence[Curve],
    marks: ReferenceLines,
    text: FigureText,
    y: str,
    seeds: Sequence[Curve] = (),
    x: str = TOKENS,
    width: float = WIDTH,
    number: Callable[[float, int], str] = plain,
    below: Sequence[Panel] = (),
) -> Figure:
    """All curves in one chart, labelled at their ends; `seeds` are thin lines without labels.
    `below`: further panels over the same lengths."""
    curves = [curve for curve in curves if len(curve.x)]
    low, high = limits_of([*curves, *seeds], marks)
    digits = 3 if marks.band else 0 if marks.ceiling else decimals(low, high)
    longest = max((curve.x[-1] for curve in curves), default=0.0)
    labelled = []
    for curve in curves:
        label = f"{curve.label}  {number(float(curve.y[-1]), digits)}"
        if curve.x[-1] < longest:
            label += f" at {curve.x[-1]:,.0f}"
        labelled.append(replace(curve, label=label))
    levels = [(label.replace("{}", number(at, digits)), at, SOFT) for label, at in marks.levels]

    def scales(axes: Axes, panel: Panel) -> None:
        frame(axes, curves, marks, (low, high), 8)
        for length in (marks.trained_length, *marks.also):
            mark(axes, length, "" if panel in below else f"trained length {length:,}")

    first = Panel([*seeds, *labelled], levels=levels, y=y + linear_note(marks.band))
    heights = [3.2, *(HEIGHT_BELOW for _ in below)]
    return panels_figure([first, *below], text, scales, x=x, height=heights, width=width)


def linear_note(band: float | None) -> str:
    """For the label of an axis that is linear within ± `band` and logarithmic beyond."""
    return f" (linear within ±{band:g})" if band else ""


def difference_panel(curves: Sequence[Curve], heading: str, band: float) -> Panel:
    """Differences with their intervals; ± `band` is shaded."""
    values = []
    for curve in curves:
        values += [*map(float, curve.y), *map(float, curve.low), *map(float, curve.high)]
    limits = padded([value for value in values if math.isfinite(value)], band)

    def scales(axes: Axes, panel: Panel) -> None:
        set_scale(axes, "y", limits, band)
        axes.axhspan(-band, band, color=BAND, alpha=0.13, lw=0, zorder=0.5)

    return Panel(curves, heading + linear_note(band), levels=[("", 0.0, SOFT)], scales=scales)


def frame(
    axes: Axes,
    curves: Sequence[Curve],
    marks: ReferenceLines,
    limits: tuple[float, float],
    most: int,
) -> None:
    """Scales, limits, at most so many ticks, and the tolerance band."""
    points = [float(x) for curve in curves for x in curve.x]
    xs = sorted({*points, float(marks.trained_length), *map(float, marks.also)})
    ticks = list(marks.ticks) or xs
    while len(ticks) > most:
        ticks = ticks[::-2][::-1]
    token_axis(axes, ticks)
    axes.set_xlim(xs[0] / 2**0.25, xs[-1] * 2**0.25)
    set_scale(axes, "y", limits, marks.band)
    if marks.band:
        axes.axhspan(
            -marks.band,
            marks.band,
            color=BAND,
            alpha=0.13,
            lw=0,
            zorder=0.5,
        )


def limits_of(curves: Sequence[Curve], marks: ReferenceLines) -> tuple[float, float]:
    """Limits of the y axis."""
    if marks.ceiling is not None:
        return -0.02 * marks.ceiling, 1.04 * marks.ceiling
    values = [at for _, at in marks.levels]
    for curve in curves:
        values += [*map(float, curve.y), *map(float, curve.low), *map(float, curve.high)]
    top = math.inf if marks.top is None else marks.top
    return padded([min(value, top) for value in values if not math.isnan(value)], marks.band)


def padded(values: Sequence[float], band: float | None) -> tuple[float, float]:
    """The values with margins, and zero and the band if there is one."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if band:
        return 1.35 * min(low, -1.5 * band), 1.35 * max(high, 1.5 * band)
    room = max(high - low, 0.05)
    return low - 0.06 * room, high + 0.12 * room


def set_scale(
    axes: Axes,
    which: str,
    limits: tuple[float, float],
    band: float | None,
) -> None:
    """Limits; with `band`, a symlog scale that is linear within ± it, with round ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale_of = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if band:
        set_scale_of("symlog", linthresh=band, linscale=0.6)
    set_limits(*limits)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    if not band:
        return
    # Rounder ticks take precedence over those too close to them.
    round_numbers = [digit * 10.0**k for digit in (1, 3, 2, 5) for k in range(-4, 3)]
    sizes = [0.0, band, *(size for size in round_numbers if size > band), band / 2]
    place = axis.get_transform().transform
    low, high = limits
    gap = (0.1 if which == "x" else 0.08) * (place(high) - place(low))  # labels are wider than high
    ticks: list[float] = []
    for tick in [signed for size in sizes for signed in (size, -size)]:
        apart = all(abs(place(tick) - place(other)) >= gap for other in ticks)
        if apart and low <= tick <= high:
            ticks.append(tick)
    axis.set_major_locator(FixedLocator(sorted(ticks)))
    axis.set_minor_locator(NullLocator())
