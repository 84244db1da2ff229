"""Read a figure back from its artists: lines, bars, levels, labels and overlapping text."""

from collections.abc import Callable, Iterable
from itertools import combinations
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

Points = list[tuple[float, float]]


class Shown(NamedTuple):
    """What is drawn in one color: the widest line, the thinner ones, and bars {x: (low, high)}."""

    points: Points
    thin: list[Points]
    bars: dict[float, tuple[float, float]]


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
    strokes = [line for line in mine if line.get_linestyle() != "None"]
    strokes.sort(key=lambda line: -line.get_linewidth())
    bars = {}
    for one in axes.collections:
        if isinstance(one, LineCollection) and to_hex(one.get_colors()[0]) == to_hex(color):
            for (x, low), (_, high) in one.get_segments():
                bars[float(x)] = (float(low), float(high))
    first, *rest = [points(line) for line in strokes] or [[]]
    return Shown(first, rest, bars)


def levels(axes: Axes) -> list[float]:
    """Heights of the horizontal lines from edge to edge."""
    return [
        float(one.get_ydata()[0])
        for one in axes.lines
        if one.get_transform() == axes.get_yaxis_transform("grid")
    ]


def ends(axes: Axes) -> list[End]:
    """The key beside the axes, from the highest line to the lowest."""
    legend = axes.get_legend()
    texts = [] if legend is None else legend.get_texts()
    parts = [text.get_text().rpartition("  ") for text in texts]
    names = [name or value for name, _, value in parts]
    values = [value if name else "" for name, _, value in parts]
    colors = [to_hex(text.get_color()) for text in texts]
    return [End(*end) for end in zip(names, values, colors, strict=True)]


def named(axes: Axes) -> dict[str, Shown]:
    """What is drawn under each name at the right, without the mark of undertrained variants."""
    return {end.name.removesuffix(" †"): shown(axes, end.color) for end in ends(axes)}


def labelled(axes: Axes) -> dict[str, Points]:
    """Lines by the names that a key takes from them."""
    return {
        str(line.get_label()): points(line)
        for line in lines(axes)
        if not str(line.get_label()).startswith("_")
    }


def assert_shows(
    axes: Axes,
    rows: Iterable,
    *,
    names: Axes | None = None,
    place: Callable = attrgetter("length"),
) -> None:
    """Assert that the axes have a line with bars for each variant of these rows of results, and no
    other. `names`: the axes whose labels have the colors; lines of a key have none."""
    by_variant: dict[str, list] = {}
    for row in rows:
        if not row.seed:
            by_variant.setdefault(row.variant, []).append(row)
    assert by_variant
    has_key = not ends(names or axes)
    drawn = labelled(axes) if has_key else named(axes)
    colors = {end.name.removesuffix(" †"): end.color for end in ends(names or axes)}
    for variant, own in by_variant.items():
        line = drawn[variant] if has_key else shown(axes, colors[variant]).points
        close(line, [place(row) for row in own], [row.value for row in own])
        if not has_key:
            bars = {place(row): (row.low, row.high) for row in own if row.high > row.low}
            found = shown(axes, colors[variant]).bars
            assert found.keys() == bars.keys()
            for x, bar in bars.items():
                np.testing.assert_allclose(found[x], bar, rtol=1e-9)
    if has_key:
        assert set(drawn) == set(by_variant)


def assert_text_is_readable(figure: Figure) -> None:
    """Assert that no text overlaps another or leaves the figure."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = {}
    for text in figure.findobj(Text):
        # Ticks beyond the limits are kept, invisible to the reader; so are empty strings.
        if text.get_text() and text.get_visible() and not _is_beyond(figure, text):
            # An annotation's own extent holds its leader line; only the words must not collide.
            boxes[text] = Text.get_window_extent(text, renderer)
    for text, box in boxes.items():
        assert box.min.min() >= -0.5, text
        assert (box.max <= figure.bbox.max + 0.5).all(), text
    for (text, a), (other, b) in combinations(boxes.items(), 2):
        shared = np.minimum(a.max, b.max) - np.maximum(a.min, b.min)
        assert shared.min() <= 2.0, (text, other)


def _is_beyond(figure: Figure, text: Text) -> bool:
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if text in (tick.label1, tick.label2):
                    return not (axes.axison and min(limits) <= tick.get_loc() <= max(limits))
    return False
