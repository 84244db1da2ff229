"""Plot what positional schemes compute, without training; takes a few seconds.

  python scripts/plots/plot_positions.py                 all figures, to docs/figures/positions
  python scripts/plots/plot_positions.py decay biases    some of them

figures:
  encodings      a token of ones at positions 0, 1, 2, ...: one panel per scheme
  inner_product  p_n · p_(n+d) of sinusoidal embeddings: depends on distance, not on direction
  decay          mean_j |Σ_(k<j) exp(i·d·θ_k)|, the bound on scores at distance d, by scheme, base and method
  angles         rotation angle between two tokens: RoPE and He and Xu's slower rotation
  wavelengths    wavelength of each pair of features; marked: longer than the trained length
  biases         bias added to a logit at distance d, in one head
  methods        frequencies under each scaling method, relative to the trained ones

Each figure is written as PNG, SVG with text as text, and CSV with the plotted numbers. The same
command writes the same bytes. Schemes and methods come from the registry, so new ones are included
automatically.
"""

import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from data.files import write_text
from evaluation.reports.figures import (
    COLOURS,
    DOTTED,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Panel,
    mark,
    panels,
    save,
)
from run_directory.console import Console
from scripts.plots import position_curves
from scripts.plots.position_curves import FigureRequest
from settings.script import Parser, run_main

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "positions"
DPI = 130
# The steps from counting to rotation, and what each does to a token x at position n.
STEPS = {
    "integer": "x + n",
    "unit_interval": "x + n/N",
    "binary": "x + the bits of n",
    "sine": "x + (sin n, sin n/2)",
    "sinusoidal": "x + (sin n, cos n)",
    "rope": "x turned by n radians",
}
HE_XU_DISTANCES = 50  # as far as their figures go
HE_XU = {
    "rope": r"before: $\theta_k = b^{-2k/D}$",
    "he_xu": r"after: $\theta_k = \pi/(2N)\cdot b^{-2k/D}$",
}
DISTANCE = "distance $d$, tokens"
PAIR = "pair $k$, fastest first"
DASHES = ((0, ()), (0, (6, 1.6)), (0, (2, 2)), (0, (7, 1.6, 1.6, 1.6)))
FEW = 64  # up to this many points are drawn as markers
PALE = "#CFCFCF"
CENTERED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
Drawn = tuple[Figure, pd.DataFrame]  # a figure and the numbers in it

_text = partial(FigureText, formula=True)


