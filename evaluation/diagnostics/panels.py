"""Small multiples in the house style: a grid of panels with one key, readable at column width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from evaluation.reports.figures import INK, MARKERS, SOFT, STYLE, fit_left, grid
from evaluation.schemes.figures import WIDTH, FigureText, canvas

COLUMNS = 2
PANEL = 1.75  # inches of a row of panels
KEY_ROW = 0.2  # inches of a row of the key
LABEL = 0.26  # inches of the words under the last panels
DOTS = (0, (1, 2))


@dataclass(frozen=True)
class PanelSeries:
    """One line; `label` '' keeps it out of the key, `marker` counts through the house's markers."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str
    width: float = 1.5
    dashed: bool = False
    marker: int | None = None
    dots: bool = False


@dataclass(frozen=True)
class PanelSpec:
    """What it shows, and its lines; `share`: numbers from 0 to 1, in per cent; `log`: a logarithmic axis."""

    heading: str
    lines: Sequence[PanelSeries]
    share: bool = False
    log: bool = False


def shades(count: int) -> list[str]:
    """Colours from dark to light for things in an order, told apart without colour too."""
    return [to_hex(colormaps["viridis"](at)) for at in np.linspace(0.0, 0.82, max(count, 1))]


def panels_figure(
    panels: Sequence[PanelSpec],
    words: FigureText,
    *,
    x: str,
    y: str = "",
    marked: float,
    ticks: Sequence[float],
    same_scale: bool = False,
    log_x: bool = True,
) -> Figure:
    """Panels in two columns over one horizontal axis, the trained length `marked` in each.

    Args:
        ticks: of the horizontal axis.
        y: what the vertical axes show, where the headings do not say it.
        same_scale: all panels share their vertical axis; else each has its own.
    """
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    named = {line.label: line for panel in panels for line in panel.lines if line.label}
    named[f"trained length {marked:,}"] = PanelSeries(
        (), (), SOFT, f"trained length {marked:,}", 0.9, dots=True
    )
    per_row = max(1, int((WIDTH - 0.3) / (0.62 + 0.066 * max(map(len, named)))))
    key = KEY_ROW * math.ceil(len(named) / per_row) + 0.08
    with rc_context(STYLE):
        figure, (foot, high) = canvas(words, PANEL * rows + key + LABEL)
        inches = figure.get_size_inches()[1]
        low = foot + (key + LABEL) / inches
        limits = (
            _limits([line for panel in panels for line in panel.lines], panels[0]) if same_scale else None
        )
        for n, panel in enumerate(panels):
            row, column = divmod(n, columns)
            area = (
                column / columns + 0.085,
                high - (high - low) * (row + 1) / rows + 0.2 / inches,
                1 / columns - 0.115,
                (high - low) / rows - 0.48 / inches,
            )
            axes = figure.add_axes(area, label=str(n))
            axes.set_title(panel.heading, loc="left", fontsize=9.5, color=INK, pad=4)
            grid(axes)
            _draw(axes, panel.lines)
            _scales(axes, panel, marked, ticks, log_x)
            axes.set_ylim(*(limits or _limits(panel.lines, panel)))
            axes.axvline(marked, color=SOFT, lw=0.9, ls=DOTS, zorder=1)
            if n + columns >= len(panels):
                axes.set_xlabel(x, color=INK, fontsize=9)
            if column == 0 and y:
                axes.set_ylabel(y, color=INK, fontsize=9)
                fit_left(figure, axes)
        handles = [_drawn(line) for line in named.values()]
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.5, foot),
            ncols=per_row,
            frameon=False,
            fontsize=8.5,
            handlelength=2.4,
            columnspacing=1.4,
            labelspacing=0.25,
            borderaxespad=0,
        )
        return figure


def _drawn(line: PanelSeries) -> Line2D:
    marker = "o" if len(line.x) == 1 else None  # a point alone is no line
    if line.marker is not None:
        marker = MARKERS[line.marker % len(MARKERS)]
    return Line2D(
        line.x,
        line.y,
        color=line.colour,
        lw=line.width,
        ls=DOTS if line.dots else (0, (5, 3)) if line.dashed else "-",
        marker=marker,
        ms=4.4,
        mec="white",
        mew=0.5,
        label=line.label,
        zorder=2 if line.dashed else 3,
    )


def _draw(axes: Axes, lines: Sequence[PanelSeries]) -> None:
    for line in lines:
        axes.add_line(_drawn(line))


def _scales(axes: Axes, panel: PanelSpec, marked: float, ticks: Sequence[float], log_x: bool) -> None:
    xs = [marked, *(x for line in panel.lines for x in line.x)]
    low, high = min(xs), max(xs)
    if log_x:
        axes.set_xscale("log", base=2)
        room = max((high / low) ** 0.04, 1.06)
        axes.set_xlim(low / room, high * room)
    else:
        room = max(0.03 * (high - low), 1.0)
        axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if panel.log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    if panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.tick_params(labelsize=8, length=2.5)


def _limits(lines: Sequence[PanelSeries], panel: PanelSpec) -> tuple[float, float]:
    """From 0 where that does not hide the differences, and never beyond what a share can be."""
    values = [y for line in lines for y in line.y if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if panel.log:
        return low / 1.2, high * 1.2
    if low >= 0:
        low = 0.0
    top = high + 0.08 * max(high - low, 1e-3)
    return low, min(top, 1.0) if panel.share and high < 0.93 else top
