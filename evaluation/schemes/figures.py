"""Figures of positional schemes, in the style of the other figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from evaluation.reports.figures import (
    COLOURS,
    DOTTED,
    INK,
    MARKERS,
    SOFT,
    STYLE,
    fit_left,
    grid,
    label_ends,
    power_of_ten,
)

WIDTH = 6.4  # inches, as in the figures of an evaluation
DASHES = ((0, ()), (0, (6, 1.6)), (0, (2, 2)), (0, (7, 1.6, 1.6, 1.6)))
HEAD = 0.62  # inches for title and subtitle
LEFT = 0.125  # share of the width to the left of the axes
FEW = 64  # up to this many points are drawn as markers
CUBE = (0.46, 0.3)  # direction of the third axis in an oblique projection


@dataclass(frozen=True)
class FigureText:
    """Title, subtitle and note of a figure; empty for a figure with a caption elsewhere. `formula`: the
    subtitle is mathtext."""

    title: str = ""
    subtitle: str = ""
    note: str = ""
    formula: bool = False


@dataclass(frozen=True)
class PlottedCurve:
    """One line: points, the label at its end, and whether its values are random initial parameters."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    drawn: bool = False


def encoding_figure(points: dict[str, np.ndarray], formulas: dict[str, str], words: FigureText) -> Figure:
    """A panel for each scheme: its points (tokens, 2 or more), numbered, joined in order."""
    columns = min(3, len(points))
    rows = math.ceil(len(points) / columns)
    with rc_context(STYLE):
        figure, (low, high) = canvas(words, 2.45 * rows)
        inches = figure.get_size_inches()[1]
        for n, (name, at) in enumerate(points.items()):
            left, top = (n % columns) / columns, high - (high - low) * (n // columns) / rows
            area = (left + 0.42 / WIDTH, top - 2.0 / inches, 1 / columns - 0.5 / WIDTH, 1.52 / inches)
            axes = figure.add_axes(area, label=name)
            formula = formulas.get(name, "")
            axes.set_title(name.replace("_", " "), loc="left", fontsize=9.5, color=INK, pad=16)
            axes.annotate(formula, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8.5, color=SOFT)
            _place(axes, at, (area[2] * WIDTH * 72, area[3] * inches * 72))
        return figure


def _place(axes: Axes, points: np.ndarray, size: tuple[float, float]) -> None:
    """Draw points into axes of that size in points, with equal scales."""
    deep = points.shape[1] > 2
    flat = _oblique(points) if deep else points
    lengths = np.linalg.norm(points, axis=1)
    if deep:
        _box(axes, points)
    elif np.allclose(lengths, lengths[0]):  # rotated, not shifted
        for point in flat:
            axes.plot(*np.stack([[0, 0], point]).T, color="#CFCFCF", lw=0.8, zorder=1)
    axes.plot(*flat.T, color=COLOURS[5], lw=1.0, zorder=2)
    axes.plot(*flat.T, ls="", marker="o", ms=4.6, color=COLOURS[0], mec="white", mew=0.6, zorder=4)
    for n, (point, away) in enumerate(zip(flat, _outwards(flat), strict=True)):
        axes.annotate(
            str(n),
            point,
            xytext=8.5 * away,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.5,
            color=INK,
            zorder=5,
        )
    low, high = flat.min(0), flat.max(0)
    room = np.array(size) - 2 * 15  # for the numbers
    scale = max((high - low) / room)  # data units per point
    for limits, middle, points_wide in zip(
        (axes.set_xlim, axes.set_ylim), (low + high) / 2, size, strict=True
    ):
        limits(middle - scale * points_wide / 2, middle + scale * points_wide / 2)
    if not deep:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel("feature 1", color=SOFT, fontsize=8.5, labelpad=1)
        axes.set_ylabel("feature 2", color=SOFT, fontsize=8.5, labelpad=1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        axes.tick_params(labelsize=8, length=2.5)


def _oblique(points: np.ndarray) -> np.ndarray:
    """(N, 2) the last feature across, the one before it up, and each before those into depth."""
    flat = points[:, :-3:-1].copy()
    for k in range(points.shape[1] - 2):
        flat += points[:, -3 - k : points.shape[1] - 2 - k] * CUBE * 0.55**k
    return flat


def _outwards(path: np.ndarray) -> np.ndarray:
    """(N, 2) unit vectors across the path at each point, on the side away from its middle."""
    along = np.gradient(path, axis=0)
    along = np.where(np.linalg.norm(along, axis=1, keepdims=True) > 1e-9, along, [[1.0, 0.0]])
    across = np.stack([-along[:, 1], along[:, 0]], 1)
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    side = np.sum(across * (path - path.mean(0)), axis=1, keepdims=True)
    return across * np.where(side < -1e-9, -1, 1)


def _box(axes: Axes, points: np.ndarray) -> None:
    """The edges of the box whose corners the points are, in place of axes."""
    low, high = points.min(0), points.max(0)
    features = points.shape[1]
    corners = np.array([[(low, high)[n >> k & 1][k] for k in range(features)] for n in range(2**features)])
    flat = _oblique(corners)
    for a in range(len(corners)):
        for k in range(features):
            if not a >> k & 1:
                axes.plot(*flat[[a, a | 1 << k]].T, color="#CFCFCF", lw=0.8, zorder=1)
    axes.set_axis_off()
    axes.annotate(
        f"features {features}, {features - 1}, {features - 2}:\nacross, up, into depth",
        (0, 0),
        (0, -26),
        "axes fraction",
        "offset points",
        fontsize=8.5,
        color=SOFT,
        annotation_clip=False,
    )


def lines_figure(
    panels: Sequence[tuple[str, Sequence[PlottedCurve]]],
    x: str,
    y: str,
    words: FigureText,
    *,
    height: float = 2.5,
    marked: tuple[float, str] | None = None,
    symlog: bool = False,
    step: float | None = None,
    keyed: bool = False,
) -> Figure:
    """Panels stacked vertically with common scales, each line labelled on the right.

    Args:
        panels: (what it shows, lines).
        marked: x of a vertical line, and its label.
        symlog: both axes linear up to 1 and logarithmic beyond.
        step: distance between markers along x; None: no markers.
        keyed: a legend, highest line first, instead of labels at the ends of the lines.
    """
    everything = [curve for _, curves in panels for curve in curves]
    xs = np.concatenate([np.asarray(curve.x, float) for curve in everything])
    ys = np.concatenate([np.asarray(curve.y, float) for curve in everything])
    ys = ys[np.isfinite(ys)]
    with rc_context(STYLE):
        figure, (low, high) = canvas(words, height * len(panels))
        inches = figure.get_size_inches()[1]
        right = 1 - _room([curve.label for curve in everything], keyed) / WIDTH
        share = (high - low) / len(panels)
        for n, (heading, curves) in enumerate(panels):
            foot, top = 0.44 / inches, (0.26 if heading else 0.1) / inches
            area = (LEFT, high - share * (n + 1) + foot, right - LEFT, share - foot - top)
            axes = figure.add_axes(area, label=str(n))
            axes.set_title(heading, loc="left", fontsize=9.5, color=INK, pad=4)
            grid(axes)
            drawn = _draw(axes, curves, step)
            if symlog:
                _symlog(axes)
                axes.set_ylim(min(-1.0, ys.min() * 1.6), max(0.4, ys.max() * 1.3))
            else:
                axes.set_ylim(ys.min() - 0.04 * np.ptp(ys), ys.max() + 0.04 * np.ptp(ys))
            axes.set_xlim(xs.min(), xs.max())
            if marked:
                mark(axes, *marked)
            axes.set_ylabel(y, color=INK, parse_math=True)
            axes.set_xlabel(x if n == len(panels) - 1 else "", color=INK, parse_math=True)
            fit_left(figure, axes)
            if keyed:
                _key(axes, drawn)
            else:
                ends = [
                    (c.label, *_end(c), str(line.get_color())) for c, line in zip(curves, drawn, strict=True)
                ]
                label_ends(figure, axes, ends)
        return figure


def _end(curve: PlottedCurve) -> tuple[float, float]:
    """The last finite point."""
    last = np.flatnonzero(np.isfinite(curve.y))[-1]
    return float(curve.x[last]), float(curve.y[last])


def _draw(axes: Axes, curves: Sequence[PlottedCurve], step: float | None) -> list[Line2D]:
    lines = []
    for n, curve in enumerate(curves):
        every = None
        if step is not None:  # markers of consecutive lines do not coincide
            count = max(1, round(step / (curve.x[1] - curve.x[0])))
            every = (n * count // len(curves), count)
        lines += axes.plot(
            curve.x,
            curve.y,
            label=curve.label,
            color=COLOURS[n % len(COLOURS)],
            lw=1.4,
            ls=(0, (1, 1)) if curve.drawn else DASHES[n % len(DASHES)],
            marker=None if step is None else MARKERS[n % len(MARKERS)],
            markevery=every,
            ms=4.8,
            mec="white",
            mew=0.5,
            zorder=3,
        )
    return lines


def _symlog(axes: Axes) -> None:
    """Linear up to 1 and logarithmic beyond, with equal slopes at 1."""
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=(1 - 1 / 2) / math.log(2))
    axes.set_yscale("symlog", base=10, linthresh=1, linscale=(1 - 1 / 10) / math.log(10))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−")))
    ticks = [0.0, *(2.0**k for k in range(0, 31, 2))]
    axes.xaxis.set_major_locator(FixedLocator(ticks))


def _key(axes: Axes, lines: list[Line2D]) -> None:
    heights = [float(np.mean(np.asarray(line.get_ydata(), float))) for line in lines]
    order = sorted(range(len(lines)), key=lambda n: -heights[n])
    axes.legend(
        handles=[lines[n] for n in order],
        loc="center left",
        bbox_to_anchor=(1.015, 0.5),
        frameon=False,
        fontsize=9,
        handlelength=3.4,
        borderaxespad=0,
    )


def _room(labels: Sequence[str], keyed: bool) -> float:
    """Inches for labels to the right of the axes."""
    font = FontProperties(family=STYLE["font.family"], size=9)
    widest = max(TextPath((0, 0), label or " ", prop=font).get_extents().width for label in labels)
    return (0.76 if keyed else 0.42) + widest / 72


def pair_figure(
    panels: Sequence[tuple[str, Sequence[PlottedCurve]]],
    x: str,
    y: str,
    words: FigureText,
    height: float = 2.8,
) -> Figure:
    """Panels side by side, each with its own scale; up to FEW points are drawn as markers, and several lines
    share one legend below.

    Args:
        panels: (what it shows, lines).
    """
    with rc_context(STYLE):
        names = {curve.label: None for _, curves in panels for curve in curves}
        figure, (low, high) = canvas(words, height + (0.3 if len(names) > 1 else 0))
        inches = figure.get_size_inches()[1]
        width = (1 - 0.02) / len(panels)
        foot, handles = (0.74 if len(names) > 1 else 0.44) / inches, []
        for n, (heading, curves) in enumerate(panels):
            area = (n * width + LEFT, low + foot, width - LEFT, high - low - foot - 0.3 / inches)
            axes = figure.add_axes(area, label=str(n))
            axes.set_title(heading, loc="left", fontsize=9.5, color=INK, pad=5, parse_math=True)
            grid(axes)
            handles = _draw(axes, curves, None)
            if len(curves[0].x) <= FEW:
                handles[0].set(marker="o", ms=3.4, lw=0.9, mec="none", zorder=4)
            axes.set_xlabel(x, color=INK, parse_math=True)
            axes.set_ylabel(y if n == 0 else "", color=INK, parse_math=True)
            axes.margins(x=0.03)
        if len(names) > 1:
            figure.legend(
                handles=handles,
                loc="lower center",
                bbox_to_anchor=(0.5, low),
                ncols=len(names),
                frameon=False,
                fontsize=9,
                handlelength=3.4,
                borderaxespad=0.2,
            )
        return figure


def wavelength_figure(
    spectra: dict[str, np.ndarray], length: int, words: FigureText, height: float = 3.3
) -> Figure:
    """Wavelength of each pair: filled where it makes a whole turn within `length` tokens, hollow where not.

    Pairs without rotation have no wavelength and no point.
    """
    with rc_context(STYLE):
        figure, (low, high) = canvas(words, height)
        foot = 0.44 / figure.get_size_inches()[1]
        right = 1 - _room(list(spectra), False) / WIDTH
        axes = figure.add_axes((LEFT, low + foot, right - LEFT, high - low - foot))
        grid(axes)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
        ends = []
        for n, (label, found) in enumerate(spectra.items()):
            colour, pairs, moves = COLOURS[n % len(COLOURS)], np.arange(len(found)), np.isfinite(found)
            for chosen, face in ((found <= length, colour), ((found > length) & moves, "white")):
                axes.plot(
                    pairs[chosen],
                    found[chosen],
                    ls="",
                    marker="os^Dv"[n % 5],
                    ms=3.8,
                    mfc=face,
                    mec=colour,
                    mew=0.9,
                    zorder=4,
                )
            if moves.any():
                last = np.flatnonzero(moves)[-1]
                ends.append((label, float(last), float(found[last]), colour))
        values = np.concatenate([[float(length)], *spectra.values()])
        values = values[np.isfinite(values)]
        axes.set_ylim(values.min() / 2, values.max() * 2)
        axes.set_xlim(-1, max(map(len, spectra.values())))
        axes.axhspan(length, values.max() * 2, color="#F4F4F4", zorder=0)
        axes.axhline(length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
        axes.annotate(
            f"trained length {length:,}",
            (0, length),
            (5, 3),
            ("axes fraction", "data"),
            "offset points",
            color=SOFT,
            fontsize=8.5,
        )
        axes.set_xlabel("pair $k$, fastest first", color=INK, parse_math=True)
        axes.set_ylabel(r"wavelength $2\pi/\theta_k$, tokens", color=INK, parse_math=True)
        fit_left(figure, axes)
        label_ends(figure, axes, ends)
        return figure


def canvas(words: FigureText, height: float) -> tuple[Figure, tuple[float, float]]:
    """A figure with `height` inches for the axes, and the vertical range of those inches."""
    head = HEAD if words.title else 0.1
    foot = 0.24 if words.note else 0.06
    total = head + height + foot
    figure = Figure(figsize=(WIDTH, total), dpi=200)
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.12 / total, words.title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    how: dict[str, Any] = {"fontsize": 8.5, "color": SOFT, "va": "top", "parse_math": words.formula}
    figure.text(0.02, 1 - 0.36 / total, words.subtitle, **how)
    figure.text(0.02, 0.07 / total, words.note, fontsize=8, color=SOFT, va="bottom")
    return figure, (foot / total, 1 - head / total)


def mark(axes: Axes, x: float, text: str) -> None:
    axes.axvline(x, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    axes.annotate(
        text,
        (x, 0.72),
        (6, 0),
        ("data", "axes fraction"),
        "offset points",
        va="center",
        color=SOFT,
        fontsize=8.5,
    )
