"""The panel of exposure below a figure shows the recorded counts."""

import numpy as np
import pytest
from matplotlib.text import Text

from data.sampling.exposure import Exposure
from evaluation.reports.charts import Curve, FigureText
from evaluation.reports.exposure_panel import shares, thinned
from evaluation.reports.loss_report import loss_by_length
from tests.artists import lines, points


def plain(length: int, steps: int, first: int = 0) -> Exposure:
    """One window of `length` tokens a step."""
    positions = np.concatenate([np.full(-first, 7), np.full(length, steps)])
    return Exposure(
        positions, steps * np.arange(length, 0, -1), first, length * steps, steps, steps
    )


def test_exposure_fractions_by_context_length():
    for first in (0, -3):
        exposure = plain(8, 5, first)
        x, y = shares(exposure.positions, exposure.tokens, exposure.first)
        assert x.tolist() == list(range(1, 9)) and y == pytest.approx(np.full(8, 1 / 8))
    x, y = shares(exposure.distances, exposure.tokens)
    assert y == pytest.approx([1 - d / 8 for d in range(8)])


def test_thinning_keeps_short_lengths_and_means():
    x = np.arange(1, 4097, dtype=float)
    centers, means = thinned(x, x)
    assert (
        np.allclose(centers[:4], [1, 2, 3, 4])
        and len(centers) < 140
        and (np.diff(centers) > 0).all()
    )
    assert means == pytest.approx(centers, rel=0.002)


def test_panel_ends_at_trained_length_below_the_losses():
    lengths = [64.0, 128.0, 512.0]
    line = Curve("as trained", lengths, [3.0, 4.0, 5.0])
    text = FigureText("t", "s", "below all")
    figure = loss_by_length([line], 3.0, [64], text, exposure=plain(64, 5))
    axes, panel = figure.axes
    assert panel.get_xlim() == axes.get_xlim() and panel.get_xlabel() and not axes.get_xlabel()
    assert axes.get_position().y0 > panel.get_position().y1
    positions, distances = lines(panel)
    for drawn in (positions, distances):
        assert points(drawn)[-1] == (64, pytest.approx(1 / 64))
    assert [y for _, y in points(positions)] == pytest.approx([1 / 64] * len(points(positions)))
    assert points(distances)[0][1] == pytest.approx(1.0)
    (area,) = [patch for patch in panel.patches if patch.get_width() > 0]
    assert area.get_x() == 64
    figure.canvas.draw()
    width, height = figure.bbox.size
    for text in panel.texts:  # no label is clipped
        box = Text.get_window_extent(text)
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
