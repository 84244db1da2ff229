"""Read a figure back from its artists: lines, bars, shaded bands, and labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Points = list[tuple[float, float]]


class Shown(NamedTuple):
    """What is drawn in one color: the widest line, the thinner ones, bars {x: (low, high)}, and
    markers without a line."""

    points: Points
    thin: list[Points]
    bars: dict[float, tuple[float, float]]
    marks: list[Points]


class End(NamedTuple):
    """A label right of the axes: `name  value`."""

    name: str
    value: str
    color: str


def points(line: Line2D) -> Points:
    """The points of a line that are drawn."""
    xy = np.asarray(line.get_xydata(), dtype=float)
    return [(x, y) for x, y in xy.tolist() if x == x and y == y]


def close(found: Points, x, y) -> None:
    """Assert that these are the points (x, y), to the digits that results files keep."""
    np.testing.assert_allclose(
        found, np.stack([np.asarray(x, float), np.asarray(y, float)], 1), rtol=1e-5, atol=1e-9
    )


def lines(axes: Axes) -> list[Line2D]:
    """Lines in data coordinates: no grid, level or mark."""
    return [line for line in axes.lines if line.get_transform() == axes.transData and points(line)]


def shown(axes: Axes, color: str) -> Shown:
    """Everything of that color."""
    mine = [line for line in lines(axes) if to_hex(line.get_color()) == to_hex(color)]
    loose = [line for line in mine if line.get_linestyle() == "None"]
    strokes = sorted(
        (line for line in mine if line not in loose), key=lambda line: -line.get_linewidth()
    )
    bars = {}
    for (x, low), (_, high) in (points(line) for line in strokes if _is_bar(line)):
        bars[x] = (low, high)
    for one in axes.collections:
        if isinstance(one, LineCollection) and to_hex(one.get_colors()[0]) == to_hex(color):
            bars |= {
                float(at[0, 0]): (float(at[0, 1]), float(at[1, 1])) for at in one.get_segments()
            }
    first, *rest = [points(line) for line in strokes if not _is_bar(line)] or [[]]
    return Shown(first, rest, bars, [points(line) for line in loose if line.get_marker() != "_"])


def _is_bar(line: Line2D) -> bool:
    at = points(line)
    return len(at) == 2 and at[0][0] == at[1][0]


def dashed(axes: Axes) -> list[Points]:
    """The lines in data coordinates that are neither solid nor mere markers."""
    return [points(line) for line in lines(axes) if line.get_linestyle() not in ("-", "None")]


def levels(axes: Axes) -> list[float]:
    """Heights of the horizontal lines from edge to edge."""
    return [
        float(one.get_ydata()[0])
        for one in axes.lines
        if one.get_transform() == axes.get_yaxis_transform("grid")
    ]


def ends(axes: Axes) -> list[End]:
    """The labels of lines, from the highest to the lowest."""
    found = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    found.sort(key=lambda text: -text.get_position()[1])
    return [End(*_split(text.get_text()), to_hex(text.get_color())) for text in found]


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("  ")
    return (name, value) if name else (text, "")


def named(axes: Axes) -> dict[str, Shown]:
    """What is drawn under each name at the right."""
    return {end.name: shown(axes, end.color) for end in ends(axes)}


def labelled(axes: Axes) -> dict[str, Points]:
    """Lines by the names that a key takes from them."""
    return {
        str(line.get_label()): points(line)
        for line in lines(axes)
        if not str(line.get_label()).startswith("_")
    }


def keys(figure: Figure) -> dict[str, str]:
    """Names and colors of the figure's or its axes' keys."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    found = {}
    for legend in legends:
        for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True):
            found[text.get_text()] = to_hex(line.get_color())
    return found
