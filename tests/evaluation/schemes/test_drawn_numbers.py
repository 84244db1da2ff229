"""Figures of schemes show the numbers of their tables."""

import numpy as np
import pytest

from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.scheme_figures import FIGURES, FigureRequest
from tests.artists import close, labelled, lines, points

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