def plainly(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def draw(
    table: pd.DataFrame,
    text: FigureText,
    x: str,
    y: str,
    *,
    panel: str = "",
    label: str = "",
    at: tuple[str, str] | None = None,
    heading: Callable[[Any], str] = str,
    name: Callable[[Any], str] = str,
    dotted: Iterable[str] = (),
    marked: bool = False,
    scales: Callable[[Axes], object] = lambda axes: axes.margins(x=0.03),
    height: float = 2.9,
    **layout: Any,
) -> Drawn:
    """Draw the rows of a table as curves.

    Args:
        panel, label: columns whose values tell panels and curves apart.
        at: columns of the points; by default the last two.
        heading, name: of a panel and of a curve, by those values.
        dotted: names of curves that are dotted.
        marked: whether every curve has markers; else a first curve of few points.
        layout: as in `figures.panels`.
    """
    across, up = at or table.columns[-2:]
    shown = []
    for where, rows in table.groupby(table[panel] if panel else lambda _: "", sort=False):
        curves = []
        lines = rows.groupby(rows[label] if label else lambda _: "", sort=False)
        for n, (key, line) in enumerate(lines):
            dash = (0, (1, 1)) if name(key) in dotted else DASHES[n % len(DASHES)]
            style: dict[str, Any] = {"width": 1.4, "dash": dash}
            if marked:  # markers of consecutive lines do not coincide
                count = max(1, len(line) // 6)
                every = (n * count // len(lines), count)
                style |= {"marker": MARKERS[n % len(MARKERS)], "every": every}
            elif n == 0 and len(line) <= FEW:
                style |= {"width": 0.9, "marker": "o", "size": 4.2, "order": 4}
            xs, ys = line[[across, up]].to_numpy(float).T
            curves.append(Curve(name(key), xs, ys, COLOURS[n % len(COLOURS)], **style))
        shown.append(Panel(curves, heading(where), scales=scales, height=height))
    return panels(shown, text, x=x, y=y, **layout), table


def limits(table: pd.DataFrame) -> Callable[[Axes], None]:
    """Common linear scales for the numbers in the last two columns."""
    xs, ys = table.iloc[:, -2:].to_numpy(float).T

    def scales(axes: Axes) -> None:
        axes.set_xlim(xs.min(), xs.max())
        axes.set_ylim(ys.min() - 0.04 * np.ptp(ys), ys.max() + 0.04 * np.ptp(ys))

    return scales


def encodings(request: FigureRequest) -> Drawn:
    points = {name: position_curves.encodings(name, request.tokens).numpy() for name in STEPS}
    text = _text(
        f"The first {request.tokens} positions, from counting to rotation",
        "Encoded token x = (1, 1), or (1, 1, 1, ...) if the bits require more features.",
    )
    rows = [
        (name, n, k + 1, value.item())
        for name, at in points.items()
        for (n, k), value in np.ndenumerate(at)
    ]
    figure = panels([encoding_panel(name, at) for name, at in points.items()], text, columns=3)
    return figure, pd.DataFrame(rows, columns=["scheme", "position", "feature", "value"])


def encoding_panel(name: str, points: np.ndarray) -> Panel:
    """Encodings (tokens, 2 or more), numbered and joined in order. More than two features: on the
    edges of the box that contains them, the features before the last two into depth."""
    tokens, features = points.shape
    drawn = []
    flat = points
    if features > 2:
        depth = points[:, -3::-1] @ 0.55 ** np.arange(features - 2)
        flat = points[:, :-3:-1] + depth[:, None] * (0.46, 0.3)
        for a, b in combinations(range(tokens), 2):
            if (points[a] != points[b]).sum() == 1:
                drawn.append(Curve("", *flat[[a, b]].T, color=PALE, width=0.8))
    drawn.append(Curve("", *flat.T, color=COLOURS[5], width=1.0))
    drawn.append(Curve("", *flat.T, color=COLOURS[0], dash="", marker="o", order=4))

    def scales(axes: Axes) -> None:
        axes.set_label(name)
        axes.set_aspect("equal")
        axes.margins(0.2)
        # numbers across the path, away from its middle
        across = np.gradient(flat, axis=0)[:, ::-1] * (-1, 1)
        across /= np.maximum(np.linalg.norm(across, axis=1, keepdims=True), 1e-9)
        is_inwards = (across * (flat - flat.mean(0))).sum(1) < -1e-9
        across[is_inwards] *= -1
        for n, (point, away) in enumerate(zip(flat, 8.5 * across, strict=True)):
            axes.annotate(str(n), point, away, textcoords="offset points", **CENTERED)
        if features > 2:
            axes.set_axis_off()

    heading = "\n".join([name.replace("_", " "), STEPS[name]])
    x, y = ("feature 1", "feature 2") if features == 2 else ("", "")
    return Panel(drawn, heading, x=x, y=y, scales=scales, height=2.3)


def inner_product(request: FigureRequest) -> Drawn:
    theta = request.thetas[0]
    tables = []
    for dim, reach in ((2, 4), (request.dim, request.distance)):
        d = torch.arange(-reach, reach + 1)
        products = position_curves.inner_products(theta, dim, d)
        tables.append(pd.DataFrame({"features": dim, "distance": d, "inner_product": products}))
    return draw(
        pd.concat(tables),
        _text(
            "Sinusoidal inner products depend on distance, not direction",
            r"$p_n\cdot p_{n+d} = \Sigma_k\,\cos(d\,\theta_k)$, the same for every $n$; "
            f"base {plainly(theta)}.",
        ),
        DISTANCE,
        r"$p_n\cdot p_{n+d}$",
        panel="features",
        heading=lambda dim: f"{dim} features",
        columns=2,
        names="below",
    )


def decay(request: FigureRequest) -> Drawn:
    d = torch.arange(request.distance + 1)
    base = request.thetas[0]
    kinds = {
        f"rope, base {plainly(theta)}": request.frequencies("rope", theta)
        for theta in request.thetas
    }
    rotations = request.rotations()
    scaled, _ = position_curves.methods(rotations.pop("rope"), request)
    second = f"rope, base {plainly(base)}, methods for {request.factor:g} × the trained length"
    table = pd.concat(
        pd.DataFrame({
            "panel": heading,
            "scheme": label,
            "distance": d,
            "bound": position_curves.decay(spectrum, d),
        })
        for heading, spectra in {"schemes and bases": kinds | rotations, second: scaled}.items()
        for label, spectrum in spectra.items()
    )  # fmt: skip
    return draw(
        table,
        _text(
            "Decay of the bound on attention scores with distance",
            r"Mean over $j$ of $|\Sigma_{k<j}\,e^{\,i\,d\,\theta_k}|$; "
            f"{request.dim} features a head, trained length {request.train_length:,}.",
        ),
        DISTANCE,
        "bound, in pairs",
        panel="panel",
        label="scheme",
        scales=limits(table),
        height=2.25,
        names="beside",
    )


def angles(request: FigureRequest) -> Drawn:
    theta = request.thetas[0]
    tables = []
    d = torch.arange(1, HE_XU_DISTANCES + 1)
    for name in HE_XU:
        spectrum = request.frequencies(name, theta)
        for k in sorted({0, len(spectrum) // 4, len(spectrum) // 2}):
            turned = (d * spectrum[k]).remainder(2 * math.pi)
            place = {"scheme": name, "pair": k, "distance": d}
            tables.append(pd.DataFrame({**place, "angle_radians": turned}))
    return draw(
        pd.concat(tables),
        _text(
            "Angles that wrap around, and angles within a quarter turn",
            f"After figures 1 and 2 of He and Xu; b = {plainly(theta)}, D = {request.dim}, N = "
            f"{request.train_length:,}.",
        ),
        DISTANCE,
        "angle at distance d, mod 2π, radians",
        panel="scheme",
        label="pair",
        heading=HE_XU.__getitem__,
        name="pair {}".format,
        columns=2,
        names="below",
    )


def wavelengths(request: FigureRequest) -> Drawn:
    length = request.train_length
    names = {}
    tables = []
    for theta in request.thetas:
        label = f"base {plainly(theta)}"
        waves = (2 * math.pi / request.frequencies("rope", theta)).numpy()
        names[label] = f"{label}: {(waves > length).sum()} of {len(waves)}"
        columns = {"scheme": label, "pair": range(len(waves)), "wavelength_tokens": waves}
        tables.append(pd.DataFrame({**columns, "whole_turn": waves <= length}))

    def scales(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.axhline(length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
        axes.margins(x=0.03)

    return draw(
        pd.concat(tables),
        _text(
            f"Pairs without a full rotation within {length:,} tokens of training",
            f"{request.dim} features a head. Counted on the right: wavelengths above the dotted "
            "line, the trained length.",
        ),
        PAIR,
        r"wavelength $2\pi/\theta_k$, tokens",
        label="scheme",
        at=("pair", "wavelength_tokens"),
        name=names.__getitem__,
        marked=True,
        scales=scales,
        height=3.3,
    )


def biases(request: FigureRequest) -> Drawn:
    heads = position_curves.biases(request)
    at = position_curves.spaced(request.train_length)
    tables = []
    initial = [label for label, (_, is_random) in heads.items() if is_random]
    for label in sorted(heads, key=lambda label: label in initial):
        values, _ = heads[label]
        head = values[min(request.head, len(values) - 1)]
        head = head.where(head.isfinite(), torch.nan)[at]
        columns = {"scheme": label, "distance": at, "bias_nats": head}
        tables.append(pd.DataFrame({**columns, "against_distance_0": head - head[0]}))
    return draw(
        pd.concat(tables),
        _text(
            "Bias of a key at distance d",
            f"Relative to the bias at distance 0, head {request.head} of 0–{request.heads - 1}; "
            f"query position {request.train_length:,}.",
            "Dotted: learned bias at its random initialization." if initial else "",
        ),
        "distance $d$, tokens (linear to 1, then log)",
        "bias, nats (linear to 1, then log)",
        label="scheme",
        at=("distance", "against_distance_0"),
        dotted=initial,
        scales=_symlog,
        height=3.6,
    )


def _symlog(axes: Axes) -> None:
    """Linear up to 1 and logarithmic beyond, with equal slopes at 1."""
    xs, ys = np.concatenate([line.get_xydata() for line in axes.lines]).T
    for which, base in (("x", 2), ("y", 10)):
        scale = {"base": base, "linthresh": 1, "linscale": (1 - 1 / base) / math.log(base)}
        getattr(axes, f"set_{which}scale")("symlog", **scale)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−")))
    axes.xaxis.set_major_locator(FixedLocator([0.0, *(2.0**k for k in range(0, 31, 2))]))
    axes.set_xlim(xs.min(), xs.max())
    axes.set_ylim(min(-1.0, np.nanmin(ys) * 1.6), max(0.4, np.nanmax(ys) * 1.3))


def methods(request: FigureRequest) -> Drawn:
    theta = request.thetas[0]
    length = request.train_length
    plain = request.frequencies("rope", theta)
    scaled, left_out = position_curves.methods(plain, request)
    table = pd.concat(
        pd.DataFrame({"method": name, "pair": range(len(plain)), "frequency_ratio": found / plain})
        for name, found in scaled.items()
    )
    whole = int((2 * math.pi / plain <= length).sum())
    linear = limits(table)

    def scales(axes: Axes) -> None:
        linear(axes)
        if whole < len(plain):
            mark(axes, whole - 0.5, "no full rotation\nin training", height=0.78)

    return draw(
        table,
        _text(
            f"Frequency scaling by method, for {request.factor:g} × the trained length",
            f"RoPE, base {plainly(theta)}, {request.dim} features a head, trained length "
            f"{length:,}.",
            f"Not drawn, as it requires searched factors: {', '.join(left_out)}."
            if left_out
            else "",
        ),
        PAIR,
        r"frequency $\theta'_k / \theta_k$",
        label="method",
        marked=True,
        scales=scales,
        height=3.5,
        names="beside",
    )


FIGURES: dict[str, Callable[[FigureRequest], Drawn]] = {
    figure.__name__: figure
    for figure in (encodings, inner_product, decay, angles, wavelengths, biases, methods)
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="default: all")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="default: docs/figures/positions"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"unknown figure {unknown[0]!r}; known: {', '.join(FIGURES)}")
    for name in options.figures or FIGURES:
        figure, table = FIGURES[name](FigureRequest())
        numbers = table.to_csv(index=False, float_format="%.10g", lineterminator="\n")
        write_text(options.out / f"{name}.csv", numbers)
        Console().info(str(save(figure, options.out, name, DPI)))


if __name__ == "__main__":
    run_main(main)
