"""The figures of positional schemes: each computes a table of numbers from a request and draws that
table."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from errors import EvaluationError
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
)
from evaluation.schemes import curves
from evaluation.schemes.curves import SchemeShape
from model.position import PositionalScheme

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
DASHES = ((0, ()), (0, (6, 1.6)), (0, (2, 2)), (0, (7, 1.6, 1.6, 1.6)))
FEW = 64  # up to this many points are drawn as markers
PALE = "#CFCFCF"
CENTERED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}


@dataclass(frozen=True)
class FigureRequest:
    """The options of a figure.

    Attributes:
        thetas: bases; figures of one base use the first.
        factor: methods are shown for this many times the trained length.
        distance: the longest distance of inner products and decay.
        tokens: number of encodings.
        head: the head whose biases are drawn.
        schemes: settings of the schemes to draw; empty: the default ones.
        trained: schemes with trained parameters, drawn in addition to the others.
    """

    shape: SchemeShape = field(default_factory=SchemeShape)
    thetas: Sequence[float] = (10_000.0, 500_000.0)
    factor: float = 8.0
    distance: int = 256
    tokens: int = 8
    head: int = 3
    schemes: Sequence[dict[str, Any]] = ()
    trained: dict[str, PositionalScheme] = field(default_factory=dict)

    def rope(self, theta: float) -> PositionalScheme:
        return curves.build({"name": "rope", "theta": theta}, self.shape)

    def chosen(
        self, default: Callable[[], dict[str, PositionalScheme]]
    ) -> dict[str, PositionalScheme]:
        """The requested schemes by label, else the default ones."""
        return {label_of(one): curves.build(one, self.shape) for one in self.schemes} or default()

    def frequencies(self, scheme: PositionalScheme) -> Tensor:
        """Frequencies at `factor` times the trained length."""
        return curves.frequencies(scheme, math.ceil(self.factor * self.shape.train_length))


_text = partial(FigureText, formula=True)


@dataclass(frozen=True)
class FigureSpec:
    """A figure and the numbers in it: column names and rows."""

    figure: Figure
    columns: Sequence[str]
    rows: list[tuple]


def draw(
    header: Sequence[str],
    rows: list[tuple],
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
) -> FigureSpec:
    """Draw the rows of a table as curves.

    Args:
        header: names of the columns.
        panel, label: columns whose values tell panels and curves apart.
        at: columns of the points; by default the last two.
        heading, name: of a panel and of a curve, by those values.
        dotted: names of curves that are dotted.
        marked: whether every curve has markers; else a first curve of few points.
        layout: as in `figures.panels`.
    """
    place = {column: n for n, column in enumerate(header)}
    across, up = at or header[-2:]
    by_panel: dict[Any, dict[Any, tuple[list, list]]] = {}
    for row in rows:
        lines = by_panel.setdefault(row[place[panel]] if panel else "", {})
        xs, ys = lines.setdefault(row[place[label]] if label else "", ([], []))
        xs.append(row[place[across]])
        ys.append(row[place[up]])
    shown = []
    for where, lines in by_panel.items():
        drawn = []
        for n, (key, (xs, ys)) in enumerate(lines.items()):
            dash = (0, (1, 1)) if name(key) in dotted else DASHES[n % len(DASHES)]
            style: dict[str, Any] = {"width": 1.4, "dash": dash}
            if marked:  # markers of consecutive lines do not coincide
                count = max(1, len(xs) // 6)
                every = (n * count // len(lines), count)
                style |= {"marker": MARKERS[n % len(MARKERS)], "every": every}
            elif n == 0 and len(xs) <= FEW:
                style |= {"width": 0.9, "marker": "o", "size": 4.2, "order": 4}
            drawn.append(Curve(name(key), xs, ys, COLOURS[n % len(COLOURS)], **style))
        shown.append(Panel(drawn, heading(where), scales=scales, height=height))
    return FigureSpec(panels(shown, text, x=x, y=y, **layout), header, rows)


def limits(rows: list[tuple]) -> Callable[[Axes], None]:
    """Common linear scales for the numbers in the last two columns."""
    xs, ys = np.array([row[-2:] for row in rows], float).T

    def scales(axes: Axes) -> None:
        axes.set_xlim(xs.min(), xs.max())
        axes.set_ylim(ys.min() - 0.04 * np.ptp(ys), ys.max() + 0.04 * np.ptp(ys))

    return scales


def encodings(ask: FigureRequest) -> FigureSpec:
    choices = ask.schemes or [{"name": name} for name in STEPS]
    points = {label_of(c): curves.encodings(c, ask.tokens).numpy() for c in choices}
    text = _text(
        f"The first {ask.tokens} positions"
        + ("" if ask.schemes else ", from counting to rotation"),
        "Encoded token x = (1, 1), or (1, 1, 1, ...) if the bits require more features.",
    )
    rows = [
        (name, n, k + 1, value.item())
        for name, at in points.items()
        for (n, k), value in np.ndenumerate(at)
    ]
    figure = panels([encoding_panel(name, at) for name, at in points.items()], text, columns=3)
    return FigureSpec(figure, ("scheme", "position", "feature", "value"), rows)


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

    heading = "\n".join([name.replace("_", " "), STEPS.get(name, "")])
    x, y = ("feature 1", "feature 2") if features == 2 else ("", "")
    return Panel(drawn, heading, x=x, y=y, scales=scales, height=2.3)


def inner_product(ask: FigureRequest) -> FigureSpec:
    theta = ask.thetas[0]
    rows = []
    for dim, reach in ((2, 4), (ask.shape.dim, ask.distance)):
        d = torch.arange(-reach, reach + 1)
        products = curves.inner_products(theta, dim, d)
        rows += [(dim, at, value) for at, value in zip(d.tolist(), products.tolist(), strict=True)]
    return draw(
        ("features", "distance", "inner_product"),
        rows,
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


def decay(ask: FigureRequest) -> FigureSpec:
    d = torch.arange(ask.distance + 1)
    base = ask.thetas[0]
    rope = {f"rope, base {plainly(theta)}": ask.rope(theta) for theta in ask.thetas}
    others = {
        name: scheme for name, scheme in curves.rotations(base, ask.shape).items() if name != "rope"
    }
    kinds = {
        name: ask.frequencies(scheme) for name, scheme in ask.chosen(lambda: rope | others).items()
    }
    by_panel = {"": kinds}
    if not ask.schemes:
        scaled, _ = curves.methods(
            ask.frequencies(ask.rope(base)), ask.factor, ask.shape.train_length
        )
        second = f"rope, base {plainly(base)}, methods for {ask.factor:g} × the trained length"
        by_panel = {"schemes and bases": kinds, second: scaled}
    rows = [
        (heading, label, at, value)
        for heading, spectra in by_panel.items()
        for label, spectrum in spectra.items()
        for at, value in enumerate(curves.decay(spectrum, d).tolist())
    ]
    return draw(
        ("panel", "scheme", "distance", "bound"),
        rows,
        _text(
            "Decay of the bound on attention scores with distance",
            r"Mean over $j$ of $|\Sigma_{k<j}\,e^{\,i\,d\,\theta_k}|$; "
            f"{ask.shape.dim} features a head, trained length {ask.shape.train_length:,}.",
        ),
        DISTANCE,
        "bound, in pairs",
        panel="panel",
        label="scheme",
        scales=limits(rows),
        height=2.25,
        names="beside",
    )


def angles(ask: FigureRequest) -> FigureSpec:
    theta = ask.thetas[0]
    shape = ask.shape
    rows = []
    d = torch.arange(1, HE_XU_DISTANCES + 1)
    for name in HE_XU:
        spectrum = ask.frequencies(curves.build({"name": name, "theta": theta}, shape))
        for k in sorted({0, len(spectrum) // 4, len(spectrum) // 2}):
            turned = (d * spectrum[k]).remainder(2 * math.pi)
            rows += [
                (name, k, at, value) for at, value in zip(d.tolist(), turned.tolist(), strict=True)
            ]
    return draw(
        ("scheme", "pair", "distance", "angle_radians"),
        rows,
        _text(
            "Angles that wrap around, and angles within a quarter turn",
            f"After figures 1 and 2 of He and Xu; b = {plainly(theta)}, D = {shape.dim}, N = "
            f"{shape.train_length:,}.",
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


def wavelengths(ask: FigureRequest) -> FigureSpec:
    length = ask.shape.train_length
    names = {}
    rows = []
    built = ask.chosen(lambda: {f"base {plainly(theta)}": ask.rope(theta) for theta in ask.thetas})
    for label, scheme in built.items():
        tokens = curves.wavelengths(scheme, length)
        names[label] = f"{label}: {int((tokens > length).sum())} of {len(tokens)}"
        rows += [(label, k, wave, wave <= length) for k, wave in enumerate(tokens.tolist())]

    def scales(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.axhline(length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
        axes.margins(x=0.03)

    return draw(
        ("scheme", "pair", "wavelength_tokens", "whole_turn"),
        rows,
        _text(
            f"Pairs without a full rotation within {length:,} tokens of training",
            f"{ask.shape.dim} features a head. Counted on the right: wavelengths above the dotted "
            "line, the trained length.",
        ),
        "pair $k$, fastest first",
        r"wavelength $2\pi/\theta_k$, tokens",
        label="scheme",
        at=("pair", "wavelength_tokens"),
        name=names.__getitem__,
        marked=True,
        scales=scales,
        height=3.3,
    )


def biases(ask: FigureRequest) -> FigureSpec:
    shape = ask.shape
    longest = ask.shape.train_length
    # bias of each head, and whether it is a random initial value
    heads: dict[str, tuple[Tensor, bool]] = {}
    schemes = ask.chosen(lambda: curves.biased(shape, longest)) | ask.trained
    for label, scheme in schemes.items():
        values = curves.bias(scheme, longest)
        if values is None:
            raise EvaluationError(f"{label} adds no positional bias: select other figures")
        is_learned = len(list(scheme.parameters())) > 0
        heads[label] = (values, is_learned and label not in ask.trained)
    at = curves.spaced(longest)
    rows = []
    initial = [label for label, (_, is_random) in heads.items() if is_random]
    for label in sorted(heads, key=lambda label: label in initial):
        values, _ = heads[label]
        head = values[min(ask.head, len(values) - 1)]
        head = head.where(head.isfinite(), torch.nan)[at]
        against = head - head[0]
        columns = (at.tolist(), head.tolist(), against.tolist())
        rows += [(label, *row) for row in zip(*columns, strict=True)]
    return draw(
        ("scheme", "distance", "bias_nats", "against_distance_0"),
        rows,
        _text(
            "Bias of a key at distance d",
            f"Relative to the bias at distance 0, head {ask.head} of 0–{shape.heads - 1}; query "
            f"position {longest:,}.",
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
    axes.set_xscale(
        "symlog",
        base=2,
        linthresh=1,
        linscale=(1 - 1 / 2) / math.log(2),
    )
    axes.set_yscale(
        "symlog",
        base=10,
        linthresh=1,
        linscale=(1 - 1 / 10) / math.log(10),
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−")))
    axes.xaxis.set_major_locator(FixedLocator([0.0, *(2.0**k for k in range(0, 31, 2))]))
    axes.set_xlim(xs.min(), xs.max())
    axes.set_ylim(min(-1.0, np.nanmin(ys) * 1.6), max(0.4, np.nanmax(ys) * 1.3))


def methods(ask: FigureRequest) -> FigureSpec:
    theta = ask.thetas[0]
    length = ask.shape.train_length
    plain = ask.frequencies(ask.rope(theta))
    scaled, left_out = curves.methods(plain, ask.factor, length)
    rows = [
        (name, k, x)
        for name, found in scaled.items()
        for k, x in enumerate((found / plain).tolist())
    ]
    whole = int((curves.wavelengths(ask.rope(theta), length) <= length).sum())
    linear = limits(rows)

    def scales(axes: Axes) -> None:
        linear(axes)
        if whole < len(plain):
            mark(
                axes,
                whole - 0.5,
                "no full rotation\nin training",
                height=0.78,
            )

    return draw(
        ("method", "pair", "frequency_ratio"),
        rows,
        _text(
            f"Frequency scaling by method, for {ask.factor:g} × the trained length",
            f"RoPE, base {plainly(theta)}, {ask.shape.dim} features a head, trained length "
            f"{length:,}.",
            f"Not drawn, as it requires searched factors: {', '.join(left_out)}."
            if left_out
            else "",
        ),
        "pair $k$, fastest first",
        r"frequency $\theta'_k / \theta_k$",
        label="method",
        marked=True,
        scales=scales,
        height=3.5,
        names="beside",
    )


FIGURES: dict[str, Callable[[FigureRequest], FigureSpec]] = {
    figure.__name__: figure
    for figure in (encodings, inner_product, decay, angles, wavelengths, biases, methods)
}


def plainly(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def label_of(choice: dict[str, Any]) -> str:
    """`rope, theta 500000, scaling yarn`: a distinct label."""
    values = {
        key: value.get("name", value) if isinstance(value, dict) else value
        for key, value in choice.items()
    }
    return ", ".join(
        [str(values.pop("name")), *(f"{key} {value}" for key, value in values.items())]
    )
