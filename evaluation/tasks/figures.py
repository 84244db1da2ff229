"""Figures of an evaluation by tasks: accuracy by length, depth and distance. PNG and SVG."""

import math
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evaluation.reports.figures import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    STYLE,
    fit_left,
    grid,
    label_ends,
    save,
    token_axis,
)
from evaluation.reports.sentences import name_of
from evaluation.scoring.methods import TRAINED
from evaluation.tasks.analysis import DepthCell, TaskAnalysis
from evaluation.tasks.measure import TaskResult

SHADES = "cividis"  # even in lightness, and the same to every kind of colour vision


def draw_task_figures(result: TaskResult, analysis: TaskAnalysis, folder: Path) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [save(_by_length(result, analysis), folder, "accuracy_by_length")] if analysis.rows else []
    for label in dict.fromkeys(spot.method for spot in analysis.by_depth):
        found.append(save(_maps(result, analysis, label), folder, f"accuracy_by_depth_{label}"))
    return found


def _by_length(result: TaskResult, analysis: TaskAnalysis) -> Figure:
    """Accuracy against length: by likelihood as solid lines, exact match as dotted lines."""
    drawn, l0 = result.drawn, result.subject.trained_length
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.2), dpi=200)
        FigureCanvasAgg(figure)
        labels = list(dict.fromkeys(row.method for row in analysis.rows))
        right = 1 - (0.55 + 0.072 * (6 + max(map(len, map(name_of, labels))))) / 6.4
        axes = figure.add_axes((0.098, 0.2, right - 0.098, 0.6))
        ends = []
        for i, label in enumerate(labels):
            colour = INK if label == TRAINED else COLOURS[i % len(COLOURS)]
            rows = [row for row in analysis.rows if row.method == label]
            x, y = [row.length for row in rows], [100 * row.share.share for row in rows]
            exact = [100 * row.exact.share for row in rows]
            marker = "o" if label == TRAINED else MARKERS[i % len(MARKERS)]
            axes.plot(x, exact, color=colour, lw=1.1, ls=(0, (1, 1.6)), zorder=3)
            axes.plot(x, y, color=colour, lw=1.7, marker=marker, ms=4.6, mec="white", mew=0.6, zorder=4)
            for row in rows:
                if not math.isnan(row.low):
                    bar = [100 * row.low, 100 * row.high]
                    axes.plot([row.length] * 2, bar, color=colour, lw=1.0, alpha=0.7, zorder=3)
            ends.append((f"{name_of(label)}  {y[-1]:.0f}%", float(x[-1]), y[-1], colour))
        axes.axhline(100 * drawn.chance, color=SOFT, lw=1.0, ls=(0, (4, 2)), zorder=2)
        axes.axvline(l0, color="#BBBBBB", lw=0.9, zorder=1)
        axes.annotate(
            f"trained length {l0}",
            (l0, 1.015),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color=SOFT,
            ha="left",
        )
        ends.append(
            (f"chance  {100 * drawn.chance:.0f}%", float(drawn.lengths[-1]), 100 * drawn.chance, SOFT)
        )
        token_axis(axes, drawn.lengths, "length, input tokens")
        grid(axes)
        axes.set_ylim(-3, 103)
        axes.set_ylabel("accuracy, %", color=INK)
        fit_left(figure, axes)
        label_ends(figure, axes, ends)
        bars = f"; bars: {100 * result.settings.confidence:g}% over {drawn.unit_kind}s, simultaneous"
        _titles(
            figure,
            f"{result.facts['task'].capitalize()}: accuracy by length",
            f"{result.subject.name}: the same {drawn.count} items at every length, "
            f"{drawn.candidates} candidates each",
            "Solid lines: most likely candidate"
            + (bars if any(row.low == row.low for row in analysis.rows) else "")
            + ". Dotted: exact match.",
        )
    return figure


def _titles(figure: Figure, title: str, subtitle: str, note: str) -> None:
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.15 / height, title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.4 / height, subtitle, fontsize=8.5, color=SOFT, va="top")
    figure.text(0.02, 0.08 / height, note, fontsize=8, color=SOFT, va="bottom")


def _maps(result: TaskResult, analysis: TaskAnalysis, label: str) -> Figure:
    """Two grids over the lengths: by depth, and by tokens between answer and question."""
    drawn = result.drawn
    depth = [spot for spot in analysis.by_depth if spot.method == label]
    distance = [spot for spot in analysis.by_distance if spot.method == label]
    rows = max(len({spot.where for spot in spots}) for spots in (depth, distance))
    width, height = 2.0 + 1.24 * max(3, len(drawn.lengths)), 1.75 + 0.42 * max(3, rows)
    width = max(width, 7.4)
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=200)
        FigureCanvasAgg(figure)
        low, high = 0.75 / height, 1 - 0.95 / height
        left = figure.add_axes((0.085, low, 0.37, high - low))
        right = figure.add_axes((0.6, low, 0.37, high - low))
        _grid(left, depth, drawn.lengths, "depth of the answer", lambda spot: f"{spot.where:.2f}")
        _grid(
            right,
            distance,
            drawn.lengths,
            "tokens to the question",
            lambda spot: f"{spot.where:,.0f}–{(spot.until or 0) - 1:,.0f}",
        )
        _titles(
            figure,
            f"{result.facts['task'].capitalize()}, {name_of(label)}: accuracy by place of the answer",
            f"{result.subject.name}: accuracy by likelihood in %; chance "
            f"{100 * drawn.chance:.0f}%; trained at {result.subject.trained_length}",
            "Right: tokens between the answer and the question. "
            f"In brackets: Wilson's {100 * result.settings.confidence:g}% interval of each cell.",
        )
    return figure


def _grid(axes: Axes, spots: list[DepthCell], lengths: list[int], what: str, name) -> None:
    """Shaded cells with accuracy and interval; columns are lengths."""
    shades, levels = colormaps[SHADES], sorted({spot.where for spot in spots})
    names = {spot.where: name(spot) for spot in spots}
    for spot in spots:
        x, y = lengths.index(spot.length), levels.index(spot.where)
        shade = shades(spot.share.share)
        axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=shade, ec="white", lw=1.2)
        red, green, blue = shade[:3]
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK
        s, centre = spot.share, (x + 0.5, y + 0.5)
        how: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "color": ink}
        axes.annotate(f"{100 * s.share:.0f}", centre, xytext=(0, 4), fontsize=9.5, **how)
        ends = f"({100 * s.low:.0f}–{100 * s.high:.0f})"
        axes.annotate(ends, centre, xytext=(0, -7), fontsize=6.5, **how)
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(len(levels), 0) if what.startswith("depth") else axes.set_ylim(0, len(levels))
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{n:,}" for n in lengths])
    axes.set_yticks([i + 0.5 for i in range(len(levels))], [names[level] for level in levels])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("length, input tokens", color=INK)
    axes.set_ylabel(what, color=INK)
