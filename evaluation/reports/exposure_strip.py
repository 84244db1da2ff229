"""A strip under a figure: how often training used each position and each distance of its x axis."""

import math

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from data.sampling.exposure import Exposure
from evaluation.reports.charts import COLOURS, INK, SOFT, STYLE, fix_ticks, grid, power_of_ten

# inches, of the strip and between it and the axes above
HEIGHT = 0.95
GAP = 0.16
POSITIONS = COLOURS[0]
DISTANCES = COLOURS[1]
_DECADES = 9  # at most, on the axis of shares


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


def add_strip(figure: Figure, axes: Axes, exposure: Exposure) -> Axes:
    """Add a strip below `axes`, whose x axis is tokens of context, with the exposure in training.

    The figure keeps its size and moves up; label and ticks of the x axis move to the strip. Shares
    of zero are not drawn, so a line ends at the last trained position.
    """
    width, height = figure.get_size_inches()
    taller = height + HEIGHT + GAP
    figure.set_size_inches(width, taller)

    def up(share: float) -> float:
        return (share * height + HEIGHT + GAP) / taller

    place = axes.get_position()
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x, up(y) if y > 0.1 else y * height / taller))
    axes.set_position((place.x0, up(place.y0), place.width, place.height * height / taller))
    with rc_context(STYLE):
        bottom = place.y0 * height / taller
        high = HEIGHT / taller
        strip = figure.add_axes((place.x0, bottom, place.width, high))
        _draw(strip, exposure, axes.get_xlim())
        if axes.get_xscale() == "log":
            strip.set_xscale("log", base=2)
        strip.set_xlim(*axes.get_xlim())
        fix_ticks(strip, list(axes.get_xticks()))
        strip.set_xlabel(axes.get_xlabel(), color=INK)
        strip.set_ylabel("training tokens", color=INK, fontsize=8)
    axes.set_xlabel("")
    axes.tick_params(axis="x", labelbottom=False)
    return strip


def _draw(strip: Axes, exposure: Exposure, limits: tuple[float, float]) -> None:
    lowest = 1.0
    labels = []
    for label, counts, first, color, dash in (
        ("at this position", exposure.positions, exposure.first, POSITIONS, "-"),
        ("with a key at this distance", exposure.distances, 0, DISTANCES, (0, (4, 1.5))),
    ):
        x, y = shares(counts, exposure.tokens, first)
        if len(x):
            last = x[-1]
            (x, y) = thinned(x, y)
            # to the last trained position
            x = np.append(x[y > 0], last)
            y = np.append(y[y > 0], y[y > 0][-1])
            strip.plot(
                x,
                y,
                color=color,
                lw=1.6,
                ls=dash,
                solid_capstyle="butt",
                zorder=3,
            )
            lowest = min(lowest, float(y[x >= limits[0]].min(initial=1.0)))
            labels.append((label, (1.0, 0.78 - 0.3 * len(labels)), "axes fraction", color))
    decades = min(_DECADES, max(1, math.ceil(-math.log10(lowest) + 0.2)))
    strip.set_yscale("log")
    strip.set_ylim(10.0**-decades, 2.5)
    step = max(1, math.ceil(decades / 3))
    strip.yaxis.set_major_locator(FixedLocator([10.0**-k for k in range(0, decades + 1, step)]))
    strip.yaxis.set_minor_locator(NullLocator())
    strip.yaxis.set_major_formatter(
        FuncFormatter(
            lambda share, _: f"{100 * share:g}%" if share >= 0.001 else power_of_ten(share)
        )
    )
    strip.tick_params(axis="y", labelsize=7.5)
    grid(strip)
    end = max(len(exposure.positions) + exposure.first, len(exposure.distances))
    if end < limits[1]:
        strip.axvspan(end, limits[1], color="#F1F1F1", lw=0, zorder=0)
        labels.insert(0, ("never trained", (end, 0.5), ("data", "axes fraction"), SOFT))
    for text, at, where, color in labels:
        strip.annotate(
            text,
            at,
            (6, 0),
            where,
            "offset points",
            va="center",
            color=color,
            fontsize=8.5,
            annotation_clip=False,
        )
