"""A panel of a figure: how often training used each position and each distance of its x axis."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from data.sampling.exposure import Exposure
from evaluation.reports.charts import LengthAxis
from evaluation.reports.figures import COLOURS, DASHED, Curve, Panel


def shares(
    counts: np.ndarray,
    tokens: int,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The curve of one count: x = 1, 2, ... tokens of context and the share of the training tokens
    at position x − 1 (or with a key at distance x − 1). Bins below 0 are left out."""
    kept = counts[-first:] if first < 0 else counts
    start = max(first, 0)
    x = np.arange(start + 1, start + 1 + len(kept), dtype=np.float64)
    return x, kept / max(tokens, 1)


def thinned(
    x: np.ndarray,
    y: np.ndarray,
    per_octave: int = 12,
) -> tuple[np.ndarray, np.ndarray]:
    """Means of y in geometric bins of x (consecutive whole numbers), at the geometric centers."""
    bins = np.floor(np.log2(x) * per_octave).astype(np.int64)
    _, index, counts = np.unique(bins, return_inverse=True, return_counts=True)
    centers = np.exp2(np.bincount(index, weights=np.log2(x)) / counts)
    return centers, np.bincount(index, weights=y) / counts


def exposure_panel(exposure: Exposure, axis: LengthAxis) -> Panel:
    """A panel over tokens of context: the exposure in training. Shares of zero are not drawn, so a
    line ends at the last trained position."""
    curves = []
    for label, counts, first, color, dash in (
        ("at this position", exposure.positions, exposure.first, COLOURS[0], "-"),
        ("with a key at this distance", exposure.distances, 0, COLOURS[1], DASHED),
    ):
        x, y = shares(counts, exposure.tokens, first)
        if y.any():
            last = float(x[-1])
            x, y = thinned(x, y)
            x = np.append(x[y > 0], last)
            y = np.append(y[y > 0], y[y > 0][-1])
            curves.append(Curve(label, x, y, color, width=1.6, dash=dash))

    def scales(axes: Axes) -> None:
        axis.apply(axes)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))

    heading = "share of the training tokens; lines end where nothing was trained"
    return Panel(curves, heading, scales=scales, height=1.7)
