"""The figures of positional schemes: each draws a request and returns its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evaluation.errors import EvaluationError
from evaluation.schemes import curves
from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.figures import (
    FigureText,
    PlottedCurve,
    encoding_figure,
    lines_figure,
    pair_figure,
    wavelength_figure,
)
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
        bare: without title, subtitle and note.
    """

    shape: SchemeShape = field(default_factory=SchemeShape)
    thetas: Sequence[float] = (10_000.0, 500_000.0)
    factor: float = 8.0
    distance: int = 256
    tokens: int = 8
    head: int = 3
    schemes: Sequence[dict[str, Any]] = ()
    trained: dict[str, PositionalScheme] = field(default_factory=dict)
    bare: bool = False

    def words(self, title: str, subtitle: str, note: str = "", formula: bool = False) -> FigureText:
        return FigureText() if self.bare else FigureText(title, subtitle, note, formula)

    def rope(self, theta: float) -> PositionalScheme:
        return curves.build({"name": "rope", "theta": theta}, self.shape)

    def frequencies(self, scheme: PositionalScheme) -> Tensor:
        """Frequencies at `factor` times the trained length."""
        return curves.frequencies(scheme, math.ceil(self.factor * self.shape.train_length))


@dataclass(frozen=True)
class FigureSpec:
    """A figure and the numbers in it: column names and rows."""

    figure: Figure
    columns: Sequence[str]
    rows: list[tuple]


def encodings(ask: FigureRequest) -> FigureSpec:
    choices = ask.schemes or [{"name": name} for name in STEPS]
    points = {label_of(c): curves.encodings(c, ask.tokens).numpy() for c in choices}
    words = ask.words(
        f"The first {ask.tokens} positions" + ("" if ask.schemes else ", from counting to rotation"),
        "Encoded token x = (1, 1), or (1, 1, 1, ...) if the bits require more features.",
    )
    rows = [
        (name, n, k + 1, value)
        for name, at in points.items()
        for n, row in enumerate(at.tolist())
        for k, value in enumerate(row)
    ]
    return FigureSpec(encoding_figure(points, STEPS, words), ("scheme", "position", "feature", "value"), rows)


def inner_product(ask: FigureRequest) -> FigureSpec:
    theta, rows, panels = ask.thetas[0], [], []
    for dim, reach in ((2, 4), (ask.shape.dim, ask.distance)):
        d = torch.arange(-reach, reach + 1)
        products = curves.inner_products(theta, dim, d).tolist()
        rows += [(dim, at, value) for at, value in zip(d.tolist(), products, strict=True)]
        panels.append((f"{dim} features", [PlottedCurve("", d.tolist(), products)]))
    words = ask.words(
        "Sinusoidal inner products depend on distance, not direction",
        r"$p_n\cdot p_{n+d} = \Sigma_k\,\cos(d\,\theta_k)$, the same for every $n$; "
        f"base {plainly(theta)}.",
        formula=True,
    )
    figure = pair_figure(panels, "distance $d$, tokens", r"$p_n\cdot p_{n+d}$", words)
    return FigureSpec(figure, ("features", "distance", "inner_product"), rows)


def decay(ask: FigureRequest) -> FigureSpec:
    d, base = torch.arange(ask.distance + 1), ask.thetas[0]
    panels: dict[str, dict[str, Tensor]]
    if ask.schemes:
        built = {label_of(c): curves.build(c, ask.shape) for c in ask.schemes}
        panels = {"": {label: ask.frequencies(scheme) for label, scheme in built.items()}}
    else:
        kinds = {f"rope, base {plainly(theta)}": ask.frequencies(ask.rope(theta)) for theta in ask.thetas}
        for name, scheme in curves.rotations(base, ask.shape).items():
            if name != "rope":
                kinds[name] = ask.frequencies(scheme)
        plain = ask.frequencies(ask.rope(base))
        ruled, _ = curves.methods(plain, ask.factor, ask.shape.train_length)
        panels = {
            "schemes and bases": kinds,
            f"rope, base {plainly(base)}, methods for {ask.factor:g} × the trained length": ruled,
        }
    drawn, rows = [], []
    for heading, spectra in panels.items():
        values = {label: curves.decay(spectrum, d).tolist() for label, spectrum in spectra.items()}
        drawn.append((heading, [PlottedCurve(label, d.tolist(), y) for label, y in values.items()]))
        rows += [(heading, label, at, y) for label, ys in values.items() for at, y in enumerate(ys)]
    words = ask.words(
        "Decay of the bound on attention scores with distance",
        r"Mean over $j$ of $|\Sigma_{k<j}\,e^{\,i\,d\,\theta_k}|$; "
        f"{ask.shape.dim} features a head, trained length {ask.shape.train_length:,}.",
        formula=True,
    )
    figure = lines_figure(drawn, "distance $d$, tokens", "bound, in pairs", words, height=2.25, keyed=True)
    return FigureSpec(figure, ("panel", "scheme", "distance", "bound"), rows)


