"""Charts show the numbers of their rows, in full and without overlapping text."""

import math

import numpy as np
import pytest

from evaluation.reports.figures import (
    FigureText,
    LengthAxis,
    Panel,
    dots_panel,
    length_panel,
    panels,
    styles_of,
    top_of_colored,
)
from evaluation.statistics.results_table import ResultRow
from tests.artists import (
    assert_shows,
    assert_text_is_readable,
    close,
    ends,
    levels,
    lines,
    named,
)

LENGTHS = [64, 128, 512]
AXIS = LengthAxis(LENGTHS, trained=[64])


def rows_of(values: dict[str, list[float]], half=math.nan, lengths=LENGTHS, seed=""):
    return [
        ResultRow(
            name,
            "nll",
            value,
            length,
            seed=seed,
            low=value - half,
            high=value + half,
        )
        for name, own in values.items()
        for value, length in zip(own, lengths, strict=False)
    ]


def drawn(*content: Panel, **layout):
    return panels(content, FigureText("A title", "a subtitle", "a note"), **layout).axes


def test_lines_bars_seeds_and_levels_are_the_rows():
    rows = rows_of({"rope": [3.0, 3.5, 4.25], "alibi": [3.1, 3.1]}, half=0.1)
    seeds = rows_of({"rope": [2.9, 3.4, 4.2]}, half=1.0, seed="0")
    styles = styles_of(["rope", "alibi"], ink="rope", marked=["alibi"])
    cuts = [("cut  {}", 3.0)]
    panel = length_panel([*rows, *seeds], styles, AXIS, y="NLL", levels=cuts)
    (axes,) = drawn(panel)
    assert_shows(axes, rows)
    by_name = named(axes)
    close(*by_name["rope"].thin, LENGTHS, [2.9, 3.4, 4.2])
    assert not by_name["alibi"].thin
    assert levels(axes) == [3.0]
    labels = [("rope", "4.250"), ("alibi †", "3.100 at 128"), ("cut", "3.000")]
    assert [end[:2] for end in ends(axes)] == labels
    hollow = [line for line in lines(axes) if line.get_markerfacecolor() == "white"]
    assert {line.get_color() for line in hollow} == {styles["alibi"].color}


def test_dots_are_rows_with_intervals_from_top_to_bottom():
    rows = [
        ResultRow("a", "difference", -0.3, 64, low=-0.4, high=-0.2),
        ResultRow("b", "difference", 0.1, 64),
    ]
    styles = styles_of(["a", "b"], marked=["b"])
    (axes,) = drawn(dots_panel(rows, styles, band=0.02, shared=rows))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b †"]
    assert axes.yaxis_inverted()
    dots = [line for line in lines(axes) if line.get_marker() in "s^"]
    assert [line.get_xydata().tolist() for line in dots] == [[[-0.3, 0]], [[0.1, 1]]]
    assert dots[1].get_markerfacecolor() == "white"  # a point estimate
    (bar,) = (each.get_segments() for each in axes.collections if each.get_segments())
    assert bar[0].tolist() == [[-0.4, 0], [-0.2, 0]]


MANY = [3.0, *np.linspace(2.4, 2.5, 24).tolist(), 9.0]


@pytest.mark.parametrize("last", [[2.4] * 6, [2.4, 9.0, 2.41, 2.5, 3.1, 2.39], MANY])
def test_text_does_not_overlap_or_leave_the_figure(last):
    lengths = [256, 512, 1024, 2048, 4096]
    names = ["as trained", "a method with a name", *(f"method {n}" for n in range(2, len(last)))]
    values = np.linspace(2.4, last, 5).T
    rows = rows_of(dict(zip(names, values, strict=True)), half=0.1, lengths=lengths)
    styles = styles_of(names, "as trained", rows)
    level = [("context truncated to 256  {}", 2.4)]
    top = top_of_colored(rows, styles)
    panel = length_panel(
        rows,
        styles,
        LengthAxis(lengths, [256]),
        y="NLL",
        levels=level,
        top=top,
    )
    (axes,) = drawn(panel, x="context length")
    assert len(ends(axes)) == len(names) + 1
    assert_text_is_readable(axes.figure)
    if len(last) > 12:  # grey lines far above all others leave the axes
        assert axes.get_ylim()[1] < 4
        assert ends(axes)[0].value == "9.000"
