"""Figures in one style: a grid of panels with curves, named at their ends or in a key, below a
title. PNG and SVG, legible at column width and without color.

`panels` draws any panels into one figure; `charts.py` makes panels of rows of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.optimize import isotonic_regression

from data.files import atomic

# Okabe and Ito 2008 without its yellow, which is too light for a line on white, then dark colors of
# Tol's muted set. Markers differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
COLOURS += ("#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d", "8")
INK = "#222222"
SOFT = "#6E6E6E"
FAINT = "#767676"
GRID = "#E6E6E6"
DOTTED = (0, (1, 2))
DASHED = (0, (5, 3))
WIDTH = 6.4  # inches
# inches for title and subtitle, and for the labels of the x axis
HEAD = 0.62
TICKS = 0.44
KEY_ROW = 0.2  # inches of a row of the key below the panels
KEY: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8.5,
    "borderaxespad": 0,
    "handlelength": 2.8,
    "columnspacing": 1.4,
    "labelspacing": 0.25,
}
LED_FROM = 0.85  # share of the width beyond which a line ends at the right edge
LABEL_GAP = 12.0  # points between the middles of two labels
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
    "text.parse_math": False,  # names of runs and methods may contain `$`; formulas set parse_math
    "svg.fonttype": "none",
    "svg.hashsalt": "sextant",
}

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class FigureText:
    """Title, subtitle and note; empty for a figure with a caption elsewhere. `formula`: subtitle
    and headings of panels are mathtext, as axis labels always are."""

    title: str = ""
    subtitle: str = ""
    note: str = ""
    formula: bool = False


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        label: '' for a curve without a name.
        low, high: ends of the interval of each y, or of each x if `across`; NaN or empty for none.
        dash: a linestyle of matplotlib; '' for markers alone.
        every: which points have markers, as matplotlib's `markevery`.
        hollow: markers are outlines.
    """

    label: str
    x: Numbers
    y: Numbers
    color: str = INK
    low: Numbers = ()
    high: Numbers = ()
    across: bool = False
    width: float = 1.5
    dash: Any = "-"
    marker: str = ""
    size: float = 4.6
    every: Any = None
    hollow: bool = False
    order: float = 3
    alpha: float | None = None

    @property
    def end(self) -> tuple[float, float]:
        """The last finite point."""
        last = np.flatnonzero(np.isfinite(self.y))[-1]
        return float(self.x[last]), float(self.y[last])

    @property
    def has_bars(self) -> bool:
        return len(self.low) > 0 and bool(np.greater(self.high, self.low).any())

    def draw(self, axes: Axes) -> Line2D:
        (line,) = axes.plot(
            self.x,
            self.y,
            label=self.label or "_",
            color=self.color,
            lw=self.width,
            ls=self.dash,
            marker=self.marker,
            markevery=self.every,
            ms=self.size,
            mfc="white" if self.hollow else self.color,
            mec=self.color if self.hollow else "white",
            mew=0.9 if self.hollow else 0.6,
            zorder=self.order,
            alpha=self.alpha,
        )
        if self.has_bars:
            wide = np.greater(self.high, self.low)
            value = np.asarray(self.x if self.across else self.y, dtype=np.float64)
            below = value - np.asarray(self.low)
            above = np.asarray(self.high) - value
            axes.errorbar(
                np.asarray(self.x)[wide],
                np.asarray(self.y)[wide],
                **{"xerr" if self.across else "yerr": (below[wide], above[wide])},
                fmt="none",
                color=self.color,
                elinewidth=1.0,
                capsize=2.2,
                alpha=0.75,
                zorder=self.order - 0.5,
            )
        return line


