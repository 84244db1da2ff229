"""Figures of schemes: numbers against closed forms, and layout."""

import math
from typing import Literal

import pytest

from model.attention.mask import AttentionView
from model.position import SCHEMES, AttentionPlan, PositionalScheme, PositionSettings
from scripts.plots import plot_positions
from scripts.plots.plot_positions import FIGURES, FigureRequest
from tests.artists import assert_text_is_readable, close, ends, labelled, lines, points

REQUEST = FigureRequest(8, 4, 300, thetas=[100.0, 1e4], factor=4.0, distance=20, tokens=5, head=1)


def column(drawing, value: str, **where) -> list:
    """The values of a column in the rows where others have given values."""
    _, table = drawing
    for key, wanted in where.items():
        table = table[table[key] == wanted]
    return table[value].tolist()


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
    figure, table = FIGURES[name](REQUEST)
    table = table.dropna(subset=y)
    panels = table.groupby(panel, sort=False) if panel else [("", table)]
    for axes, (_, rows) in zip(figure.axes, panels, strict=True):
        drawn = labelled(axes) if label else {"": points(lines(axes)[0])}
        curves = rows.groupby(label, sort=False) if label else [("", rows)]
        assert len(drawn) == len(curves)
        for line, curve in curves:
            close(drawn[f"pair {line}" if label == "pair" else line], curve[x], curve[y])


def test_encodings_match_source_document():
    """Four tokens of two ones each. The document prints additions without the token for the first
    five."""
    drawing = plot_positions.encodings(FigureRequest(tokens=4))
    printed = {
        "integer": [0, 0, 1, 1, 2, 2, 3, 3],
        "unit_interval": [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75],
        "binary": [0, 0, 0, 1, 1, 0, 1, 1],
        "sine": [0, 0, 0.84147098, 0.47942554, 0.90929743, 0.84147098, 0.14112001, 0.99749499],
        "sinusoidal": [
            0,
            1,
            0.84147098,
            0.54030231,
            0.90929743,
            -0.41614684,
            0.14112001,
            -0.9899925,
        ],
    }
    for name, numbers in printed.items():
        assert column(drawing, "value", scheme=name) == pytest.approx(
            [1 + x for x in numbers], abs=1e-8
        )
    turned = [1, 1, -0.30116868, 1.38177329, -1.32544426, 0.49315059, -1.1311125, -0.84887249]
    assert column(drawing, "value", scheme="rope") == pytest.approx(turned, abs=1e-8)


def test_inner_products_are_sums_of_cosines():
    drawing = plot_positions.inner_product(FigureRequest(dim=10, thetas=[70.0], distance=9))
    distances = column(drawing, "distance", features=10)
    assert distances == list(range(-9, 10))
    frequencies = [70 ** (-2 * k / 10) for k in range(5)]
    expected = [sum(math.cos(d * f) for f in frequencies) for d in distances]
    assert column(drawing, "inner_product", features=10) == pytest.approx(expected, abs=1e-12)
    assert column(drawing, "inner_product", features=2) == pytest.approx(
        [math.cos(d) for d in range(-4, 5)]
    )


def test_decay_matches_independent_sum():
    """Computed for 128 features and base 10,000 outside of this project."""
    distances = [0, 1, 2, 5, 10, 20, 50, 100, 128, 256]
    known = [32.5, 31.5382, 28.956, 20.8454, 17.9541, 15.2424, 12.6295, 10.2273, 9.2729, 6.5431]
    values = column(plot_positions.decay(FigureRequest()), "bound", scheme="rope, base 10,000")
    assert len(values) == 257
    assert [values[distance] for distance in distances] == pytest.approx(known, abs=6e-5)


def test_angles_match_he_xu():
    drawing = plot_positions.angles(FigureRequest())
    before = column(drawing, "angle_radians", scheme="rope", pair=0)
    # their text, on distances 6 and 7
    assert before[5] == 6
    assert before[6] == pytest.approx(0.7168, abs=5e-5)
    after = column(drawing, "angle_radians", scheme="he_xu", pair=0)
    assert after == pytest.approx([d * math.pi / 4096 for d in range(1, 51)], rel=1e-12)
    slow = column(drawing, "angle_radians", scheme="he_xu", pair=32)
    assert slow == pytest.approx(
        [d * math.pi / 4096 * 10_000**-0.5 for d in range(1, 51)], rel=1e-12
    )


