"""Charts show the numbers of their rows, in full and without overlapping text."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.text import Text

from evaluation.reports.charts import (
    LengthAxis,
    difference_panel,
    dots_panel,
    heat_map,
    length_panel,
    styles_of,
)
from evaluation.reports.figures import FAINT, INK, FigureText, Panel, panels, spread, within
from evaluation.reports.results_table import ResultRow
from tests.artists import close, ends, labelled, levels, lines, named, shown

NAN = math.nan
LENGTHS = [64, 128, 512]


def rows_of(values: dict[str, list[float]], half=NAN, lengths=LENGTHS, seed="") -> list[ResultRow]:
    return [
        ResultRow(name, "nll", value, length, seed=seed, low=value - half, high=value + half)
        for name, own in values.items()
        for value, length in zip(own, lengths, strict=False)
    ]


def drawn(panel: Panel, **layout):
    (axes,) = panels([panel], FigureText("A title", "a subtitle", "a note"), **layout).axes
    return axes


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=12), st.floats(0.01, 0.09))
def test_labels_are_apart_and_within_the_axes(wanted, gap):
    placed = spread(sorted(wanted), gap)
    inside = within(placed, gap)
    for heights in (placed, inside):
        assert all(b - a >= gap - 1e-9 for a, b in pairwise(heights))
    assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6)
    assert inside[0] >= -1e-9 and inside[-1] <= 1 + 1e-9
    if all(b - a >= gap for a, b in pairwise(sorted(wanted))):
        assert placed == pytest.approx(sorted(wanted))


def test_lines_bars_seeds_and_levels_are_the_rows():
    values = {"rope": [3.0, 3.5, 4.25], "alibi": [3.1, 3.1]}
    rows = rows_of(values, half=0.1)
    rows += rows_of({"rope": [2.9, 3.4, 4.2]}, half=1.0, seed="0")
    styles = styles_of(list(values), ink="rope")
    axis = LengthAxis(LENGTHS, trained=[64])
    axes = drawn(length_panel(rows, styles, axis, y="NLL", levels=[("cut  {}", 3.0)]))
    by_name = named(axes)
    for name, own in values.items():
        close(by_name[name].points, LENGTHS[: len(own)], own)
        bars = {x: pytest.approx((y - 0.1, y + 0.1)) for x, y in zip(LENGTHS, own, strict=False)}
        assert by_name[name].bars == bars
    close(*by_name["rope"].thin, LENGTHS, [2.9, 3.4, 4.2])
    assert not by_name["alibi"].thin and levels(axes) == [3.0]
    assert {end.name: end.value for end in ends(axes)} == {
        "rope": "4.25",
        "alibi": "3.10 at 128",
        "cut": "3.00",
    }
    assert shown(axes, INK).points == by_name["rope"].points
    assert "trained length 64" in {text.get_text() for text in axes.texts}
    assert axes.get_axisbelow() is True and axes.get_ylabel() == "NLL"  # no grid over the lines


def test_shares_are_in_percent():
    rows = rows_of({"a": [0.2, 0.5, 0.97]})
    styles = styles_of(["a"])
    axes = drawn(length_panel(rows, styles, LengthAxis(LENGTHS), share=True, top=1.0))
    assert ends(axes)[0].value == "97%" and axes.get_ylim()[1] > 1
    small = length_panel(rows_of({"a": [0.01, 0.02]}), styles, LengthAxis(LENGTHS), share=True)
    assert drawn(small).get_ylim() == pytest.approx((0, 0.0216))


def test_undertrained_variants_are_marked():
    styles = styles_of(["a", "b"], marked=["b"])
    rows = rows_of({"a": [3.0, 3.0], "b": [6.0, 6.0]})
    for panel in (length_panel(rows, styles, LengthAxis(LENGTHS)), dots_panel(rows[1::2], styles)):
        axes = drawn(panel)
        names = [end.name for end in ends(axes)] or [t.get_text() for t in axes.get_yticklabels()]
        assert set(names) == {"a", "b †"}
    axes = drawn(length_panel(rows, styles, LengthAxis(LENGTHS)))
    inside = {to_hex(line.get_color()): to_hex(line.get_markerfacecolor()) for line in lines(axes)}
    assert inside == {styles["a"].color.lower(): styles["a"].color.lower()} | {
        styles["b"].color.lower(): "#ffffff"
    }


def test_differences_have_a_band_where_the_axis_is_linear():
    styles = styles_of(["a", *(f"m{n}" for n in range(20))])
    rows = rows_of({"a": [-0.01, 0.3, 0.0], "m19": [9.0, 9.0, 9.0]}, half=0.005)
    panel = difference_panel(rows, styles, LengthAxis(LENGTHS), "difference", 0.02)
    axes = drawn(panel)
    assert "linear within ±0.02" in axes.get_title(loc="left") and levels(axes) == [0]
    own = shown(axes, styles["a"].color)
    close(own.points, LENGTHS, [-0.01, 0.3, 0.0])
    assert own.bars[128] == pytest.approx((0.295, 0.305)) and not shown(axes, FAINT).points
    band = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert (band[0].y0, band[0].y1) == pytest.approx((-0.02, 0.02))


@pytest.mark.parametrize("span", [(-0.06, 0.015), (-0.015, 0.06), (-3.0, 0.0), (0.0, 0.3)])
def test_symlog_ticks_cover_the_data_without_crowding(span):
    """At least three ticks lie where the lines are, none crowded by another."""
    low, high = span
    rows = rows_of({"a": [0.0, low, high]})
    axes = drawn(length_panel(rows, styles_of(["a"]), LengthAxis(LENGTHS), band=0.02))
    ticks = axes.get_yticks()
    inside = [tick for tick in ticks if min(low, 0) - 0.02 <= tick <= max(high, 0) + 0.02]
    assert len(inside) >= 3 and 0 in inside
    heights = sorted(axes.transData.transform([(256, tick) for tick in ticks])[:, 1])
    assert min(np.diff(heights)) >= 0.07 * axes.bbox.height


def test_dots_are_rows_with_intervals_from_top_to_bottom():
    rows = [
        ResultRow("a", "difference", -0.3, 64, low=-0.4, high=-0.2),
        ResultRow("b", "difference", 0.1, 64),
    ]
    styles = styles_of(["a", "b"])
    axes = drawn(dots_panel(rows, styles, heading="at 64", band=0.02, shared=rows))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted() and {text.get_text() for text in axes.texts} == {
        "−0.300",
        "+0.100",
    }
    dots = {line.get_xdata()[0]: line for line in lines(axes) if line.get_marker() in "s^"}
    assert {x: line.get_ydata()[0] for x, line in dots.items()} == {-0.3: 0, 0.1: 1}
    assert to_hex(dots[0.1].get_markerfacecolor()) == "#ffffff"  # a point estimate
    (bar,) = [one for one in axes.collections if len(one.get_segments())]
    assert bar.get_segments()[0].tolist() == [[-0.4, 0], [-0.2, 0]]


def test_heat_maps_shade_each_cell_by_its_share():
    rows = [
        ResultRow("a", "accuracy", share, length, at=at, low=0.1, high=0.9)
        for share, length, at in [(0.25, 64, 0.0), (0.5, 128, 0.0), (1.0, 64, 0.5)]
    ]
    panel = heat_map(rows, lengths=[64, 128], name=lambda row: f"depth {row.at}", y="y", down=True)
    axes = drawn(panel)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["depth 0.0", "depth 0.5"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["64", "128"]
    cells = [(0, 0, 0.25), (1, 0, 0.5), (0, 1, 1.0)]
    for patch, (x, y, share) in zip(axes.patches, cells, strict=True):
        box = patch.get_extents().transformed(axes.transData.inverted())
        assert (box.x0, box.x1) == pytest.approx((x, x + 1))
        assert sorted((box.y0, box.y1)) == pytest.approx([y, y + 1])
        assert to_hex(patch.get_facecolor()) == to_hex(colormaps["cividis"](share))
        labels = [text.get_text() for text in axes.texts if text.xy == (x + 0.5, y + 0.5)]
        assert labels == [f"{100 * share:.0f}", "(10–90)"]
    assert axes.yaxis_inverted()


def test_empty_panels_are_left_out():
    styles = styles_of(["a"])
    full = length_panel(rows_of({"a": [1.0, 2.0]}), styles, LengthAxis(LENGTHS))
    nothing = length_panel(rows_of({"a": [NAN, NAN]}), styles, LengthAxis(LENGTHS))
    empty = heat_map([], lengths=[64], name=str, y="")
    figure = panels([nothing, full, Panel(), empty], FigureText(), x="x", columns=2)
    assert len(figure.axes) == 1 and figure.axes[0].get_xlabel() == "x"


def test_key_below_names_each_line_once():
    values = {"a": [1.0, 2.0, 3.0], "b": [2.0, 1.0, 0.5]}
    styles = styles_of(list(values))
    shown_panels = [
        length_panel(rows_of(values), styles, LengthAxis(LENGTHS), heading=name, named=False)
        for name in ("first", "second")
    ]
    figure = panels(shown_panels, FigureText("t", "s"), x="x", columns=2, names="below")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    for axes in figure.axes:
        for name, own in values.items():
            close(labelled(axes)[name], LENGTHS, own)


@pytest.mark.parametrize("seed", range(5))
def test_colors_go_to_the_lines_that_are_best_at_the_longest_length(seed):
    """Sixteen lines that end at different lengths, in any order; short ones have the lowest
    losses."""
    last = [(64, 0.1 + n / 100) for n in range(4)] + [(128, 1.0), (128, 0.9)]
    last += [(256, 3.0 + n / 10) for n in range(10)]
    order = np.random.default_rng(seed).permutation(len(last))
    rows = [ResultRow(f"{last[i]}", "nll", last[i][1], last[i][0]) for i in order]
    names = [row.variant for row in rows]
    styles = styles_of(["ink", *names], "ink", rows)
    colored = {name for name, style in styles.items() if style.color not in (FAINT, INK)}
    assert colored == {*(f"{end}" for end in last[6:]), f"{(128, 0.9)}"}
    assert len({styles[name] for name in colored}) == 11 and styles["ink"].color == INK


MANY = [3.0, *np.linspace(2.4, 2.5, 24).tolist(), 9.0]


@pytest.mark.parametrize("last", [[2.4] * 6, [2.4, 9.0, 2.41, 2.5, 3.1, 2.39], MANY])
def test_text_does_not_overlap_or_leave_the_figure(last):
    names = ["as trained", "linear", "ntk", "yarn", "window", "a method with a name"]
    names += [f"method {i}" for i in range(len(names), len(last))]
    lengths = [256, 512, 1024, 2048, 4096]
    values = {
        name: np.linspace(2.4, end, 5).tolist() for name, end in zip(names, last, strict=True)
    }
    rows = rows_of(values, half=0.1, lengths=lengths)
    styles = styles_of(names, "as trained", rows)
    axis = LengthAxis(lengths, [256])
    level = [("context truncated to 256  {}", 2.4)]
    axes = drawn(length_panel(rows, styles, axis, y="NLL", levels=level), x="context length")
    figure = axes.figure
    if len(last) > 12:  # grey lines far above all others leave the axes
        assert axes.get_ylim()[1] < 4
        assert "method 25  9.00 ↑" in {text.get_text() for text in axes.texts}
    figure.canvas.draw()
    low, high = axes.get_ylim()
    ticks = [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
    texts = [*axes.texts, *figure.texts, *axes.get_xticklabels(), *ticks, axes.yaxis.label]
    texts = [text for text in texts if text.get_text()]
    assert len(ends(axes)) == len(names) + 1
    # An annotation's own extent holds its leader line; the words alone are what must not collide.
    boxes = [Text.get_window_extent(text, figure.canvas.get_renderer()) for text in texts]
    for i, box in enumerate(boxes):
        assert box.min.min() >= 0 and (box.max <= figure.bbox.max).all(), texts[i]
        for j in range(i):
            shared = np.minimum(box.max, boxes[j].max) - np.maximum(box.min, boxes[j].min)
            assert shared.min() <= 1.0, (texts[i], texts[j])