@dataclass(frozen=True)
class Panel:
    """Curves over common axes.

    Attributes:
        levels: horizontal lines across the axes: label, y, color.
        x, y: labels of the axes.
        scales: sets scales, limits and marks of the axes; the curves are drawn already.
        named: whether the curves are named at their right ends.
        is_filled: `scales` draws what the panel shows.
        height: in inches; more where the names require it.
    """

    curves: Sequence[Curve] = ()
    heading: str = ""
    levels: Sequence[tuple[str, float, str]] = ()
    x: str = ""
    y: str = ""
    scales: Callable[[Axes], object] | None = None
    named: bool = True
    is_filled: bool = False
    height: float = 2.9

    @property
    def is_empty(self) -> bool:
        return not (self.is_filled or any(np.isfinite(curve.y).any() for curve in self.curves))

    def draw(self, axes: Axes) -> list[Line2D]:
        axes.grid(axis="y", color=GRID, lw=0.7, zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for _, at, color in self.levels:
            axes.axhline(at, color=color, lw=1.1, ls=DASHED, zorder=2)
        lines = [curve.draw(axes) for curve in self.curves]
        if self.scales is not None:
            self.scales(axes)
        return lines

    def ends(self) -> list[tuple[str, float, float, str]]:
        """Labels of curves and levels: text, x, y, color; x is infinite for a level."""
        if not self.named:
            return []
        ends = [(curve.label, *curve.end, curve.color) for curve in self.curves if curve.label]
        return ends + [(label, math.inf, y, color) for label, y, color in self.levels if label]


def panels(
    content: Iterable[Panel],
    text: FigureText,
    *,
    x: str = "",
    y: str = "",
    columns: int = 1,
    names: Literal["ends", "beside", "below"] = "ends",
    width: float = WIDTH,
) -> Figure:
    """A grid of panels; empty ones are left out.

    Args:
        x, y: labels of the axes of the last row and the first column, where a panel has none.
        names: of curves and levels: at their right ends, in a key beside each panel, or in one key
            below all.
    """
    shown = [panel for panel in content if not panel.is_empty]
    columns = max(1, min(columns, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    heights = [0.0] * rows
    ends = [panel.ends() if names == "ends" else [] for panel in shown]
    for n, (panel, labels) in enumerate(zip(shown, ends, strict=True)):
        room = TICKS + 0.26 + (len(labels) + 1) * LABEL_GAP / 72 if labels else 0.0
        heights[n // columns] = max(heights[n // columns], panel.height, room)
    known = {curve.label: curve for panel in shown for curve in panel.curves if curve.label}
    key_columns = max(1, int((width - 0.3) / (0.62 + _widest(known))))
    has_key = names == "below" and len(known) > 1
    key_height = KEY_ROW * math.ceil(len(known) / key_columns) + 0.08 if has_key else 0.0
    with rc_context(STYLE):
        figure, (low, high) = canvas(text, sum(heights) + key_height, width)
        under = low + key_height / figure.get_figheight()
        area = (0.008, under, 0.984, high - under)
        figure.set_layout_engine(ConstrainedLayoutEngine(rect=area, h_pad=0.03, w_pad=0.02))
        grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
        for axes in grid.flat[len(shown) :]:
            axes.remove()
        handles = {}
        for n, panel in enumerate(shown):
            axes = grid.flat[n]
            heading = axes.set_title(panel.heading, loc="left", fontsize=9.5, color=INK, pad=4)
            heading.set_parse_math(text.formula)
            lines = panel.draw(axes)
            across = x if n + columns >= len(shown) else ""
            up = y if n % columns == 0 else ""
            axes.set_xlabel(panel.x or across, color=INK, parse_math=True)
            axes.set_ylabel(panel.y or up, color=INK, parse_math=True)
            handles |= {line.get_label(): line for line in lines}
            if names == "beside":  # highest curve first
                lines.sort(key=lambda line: -float(np.mean(np.asarray(line.get_ydata(), float))))
                axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.015, 0.5), **KEY)
        if has_key:
            figure.legend(
                handles=[handles[label] for label in known],
                loc="lower center",
                bbox_to_anchor=(0.5, low),
                ncols=key_columns,
                **KEY,
            )
        figure.draw_without_rendering()  # sets the heights along which the labels are spread
        for axes, labels in zip(figure.axes, ends, strict=True):
            label_ends(figure, axes, labels)
        return figure


def _widest(labels: Iterable[str]) -> float:
    """Inches of the widest label."""
    font = FontProperties(family=STYLE["font.family"], size=9)
    paths = [TextPath((0, 0), label or " ", prop=font) for label in labels]
    return max((path.get_extents().width for path in paths), default=0) / 72


def canvas(
    text: FigureText, height: float, width: float = WIDTH
) -> tuple[Figure, tuple[float, float]]:
    """A figure with `height` inches for the axes, and the vertical range of those inches."""
    head = HEAD if text.title else 0.1
    foot = 0.24 + 0.14 * text.note.count("\n") if text.note else 0.06
    total = head + height + foot
    figure = Figure(figsize=(width, total), dpi=200)
    FigureCanvasAgg(figure)
    place = 1 - 0.12 / total
    figure.text(0.02, place, text.title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    subtitle = figure.text(
        0.02, 1 - 0.36 / total, text.subtitle, fontsize=8.5, color=SOFT, va="top"
    )
    subtitle.set_parse_math(text.formula)
    figure.text(0.02, 0.07 / total, text.note, fontsize=8, color=SOFT, va="bottom")
    return figure, (foot / total, 1 - head / total)


def token_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """A log2 x axis of tokens with these ticks."""
    axes.set_xscale("log", base=2)
    fix_ticks(axes, ticks)


def fix_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Ticks of the x axis, as whole numbers."""
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def mark(
    axes: Axes,
    x: float,
    text: str = "",
    height: float = 1.0,
) -> None:
    """A dotted vertical line, labelled at a share of the height."""
    axes.axvline(x, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    place = ((x, height), (4, -3), ("data", "axes fraction"), "offset points")
    axes.annotate(text, *place, color=SOFT, fontsize=8.5, va="top")


def power_of_ten(value: float) -> str:
    """`10⁻⁴`, without mathtext."""
    return "10" + str(round(math.log10(value))).translate(
        str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    )


def label_ends(
    figure: Figure,
    axes: Axes,
    labels: list[tuple[str, float, float, str]],
) -> None:
    """Direct labels (text, x, y, color) right of the axes at the height of the line's end, moved
    apart where they would overlap. Limits and scales of the axes must be final. The label of a
    line that ends above the axes has an arrow; a line that ends early has no leader, which would
    look like data."""
    height = axes.get_position().height * figure.get_figheight() * 72  # points
    gap = LABEL_GAP / height
    right = axes.get_xlim()[1]
    top = axes.get_ylim()[1]
    to_axes = axes.transData - axes.transAxes
    wanted = []
    for text, x, y, color in labels:
        across, up = to_axes.transform((min(x, right), y))
        wanted.append((float(up), f"{text} ↑" if y > top else text, across, x, y, color))
    wanted.sort()
    placed = within(spread([up for up, *_ in wanted], gap), gap)
    for at, (_, text, across, x, y, color) in zip(placed, wanted, strict=True):
        axes.annotate(
            text,
            xy=(min(x, right), min(y, top)),
            xycoords="data",
            xytext=(1.045, at),
            textcoords="axes fraction",
            color=color,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.6 if across > LED_FROM else 0.0,
                "alpha": 0.6,
                "shrinkA": 2,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def spread(wanted: Sequence[float], gap: float) -> np.ndarray:
    """Heights as near as possible to `wanted` (ascending) with at least `gap` between neighbors."""
    least = gap * np.arange(len(wanted))
    return isotonic_regression(np.asarray(wanted) - least).x + least


def within(placed: np.ndarray, gap: float) -> np.ndarray:
    """The same heights, moved into 0 to 1 if there is room, with the same gaps."""
    least = gap * np.arange(len(placed))
    if least.max(initial=0.0) > 1:
        return placed
    return np.minimum(np.maximum(placed, least), 1 - least[::-1])


def save(
    figure: Figure, folder: Path, name: str, dpi: int = 200, formats: Sequence[str] = ("png", "svg")
) -> Path:
    """Write `name`.png and `name`.svg with reproducible bytes; returns the first."""
    with rc_context(STYLE):
        for kind in formats:
            metadata = {"Date": None} if kind == "svg" else None
            with atomic(folder / f"{name}.{kind}") as file:
                figure.savefig(file, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    return folder / f"{name}.{formats[0]}"
