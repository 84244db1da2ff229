from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from evaluation.figures import Line, length_figure, spread


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.1))
def test_labels_are_spread_apart_and_stay_where_they_can(wanted, gap):
    wanted = sorted(wanted)
    placed = spread(wanted, gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6)
    if all(b - a >= gap for a, b in pairwise(wanted)):
        assert placed == pytest.approx(wanted)


@pytest.mark.parametrize("ends", [[2.4, 2.4, 2.4, 2.4, 2.4, 2.4], [2.4, 9.0, 2.41, 2.5, 3.1, 2.39]])
def test_no_text_overlaps_another_or_leaves_the_figure(ends):
    names = ["as trained", "linear", "ntk", "yarn", "window", "a rule with a name"]
    xs = [256.0, 512.0, 1024.0, 2048.0, 4096.0]
    lines = [
        Line(name, xs, np.linspace(2.4, end, 5).tolist(), [float("nan"), 0.1, 0.1, 0.2, 0.1])
        for name, end in zip(names, ends, strict=True)
    ]
    figure = length_figure(
        lines, 2.4, 256, title="A title", subtitle="runs/x: targets", note="Bars: intervals."
    )
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    ticks = [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
    texts = [t for t in [*axes.texts, *figure.texts, *axes.get_xticklabels(), *ticks] if t.get_text()]
    # An annotation's own extent holds its leader line; the words alone are what must not collide.
    boxes = [Text.get_window_extent(text, renderer) for text in texts]
    labels = [t for t in axes.texts if t.get_text().split("  ")[0] in [*names, "context cut to 256"]]
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
