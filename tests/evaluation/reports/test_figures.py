from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from evaluation.reports.charts import FAINT, INK, Curve, FigureText, spread, within
from evaluation.reports.loss_report import loss_by_length, styled


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.1))
def test_labels_do_not_overlap(expected, gap):
    expected = sorted(expected)
    placed = spread(expected, gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert sum(placed) == pytest.approx(sum(expected), abs=1e-6)
    if all(b - a >= gap for a, b in pairwise(expected)):
        assert placed == pytest.approx(expected)


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=12), st.floats(0.01, 0.09))
def test_labels_stay_within_axes(expected, gap):
    placed = within(spread(sorted(expected), gap), gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= -1e-9 and placed[-1] <= 1 + 1e-9


def test_best_lines_are_colored_and_outliers_annotated():
    names = ["as trained", *(f"method {i}" for i in range(20)), "far off"]
    ends = [3.0, *np.linspace(2.4, 3.2, 20), 9.0]
    lines = [
        Curve(n, [256.0, 512.0], [2.4, float(end)]) for n, end in zip(names, ends, strict=True)
    ]
    figure = loss_by_length(lines, 2.4, [256], FigureText("A title", "runs/x"))
    axes = figure.axes[0]
    assert axes.get_ylim()[1] < 4
    color = {text.get_text().split("  ")[0]: text.get_color() for text in axes.texts}
    labels = {text.get_text() for text in axes.texts}
    assert "far off  9.00 ↑" in labels and "method 19  3.20" in labels
    assert color["as trained"] == INK and color["far off"] == color["method 7"] == FAINT
    assert len({color[f"method {i}"] for i in range(7)} - {FAINT, INK}) == 7


MANY = [3.0, *np.linspace(2.4, 2.5, 24).tolist(), 9.0]


@pytest.mark.parametrize(
    "ends", [[2.4, 2.4, 2.4, 2.4, 2.4, 2.4], [2.4, 9.0, 2.41, 2.5, 3.1, 2.39], MANY]
)
def test_text_does_not_overlap_or_leave_the_figure(ends):
    names = ["as trained", "linear", "ntk", "yarn", "window", "a method with a name"]
    names += [f"method {i}" for i in range(len(names), len(ends))]
    xs = [256.0, 512.0, 1024.0, 2048.0, 4096.0]
    half = np.array([np.nan, 0.1, 0.1, 0.2, 0.1])
    lines = [
        Curve(name, xs, y := np.linspace(2.4, end, 5), low=y - half, high=y + half)
        for name, end in zip(names, ends, strict=True)
    ]
    figure = loss_by_length(
        lines, 2.4, [256], FigureText("A title", "runs/x: targets", "Bars: intervals.")
    )
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    ticks = [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
    texts = [
        t
        for t in [*axes.texts, *figure.texts, *axes.get_xticklabels(), *ticks, axes.yaxis.label]
        if t.get_text()
    ]
    # An annotation's own extent holds its leader line; the words alone are what must not collide.
    boxes = [Text.get_window_extent(text, renderer) for text in texts]
    labels = [
        t for t in axes.texts if t.get_text().split("  ")[0] in [*names, "context truncated to 256"]
    ]
    assert len(labels) == len(names) + 1
    width, height = figure.bbox.size
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text.get_text()
    for i, a in enumerate(boxes):
        for j in range(i):
            shared = (
                min(a.x1, boxes[j].x1) - max(a.x0, boxes[j].x0),
                min(a.y1, boxes[j].y1) - max(a.y0, boxes[j].y0),
            )
            assert min(shared) <= 1.0, (texts[i].get_text(), texts[j].get_text())


@pytest.mark.parametrize("seed", range(5))
def test_colors_go_to_the_curves_that_are_best_at_the_longest_length(seed):
    """Ten curves that end at different lengths, in any order; a short curve has the lowest
    losses."""
    ends = [(64, 0.1), (64, 0.2), *((256, 3.0 + 0.1 * n) for n in range(6)), (128, 1.0), (128, 0.9)]
    curves = [
        Curve(f"{end}-{y}", [16, 32, end], [y + 1, y + 0.5, y], low=(), high=()) for end, y in ends
    ]
    order = np.random.default_rng(seed).permutation(len(curves))
    marked = styled([curves[i] for i in order])
    colored = {one.label for one in marked if one.color != FAINT}
    assert colored == {*(f"256-{3.0 + 0.1 * n}" for n in range(6)), "128-0.9"}
    assert len({one.color for one in marked if one.color != FAINT}) == len(colored)
