"""The plots of a study: styles of variants and dot plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.charts import (
    COLOURS,
    DASHED,
    GRID,
    INK,
    MARKERS,
    STYLE,
    Curve,
    FigureText,
    canvas,
)
from evaluation.reports.length_charts import (
    BAND,
    padded,
    set_scale,
)
from evaluation.reports.text import plain, signed

WIDTH = 6.0  # inches; on a phone 390 pixels wide, 8-point text is 7 pixels high
# COLOURS without its grey, then dark colors of Tol's muted set; markers differ as well.
PALETTE = (*COLOURS[:7], "#332288", "#882255", "#117733", "#8A8A2A", "#5B5B5B")
SHAPES = (*MARKERS, "p", "h", "d", "8")


def styles_of(names: Sequence[str], baseline: str | None = None) -> dict[str, tuple[str, str]]:
    """Color and marker of each variant, the same in all figures: ink for the baseline."""
    styles = {}
    rest = [name for name in names if name != baseline]
    for n, name in enumerate(rest):
        styles[name] = (PALETTE[n % len(PALETTE)], SHAPES[n % len(SHAPES)])
    if baseline is not None:
        styles[baseline] = (INK, "o")
    return styles


def has_bars(curves: Sequence[Curve]) -> bool:
    """Whether any interval is drawn."""
    return any(b > a for curve in curves for a, b in zip(curve.low, curve.high, strict=True))


@dataclass(frozen=True)
class DotEstimate:
    """One row of a dot plot; the ends are NaN for a point estimate."""

    label: str
    value: float
    low: float
    high: float
    color: str = INK
    marker: str = "o"

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)

    def draw(self, axes: Axes, row: int) -> None:
        """A bar for the interval, or a hollow marker for a point estimate."""
        color = self.color
        inside = "white"
        edge = color
        if self.has_interval:
            ends = [self.low, self.high]
            axes.plot(
                ends,
                [row, row],
                lw=1.8,
                solid_capstyle="butt",
                color=color,
                zorder=3,
            )
            inside = color
            edge = "white"
        axes.plot(
            self.value, row, marker=self.marker, ms=5.5, mfc=inside, mec=edge, ls="", zorder=4
        )


def dots_figure(
    panels: Mapping[str, Sequence[DotEstimate]],
    text: FigureText,
    x: str,
    band: float | None = None,
) -> Figure:
    """Points with intervals, one row each; panels by heading from top to bottom, on one scale.
    `band`: values are differences; ± it is shaded, and the scale is linear inside and logarithmic
    outside."""
    dots = [dot for own in panels.values() for dot in own]
    numbers = [v for dot in dots for v in (dot.value, dot.low, dot.high)]
    limits = padded([v for v in numbers if not math.isnan(v)], band)
    left = (0.25 + 0.075 * max((len(dot.label) for dot in dots), default=4)) / WIDTH
    right = 1 - 0.62 / WIDTH
    number = signed if band else plain
    with rc_context(STYLE):
        heights = [0.215 * len(own) + 0.36 for own in panels.values()]
        figure, (_, top) = canvas(text, sum(heights) + 0.45, WIDTH)
        inch = 1 / figure.get_figheight()
        for n, (heading, own) in enumerate(panels.items()):
            bottom = top - (heights[n] - 0.12) * inch
            area = (left, bottom, right - left, (heights[n] - 0.36) * inch)
            axes = figure.add_axes(area, label=str(n))
            top -= heights[n] * inch
            _dot_axes(axes, heading, own, limits, band)
            for row, dot in enumerate(own):
                dot.draw(axes, row)
                axes.annotate(
                    number(dot.value, 3),
                    (1, row),
                    (5, 0),
                    ("axes fraction", "data"),
                    "offset points",
                    va="center",
                    fontsize=8.5,
                    color=dot.color,
                )
            axes.tick_params(labelbottom=False)
        if figure.axes:
            figure.axes[-1].tick_params(labelbottom=True)
            figure.axes[-1].set_xlabel(x, color=INK)
        return figure


def _dot_axes(
    axes: Axes,
    heading: str,
    dots: Sequence[DotEstimate],
    limits: tuple[float, float],
    band: float | None,
) -> None:
    set_scale(axes, "x", limits, band)
    axes.set_ylim(len(dots) - 0.5, -0.5)
    axes.set_yticks(range(len(dots)), [dot.label for dot in dots], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(
        heading,
        loc="left",
        fontsize=9.5,
        fontweight="bold",
        color=INK,
        pad=4,
    )
    if band:
        axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
        axes.axvspan(-band, band, color=BAND, alpha=0.13, lw=0, zorder=0.5)
