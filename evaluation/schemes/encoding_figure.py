"""The figure of positional encodings: points in the plane, or in an oblique view of a box."""

import math

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evaluation.reports.figures import COLOURS, INK, SOFT, STYLE, WIDTH, FigureText, canvas

PALE = "#CFCFCF"
CUBE = (0.46, 0.3)  # direction of the third axis in an oblique projection


def encoding_figure(
    points: dict[str, np.ndarray], formulas: dict[str, str], text: FigureText
) -> Figure:
    """A panel for each scheme: its points (tokens, 2 or more), numbered, joined in order."""
    columns = min(3, len(points))
    rows = math.ceil(len(points) / columns)
    with rc_context(STYLE):
        figure, (low, high) = canvas(text, 2.45 * rows)
        inches = figure.get_size_inches()[1]
        for n, (name, at) in enumerate(points.items()):
            left = (n % columns) / columns
            top = high - (high - low) * (n // columns) / rows
            area = (
                left + 0.42 / WIDTH,
                top - 2.0 / inches,
                1 / columns - 0.5 / WIDTH,
                1.52 / inches,
            )
            axes = figure.add_axes(area, label=name)
            axes.set_title(
                name.replace("_", " "),
                loc="left",
                fontsize=9.5,
                color=INK,
                pad=16,
            )
            _write(axes, formulas.get(name, ""), (0, 1), (0, 5))
            _draw(
                axes,
                at,
                np.array([area[2] * WIDTH * 72, area[3] * inches * 72]),
            )
        return figure


def _draw(axes: Axes, points: np.ndarray, size: np.ndarray) -> None:
    """Draw points into axes of that size in points, with equal scales."""
    deep = points.shape[1] > 2
    flat = _oblique(points)
    lengths = np.linalg.norm(points, axis=1)
    if deep:
        _box(axes, points)
    elif np.allclose(lengths, lengths[0]):  # rotated, not shifted
        for point in flat:
            axes.plot(
                *np.stack([[0, 0], point]).T,
                color=PALE,
                lw=0.8,
                zorder=1,
            )
    axes.plot(*flat.T, color=COLOURS[5], lw=1.0, zorder=2)
    axes.plot(
        *flat.T,
        ls="",
        marker="o",
        ms=4.6,
        color=COLOURS[0],
        mec="white",
        mew=0.6,
        zorder=4,
    )
    for n, (point, away) in enumerate(zip(flat, _outwards(flat), strict=True)):
        axes.annotate(
            str(n),
            point,
            8.5 * away,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.5,
            color=INK,
            zorder=5,
        )
    low = flat.min(0)
    high = flat.max(0)
    reach = max((high - low) / (size - 2 * 15)) * size / 2  # 15 points of room for the numbers
    axes.set_xlim((low + high)[0] / 2 - reach[0], (low + high)[0] / 2 + reach[0])
    axes.set_ylim((low + high)[1] / 2 - reach[1], (low + high)[1] / 2 + reach[1])
    if not deep:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("feature 1", color=SOFT, fontsize=8.5, labelpad=1)
        axes.set_ylabel("feature 2", color=SOFT, fontsize=8.5, labelpad=1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        axes.tick_params(labelsize=8, length=2.5)


def _oblique(points: np.ndarray) -> np.ndarray:
    """(N, 2) two features as they are; of more, the last across, the one before it up, each before
    those into depth."""
    if points.shape[1] == 2:
        return points
    flat = points[:, :-3:-1].copy()
    for k in range(points.shape[1] - 2):
        flat += points[:, -3 - k : points.shape[1] - 2 - k] * CUBE * 0.55**k
    return flat


def _outwards(path: np.ndarray) -> np.ndarray:
    """(N, 2) unit vectors across the path at each point, on the side away from its middle."""
    along = np.gradient(path, axis=0)
    along = np.where(
        np.linalg.norm(along, axis=1, keepdims=True) > 1e-9,
        along,
        [[1.0, 0.0]],
    )
    across = np.stack([-along[:, 1], along[:, 0]], 1)
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    side = np.sum(across * (path - path.mean(0)), axis=1, keepdims=True)
    return across * np.where(side < -1e-9, -1, 1)


def _box(axes: Axes, points: np.ndarray) -> None:
    """The edges of the box whose corners the points are, in place of axes."""
    features = points.shape[1]
    ends = np.stack([points.min(0), points.max(0)])
    bits = np.arange(2**features)[:, None] >> np.arange(features) & 1
    flat = _oblique(np.take_along_axis(ends, bits, 0))
    for a, b in (
        (a, a | 1 << k) for a in range(len(flat)) for k in range(features) if not a >> k & 1
    ):
        axes.plot(*flat[[a, b]].T, color=PALE, lw=0.8, zorder=1)
    axes.set_axis_off()
    _write(
        axes,
        f"features {features}, {features - 1}, {features - 2}:\nacross, up, into depth",
        (0, 0),
        (0, -26),
    )


def _write(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
) -> None:
    axes.annotate(
        text,
        at,
        shift,
        "axes fraction",
        "offset points",
        fontsize=8.5,
        color=SOFT,
        annotation_clip=False,
    )
