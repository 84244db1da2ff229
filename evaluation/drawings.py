"""Each figure of the positional schemes, from what is asked to the drawing and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evaluation import curves
from evaluation.curves import Shape
from evaluation.errors import EvaluationError
from evaluation.position_figures import (
    Curve,
    Words,
    encoding_figure,
    lines_figure,
    pair_figure,
    wavelength_figure,
)
from model.position import Position

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
class Asked:
    """What is to be drawn.

    Attributes:
        thetas: bases; where one is drawn, the first.
        factor: rules are shown for this many times the trained length.
        distance: the longest one of inner products and decay.
        tokens: how many encodings.
        head: the one whose biases are drawn.
        schemes: settings of the schemes to draw; empty: the usual ones.
        trained: schemes with trained parameters, whose biases are drawn beside the others.
        bare: without title, subtitle and note.
    """

    shape: Shape = field(default_factory=Shape)
    thetas: Sequence[float] = (10_000.0, 500_000.0)
    factor: float = 8.0
    distance: int = 256
    tokens: int = 8
    head: int = 3
    schemes: Sequence[dict[str, Any]] = ()
    trained: dict[str, Position] = field(default_factory=dict)
    bare: bool = False

    def words(self, title: str, subtitle: str, note: str = "") -> Words:
        return Words() if self.bare else Words(title, subtitle, note)

    def rope(self, theta: float) -> Position:
        return curves.build({"name": "rope", "theta": theta}, self.shape)

    def frequencies(self, scheme: Position) -> Tensor:
        """A rule that follows the length is drawn as it treats `factor` times the trained one."""
        return curves.frequencies(scheme, math.ceil(self.factor * self.shape.train_length))


@dataclass(frozen=True)
class Drawing:
    """A figure and the numbers in it: column names and rows."""

    figure: Figure
    columns: Sequence[str]
    rows: list[tuple]


def encodings(ask: Asked) -> Drawing:
    choices = ask.schemes or [{"name": name} for name in STEPS]
    points = {label_of(c): curves.encodings(c, ask.tokens).numpy() for c in choices}
    words = ask.words(
        f"The first {ask.tokens} positions" + ("" if ask.schemes else ", from counting to rotation"),
        "What becomes of a token x = (1, 1), or (1, 1, 1, ...) where bits need more features.",
    )
    rows = [
        (name, n, k + 1, value)
        for name, at in points.items()
        for n, row in enumerate(at.tolist())
        for k, value in enumerate(row)
    ]
    return Drawing(encoding_figure(points, STEPS, words), ("scheme", "position", "feature", "value"), rows)


def inner_product(ask: Asked) -> Drawing:
    theta, rows, panels = ask.thetas[0], [], []
    for dim, reach in ((2, 4), (ask.shape.dim, ask.distance)):
        d = torch.arange(-reach, reach + 1)
        products = curves.inner_products(theta, dim, d).tolist()
        rows += [(dim, at, value) for at, value in zip(d.tolist(), products, strict=True)]
        panels.append((f"{dim} features", [Curve("", d.tolist(), products)]))
    words = ask.words(
        "Sinusoidal inner products know distance, not direction",
        r"$p_n\cdot p_{n+d} = \Sigma_k\,\cos(d\,\theta_k)$, the same for every $n$; "
        f"base {plainly(theta)}.",
    )
    figure = pair_figure(panels, "distance $d$, tokens", r"$p_n\cdot p_{n+d}$", words)
    return Drawing(figure, ("features", "distance", "inner_product"), rows)


def decay(ask: Asked) -> Drawing:
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
        ruled, _ = curves.rules(plain, ask.factor, ask.shape.train_length)
        panels = {
            "schemes and bases": kinds,
            f"rope, base {plainly(base)}, rules for {ask.factor:g} × the trained length": ruled,
        }
    drawn, rows = [], []
    for heading, spectra in panels.items():
        values = {label: curves.decay(spectrum, d).tolist() for label, spectrum in spectra.items()}
        drawn.append((heading, [Curve(label, d.tolist(), y) for label, y in values.items()]))
        rows += [(heading, label, at, y) for label, ys in values.items() for at, y in enumerate(ys)]
    words = ask.words(
        "How far the bound on a score falls with distance",
        r"Mean over $j$ of $|\Sigma_{k<j}\,e^{\,i\,d\,\theta_k}|$; "
        f"{ask.shape.dim} features a head, trained length {ask.shape.train_length:,}.",
    )
    figure = lines_figure(drawn, "distance $d$, tokens", "bound, in pairs", words, height=2.25, keyed=True)
    return Drawing(figure, ("panel", "scheme", "distance", "bound"), rows)


def angles(ask: Asked) -> Drawing:
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
            lines.append(Curve(f"pair {k}", d.tolist(), turned))
            rows += [(name, k, at, value) for at, value in zip(d.tolist(), turned, strict=True)]
        panels.append((heading, lines))
    words = ask.words(
        "A turn that starts over, and one that stays within a quarter",
        f"After figures 1 and 2 of He and Xu; b = {plainly(theta)}, D = {shape.dim}, "
        f"N = {shape.train_length:,}.",
    )
    figure = pair_figure(panels, "distance $d$, tokens", "angle at distance d, mod 2π, radians", words)
    return Drawing(figure, ("scheme", "pair", "distance", "angle_radians"), rows)


def wavelengths(ask: Asked) -> Drawing:
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
        f"Pairs that never made a whole turn in {length:,} tokens of training",
        f"{ask.shape.dim} features a head. Hollow, and counted on the right: a turn takes longer.",
    )
    figure = wavelength_figure(spectra, length, words)
    return Drawing(figure, ("scheme", "pair", "wavelength_tokens", "whole_turn"), rows)


def biases(ask: Asked) -> Drawing:
    shape, longest = ask.shape, ask.shape.train_length
    found: dict[str, tuple[Tensor, bool]] = {}  # values of each head, and whether they are drawn at random
    if ask.schemes:
        start = {label_of(choice): curves.build(choice, shape) for choice in ask.schemes}
    else:
        start = curves.biased(shape, longest)
    for label, scheme in (start | ask.trained).items():
        values = curves.bias(scheme, longest)
        if values is None:
            raise EvaluationError(f"{label} adds no bias by position: name the figures you want drawn")
        found[label] = (values, label not in ask.trained and any(True for _ in scheme.parameters()))
    at, lines, rows = curves.spaced(longest), [], []
    for label, (values, drawn) in sorted(found.items(), key=lambda item: item[1][1]):
        head = values[min(ask.head, len(values) - 1)]
        head = head.where(head.isfinite(), torch.nan)[at]
        against = (head - head[0]).tolist()
        lines.append(Curve(label, at.tolist(), against, drawn))
        rows += [(label, *row) for row in zip(at.tolist(), head.tolist(), against, strict=True)]
    words = ask.words(
        "What a key at distance d gains or loses by its place",
        f"Bias against that at distance 0, head {ask.head} of 0–{shape.heads - 1}; "
        f"the query stands at {longest:,}.",
        "Dotted: learned, as drawn at random before training." if any(line.drawn for line in lines) else "",
    )
    figure = lines_figure(
        [("", lines)],
        "distance $d$, tokens (linear to 1, then log)",
        "bias, nats (linear to 1, then log)",
        words,
        height=3.6,
        symlog=True,
    )
    return Drawing(figure, ("scheme", "distance", "bias_nats", "against_distance_0"), rows)


def rules(ask: Asked) -> Drawing:
    theta, length = ask.thetas[0], ask.shape.train_length
    plain = ask.frequencies(ask.rope(theta))
    scaled, left_out = curves.rules(plain, ask.factor, length)
    pairs = list(range(len(plain)))
    lines = [Curve(name, pairs, (found / plain).tolist()) for name, found in scaled.items()]
    rows = [(c.label, k, value) for c in lines for k, value in zip(pairs, c.y, strict=True)]
    whole = int(curves.wavelengths(ask.rope(theta), length)[1].sum())
    words = ask.words(
        f"Which pairs each rule slows down, for {ask.factor:g} × the trained length",
        f"RoPE, base {plainly(theta)}, {ask.shape.dim} features a head, trained length {length:,}.",
        f"Not drawn, for it needs searched numbers of its own: {', '.join(left_out)}." if left_out else "",
    )
    figure = lines_figure(
        [("", lines)],
        "pair $k$, fastest first",
        r"frequency $\theta'_k / \theta_k$",
        words,
        height=3.5,
        marked=(whole - 0.5, "no whole turn\nin training") if whole < len(plain) else None,
        step=max(1, len(pairs) // 6),
        keyed=True,
    )
    return Drawing(figure, ("rule", "pair", "frequency_ratio"), rows)


FIGURES: dict[str, Callable[[Asked], Drawing]] = {
    "encodings": encodings,
    "inner_product": inner_product,
    "decay": decay,
    "angles": angles,
    "wavelengths": wavelengths,
    "biases": biases,
    "rules": rules,
}


def plainly(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def label_of(choice: dict[str, Any]) -> str:
    """`rope, theta 500000, scaling yarn`: enough to tell lines apart."""
    words = [str(choice["name"])]
    for key, value in choice.items():
        if key != "name":
            words.append(f"{key} {value.get('name', value) if isinstance(value, dict) else value}")
    return ", ".join(words)
