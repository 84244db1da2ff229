"""Figures of `protocol: attention`: by length and layer, mass by distance, reach of heads, rotary pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from evaluation.diagnostics.attention import AttentionResult
from evaluation.diagnostics.panels import PanelSeries, PanelSpec, panels_figure, shades
from evaluation.reports.figures import COLOURS, INK, SOFT, save
from evaluation.schemes.figures import FigureText, wavelength_figure
from evaluation.scoring.methods import TRAINED

DRAWN = {  # measure -> heading of its panel
    "entropy_relative": "entropy, share of ln n",
    "first_token": "mass on the first token",
    "logit_std": "standard deviation of logits",
    "mass_beyond": "mass beyond the trained distance",
}
SHARES = {"entropy_relative", "first_token", "mass_beyond"}


def draw_attention(found: AttentionResult, folder: Path) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files."""
    drawn = []
    for method in found.methods:
        lengths = [n for n in found.plan.lengths if (method.label, n) in found.seen]
        if not lengths:
            continue
        name = "" if method.label == TRAINED else f"-{method.label}"
        drawn.append(save(by_length(found, method.label, lengths), folder, f"attention_by_length{name}"))
        drawn.append(save(by_distance(found, method.label, lengths), folder, f"mass_by_distance{name}"))
        drawn.append(save(reach(found, method.label, lengths), folder, f"reach_of_heads{name}"))
    labels = [
        method.label for method in found.methods if any(label == method.label for label, _ in found.seen)
    ]
    if len(labels) > 1:
        drawn.append(save(by_method(found, labels), folder, "attention_by_method"))
    if found.pairs:
        drawn.append(save(wavelengths(found), folder, "rotary_pairs"))
    return drawn


def _title(method: str) -> str:
    return "as trained" if method == TRAINED else f"method {method}"


def _subtitle(found: AttentionResult) -> str:
    return (
        f"{found.subject.name}: last {found.settings.targets} queries of {found.windows} windows, the same "
        "at every length"
    )


def by_length(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each measure, a line for each layer, and the mean over layers in black."""
    layers = len(found.layer_kinds)
    colours, panels = shades(layers), []
    for measure, heading in DRAWN.items():
        values = np.array([found.seen[method, n].values[measure].mean((0, 2)).tolist() for n in lengths])
        lines = [
            PanelSeries(lengths, values[:, n].tolist(), colours[n], f"layer {n + 1}") for n in range(layers)
        ]
        if layers > 1:
            lines.append(PanelSeries(lengths, values.mean(1).tolist(), INK, "mean", width=2.2))
        panels.append(PanelSpec(heading, lines, share=measure in SHARES))
    return panels_figure(
        panels,
        FigureText(f"Attention beyond the trained length, {_title(method)}", _subtitle(found)),
        x="length, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=lengths,
    )


def by_method(found: AttentionResult, labels: Sequence[str]) -> Figure:
    """A panel for each measure, a line for each method, means over layers and heads."""
    panels = []
    for measure, heading in DRAWN.items():
        lines = []
        for n, label in enumerate(labels):
            lengths = [at for at in found.plan.lengths if (label, at) in found.seen]
            values = [found.overall(label, at)[measure] for at in lengths]
            name = "as trained" if label == TRAINED else label
            lines.append(PanelSeries(lengths, values, COLOURS[n % len(COLOURS)], name, marker=n))
        panels.append(PanelSpec(heading, lines, share=measure in SHARES))
    return panels_figure(
        panels,
        FigureText(
            "Attention beyond the trained length, by method", _subtitle(found), "Means over layers and heads."
        ),
        x="length, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=found.plan.lengths,
    )


def by_distance(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each length: mass in buckets of distance, and that of uniform
    attention over the keys the longest window shows."""
    colours, panels = shades(len(lengths)), []
    for layer, kind in enumerate(found.layer_kinds):
        lines = []
        for colour, length in zip(colours, lengths, strict=True):
            mass = found.seen[method, length].by_distance[:, layer].mean((0, 1)).tolist()
            lines.append(PanelSeries(_middles(found.edges(length)), mass, colour, f"{length:,} tokens"))
        flat = found.seen[method, lengths[-1]].visible[layer].tolist()
        label = f"uniform at {lengths[-1]:,}"
        lines.append(
            PanelSeries(_middles(found.edges(lengths[-1])), flat, SOFT, label, width=1.0, dashed=True)
        )
        name = f"layer {layer + 1}" + ("" if len(set(found.layer_kinds)) == 1 else f", {kind}")
        panels.append(PanelSpec(name, lines, share=True))
    return panels_figure(
        panels,
        FigureText(
            f"How far back attention goes, {_title(method)}",
            _subtitle(found),
            "Mass in buckets that double: distance 0, 1, 2–3, 4–7, ...; heads of a layer together.",
        ),
        x="distance + 1, tokens (log scale)",
        y="share of attention",
        marked=found.subject.trained_length,
        ticks=[4**k for k in range(12) if 4**k <= lengths[-1]],
        same_scale=True,
    )


def _middles(edges: list[int]) -> list[float]:
    """Geometric middles of the buckets, in distance + 1."""
    return [math.sqrt((low + 1) * high) for low, high in pairwise(edges)]


def reach(found: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each head: how far 90% of its mass reaches."""
    panels, seen = [], [found.seen[method, length] for length in lengths]
    heads = seen[0].by_distance.shape[2]
    for layer, kind in enumerate(found.layer_kinds):
        values = np.array([one.values["reach_90"][:, layer].mean(0).tolist() for one in seen])
        lines = [
            PanelSeries(
                lengths, values[:, head].tolist(), COLOURS[0], "one head" if head == 0 else "", width=1.0
            )
            for head in range(heads)
        ]
        even = [0.9 * length for length in lengths]
        lines.append(PanelSeries(lengths, even, SOFT, "uniform attention", width=1.0, dashed=True))
        name = f"layer {layer + 1}" + ("" if len(set(found.layer_kinds)) == 1 else f", {kind}")
        panels.append(PanelSpec(name, lines, log=True))
    return panels_figure(
        panels,
        FigureText(f"Tokens that hold 90% of a head's mass, {_title(method)}", _subtitle(found)),
        x="length, tokens (log scale)",
        y="tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=lengths,
        same_scale=True,
    )


def wavelengths(found: AttentionResult) -> Figure:
    """Wavelength of every rotary pair at the longest length under each method, beside the trained length."""
    spectra = {}
    for method in found.methods:
        lengths = [n for label, n in found.pairs if label == method.label]
        if not lengths:
            continue
        pairs = found.pairs[method.label, max(lengths)]
        for kind in dict.fromkeys(pair.kind for pair in pairs):
            name = "as trained" if method.label == TRAINED else method.label
            several = len({pair.kind for pair in pairs}) > 1
            waves = [pair.wavelength or math.inf for pair in pairs if pair.kind == kind]
            spectra[f"{name}, {kind}" if several else name] = np.array(waves)
    longest = max(length for _, length in found.pairs)
    return wavelength_figure(
        spectra,
        found.subject.trained_length,
        FigureText(
            f"Rotary pairs beside the trained length, at {longest:,} tokens",
            f"{found.subject.name}: hollow where a turn takes longer than training ever showed",
        ),
    )
