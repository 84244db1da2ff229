"""Figures of schemes show the numbers of their tables."""

import pandas as pd
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
    table = pd.DataFrame(drawing.rows, columns=drawing.columns).dropna(subset=y)
    panels = table.groupby(panel, sort=False) if panel else [("", table)]
    for axes, (_, rows) in zip(drawing.figure.axes, panels, strict=True):
        drawn = labelled(axes) if label else {"": points(lines(axes)[0])}
        curves = rows.groupby(label, sort=False) if label else [("", rows)]
        assert len(drawn) == len(curves)
        for line, curve in curves:
            close(drawn[f"pair {line}" if label == "pair" else line], curve[x], curve[y])
