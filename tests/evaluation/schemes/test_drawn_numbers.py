"""Figures of schemes show the numbers of their tables."""

import pytest
from matplotlib.colors import to_hex

from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.scheme_figures import FIGURES, FigureRequest
from tests.artists import close, ends, keys, labelled, levels, lines, points
from tests.evaluation.schemes.test_figures import column


def test_lines_match_their_tables():
    """What is drawn, figure by figure, and under which name."""
    ask = FigureRequest(
        SchemeShape(8, 4, 300), thetas=[100.0, 1e4], factor=4.0, distance=20, tokens=5, head=1
    )
    for name, panels, label, x, y in (
        ("inner_product", "features", None, "distance", "inner_product"),
        ("decay", "panel", "scheme", "distance", "bound"),
        ("angles", "scheme", "pair", "distance", "angle_radians"),
        ("biases", None, "scheme", "distance", "against_distance_0"),
        ("methods", None, "method", "pair", "frequency_ratio"),
    ):
        drawing = FIGURES[name](ask)
        expected = dict.fromkeys(column(drawing, panels)) if panels else [None]
        for axes, panel in zip(drawing.figure.axes, expected, strict=True):
            assert axes.get_axisbelow() is True  # no grid over the lines
            where = {panels: panel} if panels else {}
            labels = dict.fromkeys(column(drawing, label, **where)) if label else [None]
            found = labelled(axes) if label else {None: points(lines(axes)[0])}
            overrides = {one: f"pair {one}" if label == "pair" else one for one in labels}
            assert set(found) == set(overrides.values())
            colors = keys(drawing.figure) | {end.name: end.color for end in ends(axes)}
            for one, word in overrides.items():
                own = where | ({label: one} if label else {})
                xs, ys = (column(drawing, key, **own) for key in (x, y))
                close(
                    found[word],
                    *zip(*((a, b) for a, b in zip(xs, ys, strict=True) if b == b), strict=True),
                )
                if label:
                    (line,) = [line for line in lines(axes) if line.get_label() == word]
                    assert to_hex(line.get_color()) == colors[word]
    drawing = FIGURES["encodings"](ask)
    for axes in drawing.figure.axes:
        values = column(drawing, "value", scheme=axes.get_label())
        if len(values) == 2 * 5:
            (dots,) = [points(line) for line in lines(axes) if line.get_marker() == "o"]
            close(dots, values[::2], values[1::2])
            labels = {text.get_text(): text.xy for text in axes.texts if text.get_text().isdigit()}
            assert {n: tuple(labels[str(n)]) for n in range(5)} == {
                n: pytest.approx(at) for n, at in enumerate(dots)
            }
    drawing = FIGURES["wavelengths"](ask)
    (axes,) = drawing.figure.axes
    groups = [points(line) for line in lines(axes)]
    expected = [
        [(row[1], row[2]) for row in drawing.rows if (row[0], row[3]) == (base, whole)]
        for base in ("base 100", "base 10,000")
        for whole in (True, False)
    ]
    for found, of in zip(groups, [one for one in expected if one], strict=True):
        close(found, *zip(*of, strict=True))
    assert [end.name for end in ends(axes)] == [
        f"base 10,000: {len(expected[3])} of 4",
        f"base 100: {len(expected[1])} of 4",
    ]
    assert levels(axes) == [300]
