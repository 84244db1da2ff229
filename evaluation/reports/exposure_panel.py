"""A panel of a figure: how often training used each position and each distance of its x axis."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from data.sampling.exposure import Exposure
from evaluation.reports.charts import LengthAxis
from evaluation.reports.figures import COLOURS, DASHED, Curve, Panel

PER_OCTAVE = 12  # points of a line for each doubling of the context


def shares(counts: np.ndarray, tokens: int, first: int = 0) -> np.ndarray:
    """The curve of one count (2, n): x = 1, 2, ... tokens of context, and the share of the training
    tokens at position x − 1 (or with a key at distance x − 1), as means of bins of equal width on a
    log scale up to the last position trained on. `first`: position of the first count; positions
    below 0 are left out."""
    x = np.arange(first, first + len(counts)) + 1.0
    table = pd.DataFrame({"x": x, "share": counts / max(tokens, 1)})[x > 0]
    means = table.groupby(np.floor(PER_OCTAVE * np.log2(table.x))).mean()
    means = pd.concat([means, table[table.share > 0][-1:]])
    return means[means.share > 0].to_numpy().T


def exposure_panel(exposure: Exposure, axis: LengthAxis) -> Panel:
    """A panel over tokens of context: the exposure in training. A line ends at the last trained
    position."""
    positions = shares(exposure.positions, exposure.tokens, exposure.first)
    distances = shares(exposure.distances, exposure.tokens)
    curves = [
        Curve("at this position", *positions, COLOURS[0]),
        Curve("with a key at this distance", *distances, COLOURS[1], dash=DASHED),
    ]

    def scales(axes: Axes) -> None:
        axis.apply(axes)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))

    heading = "share of the training tokens; lines end where nothing was trained"
    return Panel(curves, heading, scales=scales, height=1.7)
