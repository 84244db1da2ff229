"""The panel of exposure below a figure shows the recorded counts."""

import numpy as np
import pytest

from data.sampling.exposure import Exposure
from evaluation.reports.charts import LengthAxis
from evaluation.reports.exposure_panel import exposure_panel, shares, thinned
from evaluation.reports.figures import FigureText, panels
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
    assert centers[:4].tolist() == pytest.approx([1, 2, 3, 4]) and len(centers) < 140
    assert (np.diff(centers) > 0).all() and means == pytest.approx(centers, rel=0.002)


def test_panel_ends_at_the_trained_length():
    panel = exposure_panel(plain(64, 5), LengthAxis([64, 128, 512], trained=[64]))
    figure = panels([panel], FigureText("t", "s", "below all"))
    (axes,) = figure.axes
    assert axes.get_xlim() == pytest.approx((64 / 2**0.25, 512 * 2**0.25))
    positions, distances = (points(line) for line in lines(axes))
    for drawn in (positions, distances):
        assert drawn[-1] == (64, pytest.approx(1 / 64))
    assert [y for _, y in positions] == pytest.approx([1 / 64] * len(positions))
    assert distances[0][1] == pytest.approx(1.0)
