"""Figures of the diagnostics: panels of measures by length, distance or position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from evaluation.diagnostics.attention import AttentionResult
from evaluation.reports.base import dtype_note
from evaluation.reports.figures import (
    COLOURS,
    DASHED,
    INK,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Numbers,
    Panel,
    fix_ticks,
    mark,
    panels_figure,
    save,
    token_axis,
)
from evaluation.schemes.figures import wavelength_figure
from evaluation.scoring.methods import TRAINED, name_of

DRAWN = {  # measure -> heading of its panel
    "entropy_relative": "entropy, share of ln n",
    "first_token": "mass on the first token",
    "logit_std": "standard deviation of logits",
    "mass_beyond": "mass beyond the trained distance",
}
SHARES = {DRAWN[measure] for measure in ("entropy_relative", "first_token", "mass_beyond")}
LENGTH = "length, tokens (log scale)"


def measures_figure(
    panels: Sequence[Panel],
    text: FigureText,
    *,
    x: str,
    y: str = "",
    trained: int,
    ticks: Sequence[float],
    shares: set[str] | None = None,
    log_x: bool = True,
    log_y: bool = False,
) -> Figure:
    """Panels in two columns over one horizontal axis, with the trained length marked.

    Args:
        ticks: of the horizontal axis.
        y: what the vertical axes show, all with the same limits; without it, each panel has its own limits.
        shares: headings of panels whose numbers are from 0 to 1, in per cent; None: of none.
        log_y: logarithmic vertical axes.
    """
    every = [curve for panel in panels for curve in panel.curves]
    xs = [trained, *(at for curve in every for at in curve.x)]

    def scales(axes: Axes, panel: Panel) -> None:
        low = min(xs)
        high = max(xs)
        if log_x:
            token_axis(axes, ticks)
            room = max((high / low) ** 0.04, 1.06)
            axes.set_xlim(low / room, high * room)
        else:
            fix_ticks(axes, ticks)
            room = max(0.03 * (high - low), 1.0)
            axes.set_xlim(low - room, high + room)
        share = panel.heading in (shares or ())
        if log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.tick_params(labelsize=8, length=2.5)
        axes.set_ylim(*_limits(every if y else panel.curves, share, log_y))
        mark(axes, trained)

    note = (
        ". ".join(filter(None, [text.note.rstrip("."), f"Dotted: trained length {trained:,}"]))
        + "."
    )
    text = FigureText(text.title, text.subtitle, note)
    return panels_figure(panels, text, scales, x=x, y=y, columns=2, height=1.75, names="below")


def _limits(curves: Sequence[Curve], share: bool, log: bool) -> tuple[float, float]:
    """From 0 where that does not hide the differences, and never beyond what a share can be."""
    values = [y for curve in curves for y in curve.y if math.isfinite(y)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if log:
        return low / 1.2, high * 1.2
    low = min(low, 0.0)
    top = high + 0.08 * max(high - low, 1e-3)
    return low, min(top, 1.0) if share and high < 0.93 else top


def shades(count: int) -> list[str]:
    """Colors from dark to light for ordered values, told apart without color too."""
    return [to_hex(colormaps["viridis"](at)) for at in np.linspace(0.0, 0.82, max(count, 1))]


def shaded(label: str, x: Numbers, y: Numbers, color: str) -> Curve:
    """A curve without markers, unless it is a single point."""
    return Curve(label, x, y, color, marker="o" if len(x) == 1 else "")


def draw_attention(found: AttentionResult, folder: Path) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files."""
    drawn = []
    labels = [method.label for method in found.methods]
    seen = {label: lengths for label in labels if (lengths := found.lengths_of(label))}
    for label, lengths in seen.items():
        name = "" if label == TRAINED else f"-{label}"
        for stem, draw in PER_METHOD.items():
            drawn.append(save(draw(found, label, lengths), folder, f"{stem}{name}"))
    if len(seen) > 1:
        drawn.append(save(by_method(found, list(seen)), folder, "attention_by_method"))
    if found.pairs:
        drawn.append(save(wavelengths(found), folder, "rotary_pairs"))
    return drawn


def titled(title: str, method: str) -> str:
    return f"{title}, {'' if method == TRAINED else 'method '}{name_of(method)}"


def _text(found: AttentionResult, title: str, note: str = "") -> FigureText:
    queries = f"last {found.settings.targets} queries of {found.windows} windows"
    subtitle = f"{found.subject.name}: {queries}, the same at every length"
    return FigureText(title, subtitle + dtype_note(found.settings), note)


def _measures(found: AttentionResult, curves, title: str, note: str, ticks: list[int]) -> Figure:
    """A panel for each measure by length."""
    panels = [Panel(curves(measure), heading) for measure, heading in DRAWN.items()]
    trained = found.subject.trained_length
    text = _text(found, title, note)
    return measures_figure(panels, text, x=LENGTH, trained=trained, ticks=ticks, shares=SHARES)


