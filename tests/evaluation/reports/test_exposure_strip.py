"""The exposure strip below a figure shows the recorded counts and does not shrink the axes above
it."""

import numpy as np
import pytest

from data.sampling.exposure import Exposure
from evaluation.reports.charts import Curve, FigureText
from evaluation.reports.exposure_strip import add_strip, shares, thinned
from evaluation.reports.loss_report import loss_by_length


def plain(length: int, steps: int, first: int = 0) -> Exposure:
    """One window of `length` tokens a step."""
    positions = np.concatenate([np.full(-first, 7), np.full(length, steps)])
    return Exposure(
        positions, steps * np.arange(length, 0, -1), first, length * steps, steps, steps
    )


def figure_of(lengths: list[int]):
    line = Curve("as trained", [float(x) for x in lengths], [3.0 + i for i in range(len(lengths))])
    return loss_by_length([line], 3.0, [lengths[0]], FigureText("t", "s", "below all"))


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


def test_strip_ends_at_trained_length():
    lengths = [64, 128, 512]
    bare = figure_of(lengths)
    figure = figure_of(lengths)
    axes = figure.axes[0]
    strip = add_strip(figure, axes, plain(64, 5))

    def inches(one):
        box = one.axes[0].get_position()
        (width, height) = one.get_size_inches()
        return box.width * width, box.height * height, (1 - box.y1) * height

    assert inches(figure) == pytest.approx(inches(bare))
    assert strip.get_xlim() == axes.get_xlim() and strip.get_xlabel() and not axes.get_xlabel()
    assert axes.get_position().y0 > strip.get_position().y1
    for drawn, last in zip(strip.lines, (1 / 64, 1 / 64), strict=True):
        assert drawn.get_xdata()[-1] == 64 and drawn.get_ydata()[-1] == pytest.approx(last)
    positions, distances = strip.lines
    assert positions.get_ydata() == pytest.approx(np.full(len(positions.get_ydata()), 1 / 64))
    assert distances.get_ydata()[0] == pytest.approx(1.0)
    assert strip.texts[0].get_text() == "never trained"
    title, *_, note = figure.texts
    assert note.get_text() == "below all" and note.get_position()[1] < strip.get_position().y0
    assert title.get_position()[1] > axes.get_position().y1
