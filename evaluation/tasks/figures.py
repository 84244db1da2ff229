"""Figures of an evaluation by tasks: accuracy by length, depth and distance. PNG and SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.base import dtype_note
from evaluation.reports.figures import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    STYLE,
    Curve,
    FigureText,
    Panel,
    canvas,
    mark,
    panels_figure,
    save,
    token_axis,
)
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.tasks.analysis import DepthCell, TaskAnalysis
from evaluation.tasks.session import TaskResult

SHADES = "cividis"  # even in lightness, and the same to every kind of color vision


def draw_task_figures(result: TaskResult, analysis: TaskAnalysis, folder: Path) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = (
        [save(_by_length(result, analysis), folder, "accuracy_by_length")] if analysis.rows else []
    )
    for label in dict.fromkeys(spot.method for spot in analysis.by_depth):
        found.append(save(_maps(result, analysis, label), folder, f"accuracy_by_depth_{label}"))
    return found


def _by_length(result: TaskResult, analysis: TaskAnalysis) -> Figure:
    """Accuracy against length: by likelihood as solid lines, exact match as dotted lines."""
    drawn = result.drawn
    curves = []
    for i, label in enumerate(dict.fromkeys(row.method for row in analysis.rows)):
        rows = [row for row in analysis.rows if row.method == label]
        color = INK if label == TRAINED else COLOURS[i % len(COLOURS)]
        marker = "o" if label == TRAINED else MARKERS[i % len(MARKERS)]
        x = [row.length for row in rows]
        exact, right, low, high = (
            [100 * value for value in values]
            for values in zip(
                *((r.exact.share, r.share.share, r.low, r.high) for r in rows), strict=True
            )
        )
        curves.append(Curve("", x, exact, color, width=1.1, dash=(0, (1, 1.6))))
        curves.append(
            Curve(name_of(label), x, right, color, low, high, 1.7, marker=marker, order=4)
        )

    def scales(axes: Axes, panel: Panel) -> None:
        l0 = result.subject.trained_length
        mark(axes, l0, f"trained length {l0}")
        token_axis(axes, drawn.lengths)
        axes.set_ylim(-3, 103)

    bars = f"; bars: {100 * result.settings.confidence:g}% over {drawn.unit_kind}s, simultaneous"
    known = any(row.low == row.low for row in analysis.rows)
    text = FigureText(
        f"{result.facts['task'].capitalize()}: accuracy by length",
        f"{result.subject.name}: the same {drawn.count} items at every length, "
        f"{drawn.candidates} candidates each{dtype_note(result.settings)}",
        f"Solid lines: most likely candidate{bars if known else ''}. Dotted: exact match.",
    )
    return panels_figure(
        [Panel(curves, levels=[("chance", 100 * drawn.chance, SOFT)])],
        text,
        scales,
        x="length, input tokens",
        y="accuracy, %",
        value=lambda axes, y: f"{y:.0f}%",
    )


def _maps(result: TaskResult, analysis: TaskAnalysis, label: str) -> Figure:
    """Two grids over the lengths: by depth, and by tokens between answer and question."""
    drawn = result.drawn
    depth = [spot for spot in analysis.by_depth if spot.method == label]
    distance = [spot for spot in analysis.by_distance if spot.method == label]
    rows = max(len({spot.where for spot in spots}) for spots in (depth, distance))
    text = FigureText(
        f"{result.facts['task'].capitalize()}, {name_of(label)}: accuracy by place of the answer",
        f"{result.subject.name}: accuracy by likelihood in %; chance {100 * drawn.chance:.0f}%; trained at "
        f"{result.subject.trained_length}{dtype_note(result.settings)}",
        "Right: tokens between the answer and the question. "
        f"In brackets: Wilson's {100 * result.settings.confidence:g}% interval of each cell.",
    )
    with rc_context(STYLE):
        width = max(7.4, 2.0 + 1.24 * len(drawn.lengths))
        figure, (low, high) = canvas(text, 0.9 + 0.42 * max(3, rows), width)
        low += 0.5 / figure.get_figheight()
        areas = [figure.add_axes((left, low, 0.37, high - low)) for left in (0.085, 0.6)]
        what = "depth of the answer"
        _grid(areas[0], depth, drawn.lengths, what, lambda spot: f"{spot.where:.2f}")
        areas[0].invert_yaxis()
        _grid(
            areas[1],
            distance,
            drawn.lengths,
            "tokens to the question",
            lambda spot: f"{spot.where:,.0f}–{(spot.until or 0) - 1:,.0f}",
        )
    return figure


def _grid(
    axes: Axes,
    spots: list[DepthCell],
    lengths: list[int],
    what: str,
    name: Callable[[DepthCell], str],
) -> None:
    """Shaded cells with accuracy and interval; columns are lengths."""
    shades = colormaps[SHADES]
    levels = sorted({spot.where for spot in spots})
    names = {spot.where: name(spot) for spot in spots}
    for spot in spots:
        x = lengths.index(spot.length)
        y = levels.index(spot.where)
        shade = shades(spot.share.share)
        axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=shade, ec="white", lw=1.2)
        red, green, blue = shade[:3]
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK
        s = spot.share
        center = (x + 0.5, y + 0.5)
        how: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "center",
            "color": ink,
        }
        axes.annotate(f"{100 * s.share:.0f}", center, xytext=(0, 4), fontsize=9.5, **how)
        ends = f"({100 * s.low:.0f}–{100 * s.high:.0f})"
        axes.annotate(ends, center, xytext=(0, -7), fontsize=6.5, **how)
    axes.set(xlim=(0, len(lengths)), ylim=(0, len(levels)))
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{n:,}" for n in lengths])
    axes.set_yticks([i + 0.5 for i in range(len(levels))], [names[level] for level in levels])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length, input tokens", color=INK)
    axes.set_ylabel(what, color=INK)