@pytest.mark.parametrize(
    ("theta", "dim", "length", "rotated_pairs"),
    [
        (10_000.0, 128, 4096, 46),
        (10_000.0, 128, 2048, None),
        (5e5, 64, 8192, None),
        (50.0, 8, 4096, 4),
    ],
)
def test_incomplete_rotation_pairs_are_past_critical_dimension(theta, dim, length, rotated_pairs):
    """D_c = 2⌈D/2 · log_b(L0 / 2π)⌉ (Liu et al. 2023); 92 for the first case."""
    turns = math.log(length / (2 * math.pi))
    pairs = min(dim // 2, math.ceil(dim / 2 * turns / math.log(theta)))
    assert rotated_pairs in (None, pairs)
    drawing = plot_positions.wavelengths(
        FigureRequest(dim=dim, train_length=length, thetas=[theta])
    )
    whole = column(drawing, "whole_turn")
    assert whole == [True] * pairs + [False] * (dim // 2 - pairs)
    assert f": {dim // 2 - pairs} of {dim // 2}" in ends(drawing[0].axes[0])[0].name
    expected = [2 * math.pi * theta ** (2 * k / dim) for k in range(dim // 2)]
    assert column(drawing, "wavelength_tokens") == pytest.approx(expected, rel=1e-12)


def biases(drawing, label):
    """Bias by distance."""
    distances, values = (column(drawing, key, scheme=label) for key in ("distance", "bias_nats"))
    return dict(zip(distances, values, strict=True))


class AddedSettings(PositionSettings):
    name: Literal["added"] = "added"
    form: Literal["root", "root_again", "square"] = "root"


class Added(PositionalScheme):
    def plan(self, context):
        power = 2.0 if self.settings.form == "square" else 0.5
        pairs = context.distance_mask(lambda h, d: 5 - (h + 1) * d.double() ** power)
        return AttentionPlan(read=lambda q, k: [AttentionView(q, k, pairs)])


def test_registered_scheme_appears_in_figures(monkeypatch):
    monkeypatch.setitem(SCHEMES, "added", (AddedSettings, Added))
    drawing = plot_positions.biases(FigureRequest(dim=8, heads=4, train_length=50, head=1))
    assert "added root_again" not in column(drawing, "scheme")
    for label, power in (("added root", 0.5), ("added square", 2)):
        drawn = biases(drawing, label)
        assert drawn == pytest.approx({d: 5 - 2 * d**power for d in drawn})


def test_methods_match_frequency_formulas():
    drawing = plot_positions.methods(FigureRequest(dim=16, train_length=512, factor=4.0))
    turns = [512 * 10_000 ** (-k / 8) / (2 * math.pi) for k in range(8)]
    kept = [min(max((turn - 1) / 3, 0), 1) for turn in turns]
    expected = {
        "none": [1.0] * 8,
        "linear": [0.25] * 8,
        "ntk = dynamic": [4 ** (-2 * k / 14) for k in range(8)],
        "drop": [0.0] * 8,
        "llama3": [share + (1 - share) / 4 for share in kept],
    }
    for method, ratios in expected.items():
        found = column(drawing, "frequency_ratio", method=method)
        assert found == pytest.approx(ratios, rel=1e-12)
    assert any("longrope" in text.get_text() for text in drawing[0].texts)


REQUESTS = {
    "usual": FigureRequest(),
    "small": FigureRequest(8, 3, 300, thetas=[5e7], factor=32.0, distance=20, tokens=5, head=0),
    "large": FigureRequest(64, 12, 5000, thetas=[100.0, 1e4, 5e5], factor=1.5),
}


@pytest.mark.parametrize(
    ("name", "request_name"),
    [
        ("decay", "usual"),
        ("biases", "usual"),
        ("wavelengths", "large"),
        ("methods", "small"),
        ("angles", "usual"),
        ("encodings", "small"),
        ("inner_product", "large"),
    ],
)
def test_text_does_not_overlap_or_leave_the_figure(name, request_name):
    assert_text_is_readable(FIGURES[name](REQUESTS[request_name])[0])
