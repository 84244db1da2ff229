"""Panels of measures over one horizontal axis, with the trained length marked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from evaluation.reports.charts import (
    COLOURS,
    DASHED,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Numbers,
    Panel,
    fix_ticks,
    mark,
    panels_figure,
    token_axis,
)
from evaluation.scoring.methods import TRAINED, name_of


@dataclass(frozen=True)
class MeasureAxes:
    """The axes of a figure of measures.

    Attributes:
        ticks: of the horizontal axis.
        y: what all vertical axes show, with the same limits; '': each panel has its own limits.
        shares: headings of panels whose numbers are from 0 to 1, in per cent.
        log_y: logarithmic vertical axes.
    """

    x: str
    trained_length: int
    ticks: Sequence[float]
    y: str = ""
    shares: frozenset[str] = frozenset()
    log_x: bool = True
    log_y: bool = False


def measures_figure(
    panels: Sequence[Panel],
    text: FigureText,
    axes_of: MeasureAxes,
) -> Figure:
    """Panels in two columns, with one key below them."""
    curves = [curve for panel in panels for curve in panel.curves]
    xs = [axes_of.trained_length, *(x for curve in curves for x in curve.x)]
    low = min(xs)
    high = max(xs)

    def scales(axes: Axes, panel: Panel) -> None:
        if axes_of.log_x:
            token_axis(axes, axes_of.ticks)
            room = max((high / low) ** 0.04, 1.06)
            axes.set_xlim(low / room, high * room)
        else:
            fix_ticks(axes, axes_of.ticks)
            room = max(0.03 * (high - low), 1.0)
            axes.set_xlim(low - room, high + room)
        share = panel.heading in axes_of.shares
        if axes_of.log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.tick_params(labelsize=8, length=2.5)
        shown = curves if axes_of.y else panel.curves
        axes.set_ylim(*_limits(shown, share, axes_of.log_y))
        mark(axes, axes_of.trained_length)

    notes = [text.note.rstrip("."), f"Dotted: trained length {axes_of.trained_length:,}"]
    note = ". ".join(filter(None, notes)) + "."
    return panels_figure(
        panels,
        FigureText(text.title, text.subtitle, note),
        scales,
        x=axes_of.x,
        y=axes_of.y,
        columns=2,
        height=1.75,
        names="below",
    )


def _limits(
    curves: Sequence[Curve],
    share: bool,
    log: bool,
) -> tuple[float, float]:
    """From 0 where that does not hide the differences, and never beyond what a share can be."""
    values = [y for curve in curves for y in curve.y if math.isfinite(y)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if log:
        return low / 1.2, high * 1.2
    low = min(low, 0.0)
    top = high + 0.08 * max(high - low, 1e-3)
    return low, min(top, 1.0) if share and high < 0.93 else top


def shades(count: int) -> list[str]:
    """Colors from dark to light for ordered values, told apart without color too."""
    return [to_hex(colormaps["viridis"](at)) for at in np.linspace(0.0, 0.82, max(count, 1))]


def shaded(label: str, x: Numbers, y: Numbers, color: str) -> Curve:
    """A curve without markers, unless it is a single point."""
    return Curve(label, x, y, color, marker="o" if len(x) == 1 else "")


def numbered(n: int, label: str, x: Numbers, y: Numbers) -> Curve:
    """The n-th of several unordered curves."""
    return Curve(
        label,
        x,
        y,
        COLOURS[n % len(COLOURS)],
        marker=MARKERS[n % len(MARKERS)],
    )


def reference_curve(label: str, x: Numbers, y: Numbers) -> Curve:
    return Curve(label, x, y, SOFT, width=1.0, dash=DASHED, order=2)


def titled(title: str, method: str) -> str:
    """A figure's title with the label of its method."""
    return f"{title}, {name_of(method)}" if method == TRAINED else f"{title}, method {method}"
