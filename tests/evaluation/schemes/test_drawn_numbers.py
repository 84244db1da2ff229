"""Figures of schemes show the numbers of their tables."""

import numpy as np
import pytest

from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.scheme_figures import FIGURES, FigureRequest
from tests.artists import close, ends, labelled, levels, lines, points
from tests.evaluation.schemes.test_figures import column

REQUEST = FigureRequest(
    SchemeShape(8, 4, 300), thetas=[100.0, 1e4], factor=4.0, distance=20, tokens=5, head=1
)


@pytest.mark.parametrize(
    "name, panel, label, x, y",
    [
        ("inner_product", "features", None, "distance", "inner_product"),
        ("decay", "panel", "scheme", "distance", "bound"),
        ("angles", "scheme", "pair", "distance", "angle_radians"),
        ("biases", None, "scheme", "distance", "against_distance_0"),
        ("methods", None, "method", "pair", "frequency_ratio"),
    ],
)
def test_lines_match_their_tables(name, panel, label, x, y):
    drawing = FIGURES[name](REQUEST)
    expected: dict[str, dict[str, list]] = {}
    for row in drawing.rows:
        row = dict(zip(drawing.columns, row, strict=True))
        where = row[panel] if panel else ""
        line = f"pair {row['pair']}" if label == "pair" else row.get(label, "")
        if not np.isnan(row[y]):
            expected.setdefault(where, {}).setdefault(line, []).append((row[x], row[y]))
    for axes, curves in zip(drawing.figure.axes, expected.values(), strict=True):
        drawn = labelled(axes) if label else {"": points(lines(axes)[0])}
        assert drawn.keys() == curves.keys()
        for line, numbers in curves.items():
            close(drawn[line], *zip(*numbers, strict=True))


def test_encodings_are_numbered_points():
    drawing = FIGURES["encodings"](REQUEST)
    for axes in drawing.figure.axes:
        values = column(drawing, "value", scheme=axes.get_label())
        if len(values) == 2 * 5:
            (dots,) = [points(line) for line in lines(axes) if line.get_marker() == "o"]
            close(dots, values[::2], values[1::2])
            numbered = {text.get_text(): text.xy for text in axes.texts}
            assert [numbered[str(n)] for n in range(5)] == [pytest.approx(dot) for dot in dots]


def test_wavelengths_are_grouped_by_full_rotation():
    drawing = FIGURES["wavelengths"](REQUEST)
    (axes,) = drawing.figure.axes
    expected: dict[tuple, list] = {}
    for base, pair, wavelength, whole in drawing.rows:
        expected.setdefault((base, not whole), []).append((pair, wavelength))
    for line, numbers in zip(lines(axes), expected.values(), strict=True):
        close(points(line), *zip(*numbers, strict=True))
    slow = {base: len(expected.get((base, True), [])) for base in ("base 10,000", "base 100")}
    assert [end.name for end in ends(axes)] == [f"{base}: {n} of 4" for base, n in slow.items()]
    assert levels(axes) == [300]
