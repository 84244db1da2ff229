"""Figures in one style: a grid of panels with curves and a key, below a title. PNG and SVG, legible
at column width and without color.

`panels` draws any panels into one figure; `charts.py` makes panels of rows of results.
"""

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
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

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
WIDTH = 7.2  # inches
DPI = 200
HEAD = 0.62  # inches for title and subtitle
KEY_ROW = 0.19  # inches of a row of a key
KEY: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0, "labelspacing": 0.3}
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
        wide = np.greater(self.high, self.low)
        if wide.any():
            value = self.x if self.across else self.y
            ends = np.stack([np.subtract(value, self.low), np.subtract(self.high, value)])
            axes.errorbar(
                np.asarray(self.x)[wide],
                np.asarray(self.y)[wide],
                **{"xerr" if self.across else "yerr": ends[:, wide]},
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
        named: whether a key beside the panel names its curves.
        is_filled: `scales` draws what the panel shows.
        height: in inches; more where the key requires it.
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

    @property
    def labels(self) -> list[str]:
        """What its key names."""
        labels = [curve.label for curve in self.curves] + [label for label, *_ in self.levels]
        return list(filter(None, labels))

    def draw(self, axes: Axes) -> list[Line2D]:
        """Draw everything; returns the lines with names, the one that ends highest first."""
        axes.grid(axis="y", color=GRID, lw=0.7, zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        named = []
        for label, y, color in self.levels:
            line = axes.axhline(y, label=label, color=color, lw=1.1, ls=DASHED, zorder=2)
            named += [(y, line)] if label else []
        for curve in self.curves:
            line = curve.draw(axes)
            named += [(curve.end[1], line)] if curve.label else []
        if self.scales is not None:
            self.scales(axes)
        return [line for _, line in sorted(named, key=lambda end: -end[0])]


def panels(
    content: Iterable[Panel],
    text: FigureText,
    *,
    x: str = "",
    y: str = "",
    columns: int = 1,
    names: Literal["beside", "below"] = "beside",
    width: float = WIDTH,
) -> Figure:
    """A grid of panels; empty ones are left out.

    Args:
        x, y: labels of the axes of the last row and the first column, where a panel has none.
        names: in a key beside each panel, highest curve first, or in one key below all.
    """
    shown = [panel for panel in content if not panel.is_empty]
    columns = max(1, min(columns, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    heights = [0.0] * rows
    for n, panel in enumerate(shown):
        has_key = names == "beside" and panel.named
        room = 0.8 + KEY_ROW * len(panel.labels) if has_key else 0.0
        heights[n // columns] = max(heights[n // columns], panel.height, room)
    known = dict.fromkeys(label for panel in shown for label in panel.labels)
    key_columns = max(1, int(13 * width / (10 + max(map(len, known), default=0))))
    has_key = names == "below" and len(known) > 1
    key_height = KEY_ROW * math.ceil(len(known) / key_columns) + 0.1 if has_key else 0.0
    with rc_context(STYLE):
        head = HEAD if text.title else 0.1
        foot = 0.24 + 0.14 * text.note.count("\n") if text.note else 0.06
        total = head + sum(heights) + key_height + foot
        figure = Figure(figsize=(width, total), dpi=DPI)
        FigureCanvasAgg(figure)
        title = {"fontsize": 11.5, "fontweight": "bold", "color": INK, "va": "top"}
        figure.text(0.02, 1 - 0.12 / total, text.title, **title)
        small = {"fontsize": 8.5, "color": SOFT, "va": "top", "parse_math": text.formula}
        figure.text(0.02, 1 - 0.36 / total, text.subtitle, **small)
        figure.text(0.02, 0.07 / total, text.note, fontsize=8, color=SOFT, va="bottom")
        under = (foot + key_height) / total
        area = (0.008, under, 0.984, 1 - head / total - under)
        figure.set_layout_engine(ConstrainedLayoutEngine(rect=area, h_pad=0.06, w_pad=0.02))
        grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
        for axes in grid.flat[len(shown) :]:
            axes.remove()
        handles: dict[Any, Line2D] = {}
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
            if names == "beside" and panel.named and lines:
                key = axes.legend(
                    handles=lines,
                    loc="center left",
                    bbox_to_anchor=(1.02, 0.5),
                    **KEY,
                )
                for line, label in zip(lines, key.get_texts(), strict=True):
                    label.set_color(line.get_color())
        if has_key:
            figure.legend(
                handles=[handles[label] for label in known],
                loc="lower center",
                bbox_to_anchor=(0.5, foot / total),
                ncols=key_columns,
                **KEY,
            )
        return figure


def token_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """A log2 x axis of tokens with these ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left of rows 0, 1, ..., and a line at zero."""
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)


def mark(axes: Axes, x: float, text: str = "", height: float = 1.0) -> None:
    """A dotted vertical line, labelled at a share of the height."""
    axes.axvline(x, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    axes.annotate(
        text,
        xy=(x, height),
        xytext=(4, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=SOFT,
        fontsize=8.5,
        va="top",
    )


def save(
    figure: Figure,
    folder: Path,
    name: str,
    dpi: int = DPI,
    formats: Sequence[str] = ("png", "svg"),
) -> Path:
    """Write `name`.png and `name`.svg with reproducible bytes; returns the first."""
    with rc_context(STYLE):
        for kind in formats:
            metadata = {"Date": None} if kind == "svg" else None
            with atomic(folder / f"{name}.{kind}") as file:
                figure.savefig(file, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    return folder / f"{name}.{formats[0]}"