def by_length(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each measure, a line for each layer, and the mean over layers in black."""
    layers = len(found.layer_kinds)

    def curves(measure: str) -> list[Curve]:
        values = np.array(
            [found.seen[method, n].values[measure].mean((0, 2)).tolist() for n in lengths]
        )
        lines = [
            shaded(f"layer {n + 1}", lengths, values[:, n], c) for n, c in enumerate(shades(layers))
        ]
        return (
            lines
            if layers == 1
            else [*lines, Curve("mean", lengths, values.mean(1), INK, width=2.2)]
        )

    return _measures(
        found, curves, titled("Attention beyond the trained length", method), "", lengths
    )


def by_method(found: AttentionResult, labels: Sequence[str]) -> Figure:
    """A panel for each measure, a line for each method, means over layers and heads."""

    def curves(measure: str) -> list[Curve]:
        lines = []
        for n, label in enumerate(labels):
            lengths = found.lengths_of(label)
            values = [found.overall(label, at)[measure] for at in lengths]
            style: dict[str, Any] = {
                "color": COLOURS[n % len(COLOURS)],
                "marker": MARKERS[n % len(MARKERS)],
            }
            lines.append(Curve(name_of(label), lengths, values, **style))
        return lines

    title = "Attention beyond the trained length, by method"
    return _measures(found, curves, title, "Means over layers and heads.", found.plan.lengths)


def _heading(found: AttentionResult, layer: int) -> str:
    kinds = found.layer_kinds
    return f"layer {layer + 1}" + ("" if len(set(kinds)) == 1 else f", {kinds[layer]}")


def by_distance(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each length: mass in buckets of distance, and that of uniform
    attention over the keys visible in the longest window."""
    panels = []
    for layer in range(len(found.layer_kinds)):
        lines = []
        for color, length in zip(shades(len(lengths)), lengths, strict=True):
            mass = found.seen[method, length].by_distance[:, layer].mean((0, 1)).tolist()
            lines.append(shaded(f"{length:,} tokens", _middles(found.edges(length)), mass, color))
        flat = found.seen[method, lengths[-1]].visible[layer].tolist()
        label = f"uniform at {lengths[-1]:,}"
        lines.append(_reference(label, _middles(found.edges(lengths[-1])), flat))
        panels.append(Panel(lines, _heading(found, layer)))
    return measures_figure(
        panels,
        _text(
            found,
            titled("How far back attention goes", method),
            "Mass in buckets that double: distance 0, 1, 2–3, 4–7, ...; heads of a layer together.",
        ),
        x="distance + 1, tokens (log scale)",
        y="share of attention",
        trained=found.subject.trained_length,
        ticks=[4**k for k in range(12) if 4**k <= lengths[-1]],
        shares={panel.heading for panel in panels},
    )


def _reference(label: str, x: Sequence[float], y: Sequence[float]) -> Curve:
    return Curve(label, x, y, SOFT, width=1.0, dash=DASHED, order=2)


def _middles(edges: list[int]) -> list[float]:
    """Geometric middles of the buckets, in distance + 1."""
    return [math.sqrt((low + 1) * high) for low, high in pairwise(edges)]


def reach(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each head: how far 90% of its mass reaches."""
    panels = []
    for layer in range(len(found.layer_kinds)):
        values = [
            found.seen[method, n].values["reach_90"][:, layer].mean(0).tolist() for n in lengths
        ]
        lines = [
            Curve("" if head else "one head", lengths, of_head, COLOURS[0], width=1.0)
            for head, of_head in enumerate(zip(*values, strict=True))
        ]
        lines.append(_reference("uniform attention", lengths, [0.9 * length for length in lengths]))
        panels.append(Panel(lines, _heading(found, layer)))
    return measures_figure(
        panels,
        _text(found, titled("Tokens that hold 90% of a head's mass", method)),
        x=LENGTH,
        y="tokens (log scale)",
        trained=found.subject.trained_length,
        ticks=lengths,
        log_y=True,
    )


PER_METHOD = {
    "attention_by_length": by_length,
    "mass_by_distance": by_distance,
    "reach_of_heads": reach,
}


def wavelengths(found: AttentionResult) -> Figure:
    """Wavelength of every rotary pair at the longest length under each method, and the trained length."""
    spectra = {}
    longest = max(length for _, length in found.pairs)
    for method in dict.fromkeys(label for label, _ in found.pairs):
        pairs = found.pairs[method, max(length for label, length in found.pairs if label == method)]
        kinds = dict.fromkeys(pair.kind for pair in pairs)
        for kind in kinds:
            name = name_of(method) if len(kinds) == 1 else f"{name_of(method)}, {kind}"
            spectra[name] = np.array(
                [pair.wavelength or math.inf for pair in pairs if pair.kind == kind]
            )
    text = FigureText(
        f"Rotary pairs and the trained length, at {longest:,} tokens",
        f"{found.subject.name}: hollow where a turn takes longer than the trained length",
    )
    return wavelength_figure(spectra, found.subject.trained_length, text)