def angles(ask: FigureRequest) -> FigureSpec:
    theta, shape = ask.thetas[0], ask.shape
    d = torch.arange(1, HE_XU_DISTANCES + 1)
    headings = {
        "rope": r"before: $\theta_k = b^{-2k/D}$",
        "he_xu": r"after: $\theta_k = \pi/(2N)\cdot b^{-2k/D}$",
    }
    panels, rows = [], []
    for name, heading in headings.items():
        spectrum = ask.frequencies(curves.build({"name": name, "theta": theta}, shape))
        lines = []
        for k in sorted({0, len(spectrum) // 4, len(spectrum) // 2}):
            turned = (d * spectrum[k]).remainder(2 * math.pi).tolist()
            lines.append(PlottedCurve(f"pair {k}", d.tolist(), turned))
            rows += [(name, k, at, value) for at, value in zip(d.tolist(), turned, strict=True)]
        panels.append((heading, lines))
    words = ask.words(
        "Angles that wrap around, and angles within a quarter turn",
        f"After figures 1 and 2 of He and Xu; b = {plainly(theta)}, D = {shape.dim}, "
        f"N = {shape.train_length:,}.",
    )
    figure = pair_figure(panels, "distance $d$, tokens", "angle at distance d, mod 2π, radians", words)
    return FigureSpec(figure, ("scheme", "pair", "distance", "angle_radians"), rows)


def wavelengths(ask: FigureRequest) -> FigureSpec:
    length = ask.shape.train_length
    if ask.schemes:
        built = {label_of(choice): curves.build(choice, ask.shape) for choice in ask.schemes}
    else:
        built = {f"base {plainly(theta)}": ask.rope(theta) for theta in ask.thetas}
    spectra, rows = {}, []
    for label, scheme in built.items():
        found, whole = curves.wavelengths(scheme, length)
        spectra[f"{label}: {int((~whole).sum())} of {len(whole)}"] = found.numpy()
        rows += [(label, k, *row) for k, row in enumerate(zip(found.tolist(), whole.tolist(), strict=True))]
    words = ask.words(
        f"Pairs without a full rotation within {length:,} tokens of training",
        f"{ask.shape.dim} features a head. Hollow markers, counted on the right: longer wavelengths.",
    )
    figure = wavelength_figure(spectra, length, words)
    return FigureSpec(figure, ("scheme", "pair", "wavelength_tokens", "whole_turn"), rows)


def biases(ask: FigureRequest) -> FigureSpec:
    shape, longest = ask.shape, ask.shape.train_length
    found: dict[
        str, tuple[Tensor, bool]
    ] = {}  # values of each head, and whether they are random initial values
    if ask.schemes:
        start = {label_of(choice): curves.build(choice, shape) for choice in ask.schemes}
    else:
        start = curves.biased(shape, longest)
    for label, scheme in (start | ask.trained).items():
        values = curves.bias(scheme, longest)
        if values is None:
            raise EvaluationError(f"{label} adds no positional bias: select other figures")
        found[label] = (values, label not in ask.trained and any(True for _ in scheme.parameters()))
    at, lines, rows = curves.spaced(longest), [], []
    for label, (values, drawn) in sorted(found.items(), key=lambda item: item[1][1]):
        head = values[min(ask.head, len(values) - 1)]
        head = head.where(head.isfinite(), torch.nan)[at]
        against = (head - head[0]).tolist()
        lines.append(PlottedCurve(label, at.tolist(), against, drawn))
        rows += [(label, *row) for row in zip(at.tolist(), head.tolist(), against, strict=True)]
    words = ask.words(
        "Bias of a key at distance d",
        f"Relative to the bias at distance 0, head {ask.head} of 0–{shape.heads - 1}; "
        f"query position {longest:,}.",
        "Dotted: learned bias at its random initialization." if any(line.drawn for line in lines) else "",
    )
    figure = lines_figure(
        [("", lines)],
        "distance $d$, tokens (linear to 1, then log)",
        "bias, nats (linear to 1, then log)",
        words,
        height=3.6,
        symlog=True,
    )
    return FigureSpec(figure, ("scheme", "distance", "bias_nats", "against_distance_0"), rows)


def methods(ask: FigureRequest) -> FigureSpec:
    theta, length = ask.thetas[0], ask.shape.train_length
    plain = ask.frequencies(ask.rope(theta))
    scaled, left_out = curves.methods(plain, ask.factor, length)
    pairs = list(range(len(plain)))
    lines = [PlottedCurve(name, pairs, (found / plain).tolist()) for name, found in scaled.items()]
    rows = [(c.label, k, value) for c in lines for k, value in zip(pairs, c.y, strict=True)]
    whole = int(curves.wavelengths(ask.rope(theta), length)[1].sum())
    words = ask.words(
        f"Frequency scaling by method, for {ask.factor:g} × the trained length",
        f"RoPE, base {plainly(theta)}, {ask.shape.dim} features a head, trained length {length:,}.",
        f"Not drawn, as it requires searched factors: {', '.join(left_out)}." if left_out else "",
    )
    figure = lines_figure(
        [("", lines)],
        "pair $k$, fastest first",
        r"frequency $\theta'_k / \theta_k$",
        words,
        height=3.5,
        marked=(whole - 0.5, "no full rotation\nin training") if whole < len(plain) else None,
        step=max(1, len(pairs) // 6),
        keyed=True,
    )
    return FigureSpec(figure, ("method", "pair", "frequency_ratio"), rows)


FIGURES: dict[str, Callable[[FigureRequest], FigureSpec]] = {
    "encodings": encodings,
    "inner_product": inner_product,
    "decay": decay,
    "angles": angles,
    "wavelengths": wavelengths,
    "biases": biases,
    "methods": methods,
}


def plainly(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def label_of(choice: dict[str, Any]) -> str:
    """`rope, theta 500000, scaling yarn`: a distinct label."""
    words = [str(choice["name"])]
    for key, value in choice.items():
        if key != "name":
            words.append(f"{key} {value.get('name', value) if isinstance(value, dict) else value}")
    return ", ".join(words)
