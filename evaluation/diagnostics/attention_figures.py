"""Figures of `protocol: attention`: by length and layer, mass by distance, reach of heads, rotary pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from evaluation.diagnostics.attention import Attention
from evaluation.diagnostics.attention_report import overall
from evaluation.diagnostics.panels import Panel, Series, panels_figure, shades
from evaluation.figures import COLOURS, INK, SOFT, save
from evaluation.position_figures import Words, wavelength_figure
from evaluation.rules import TRAINED

DRAWN = {  # measure -> heading of its panel
    "entropy_relative": "entropy, share of ln n",
    "first_token": "mass on the first token",
    "logit_std": "standard deviation of logits",
    "mass_beyond": "mass beyond the trained distance",
}
SHARES = {"entropy_relative", "first_token", "mass_beyond"}


def draw_attention(found: Attention, folder: Path) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files."""
    drawn = []
    for rule in found.rules:
        lengths = [n for n in found.plan.lengths if (rule.label, n) in found.seen]
        if not lengths:
            continue
        name = "" if rule.label == TRAINED else f"-{rule.label}"
        drawn.append(save(by_length(found, rule.label, lengths), folder, f"attention_by_length{name}"))
        drawn.append(save(by_distance(found, rule.label, lengths), folder, f"mass_by_distance{name}"))
        drawn.append(save(reach(found, rule.label, lengths), folder, f"reach_of_heads{name}"))
    labels = [rule.label for rule in found.rules if any(label == rule.label for label, _ in found.seen)]
    if len(labels) > 1:
        drawn.append(save(by_rule(found, labels), folder, "attention_by_rule"))
    if found.pairs:
        drawn.append(save(wavelengths(found), folder, "rotary_pairs"))
    return drawn


def _title(rule: str) -> str:
    return "as trained" if rule == TRAINED else f"rule {rule}"


def _subtitle(found: Attention) -> str:
    return (
        f"{found.subject.name}: last {found.settings.targets} queries of {found.windows} windows, the same "
        "at every length"
    )


def by_length(found: Attention, rule: str, lengths: list[int]) -> Figure:
    """A panel for each measure, a line for each layer, and the mean over layers in black."""
    layers = len(found.layer_kinds)
    colours, panels = shades(layers), []
    for measure, heading in DRAWN.items():
        values = np.array([found.seen[rule, n].values[measure].mean((0, 2)).tolist() for n in lengths])
        lines = [Series(lengths, values[:, n].tolist(), colours[n], f"layer {n + 1}") for n in range(layers)]
        if layers > 1:
            lines.append(Series(lengths, values.mean(1).tolist(), INK, "mean", width=2.2))
        panels.append(Panel(heading, lines, share=measure in SHARES))
    return panels_figure(
        panels,
        Words(f"Attention beyond the trained length, {_title(rule)}", _subtitle(found)),
        x="length, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=lengths,
    )


def by_rule(found: Attention, labels: Sequence[str]) -> Figure:
    """A panel for each measure, a line for each rule, means over layers and heads."""
    panels = []
    for measure, heading in DRAWN.items():
        lines = []
        for n, label in enumerate(labels):
            lengths = [at for at in found.plan.lengths if (label, at) in found.seen]
            values = [overall(found, found.seen[label, at])[measure] for at in lengths]
            name = "as trained" if label == TRAINED else label
            lines.append(Series(lengths, values, COLOURS[n % len(COLOURS)], name, marker=n))
        panels.append(Panel(heading, lines, share=measure in SHARES))
    return panels_figure(
        panels,
        Words(
            "Attention beyond the trained length, by rule", _subtitle(found), "Means over layers and heads."
        ),
        x="length, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=found.plan.lengths,
    )


def by_distance(found: Attention, rule: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each length: mass in buckets of distance, and that of uniform
    attention over the keys the longest window shows."""
    colours, panels = shades(len(lengths)), []
    for layer, kind in enumerate(found.layer_kinds):
        lines = []
        for colour, length in zip(colours, lengths, strict=True):
            mass = found.seen[rule, length].by_distance[:, layer].mean((0, 1)).tolist()
            lines.append(Series(_middles(found.edges(length)), mass, colour, f"{length:,} tokens"))
        flat = found.seen[rule, lengths[-1]].visible[layer].tolist()
        label = f"uniform at {lengths[-1]:,}"
        lines.append(Series(_middles(found.edges(lengths[-1])), flat, SOFT, label, width=1.0, dashed=True))
        name = f"layer {layer + 1}" + ("" if len(set(found.layer_kinds)) == 1 else f", {kind}")
        panels.append(Panel(name, lines, share=True))
    return panels_figure(
        panels,
        Words(
            f"How far back attention goes, {_title(rule)}",
            _subtitle(found),
            "Mass in buckets that double: distance 0, 1, 2–3, 4–7, ...; heads of a layer together.",
        ),
        x="distance + 1, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=[4**k for k in range(12) if 4**k <= lengths[-1]],
        same_scale=True,
    )


def _middles(edges: list[int]) -> list[float]:
    """Geometric middles of the buckets, in distance + 1."""
    return [math.sqrt((low + 1) * high) for low, high in pairwise(edges)]


def reach(found: Attention, rule: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each head: how far 90% of its mass reaches."""
    panels, seen = [], [found.seen[rule, length] for length in lengths]
    heads = seen[0].by_distance.shape[2]
    for layer, kind in enumerate(found.layer_kinds):
        values = np.array([one.values["reach_90"][:, layer].mean(0).tolist() for one in seen])
        lines = [
            Series(lengths, values[:, head].tolist(), COLOURS[0], "one head" if head == 0 else "", width=1.0)
            for head in range(heads)
        ]
        even = [0.9 * length for length in lengths]
        lines.append(Series(lengths, even, SOFT, "uniform attention", width=1.0, dashed=True))
        name = f"layer {layer + 1}" + ("" if len(set(found.layer_kinds)) == 1 else f", {kind}")
        panels.append(Panel(name, lines, log=True))
    return panels_figure(
        panels,
        Words(f"Tokens that hold 90% of a head's mass, {_title(rule)}", _subtitle(found)),
        x="length, tokens (log scale)",
        marked=found.subject.trained_length,
        ticks=lengths,
        same_scale=True,
    )


def wavelengths(found: Attention) -> Figure:
    """Wavelength of every rotary pair at the longest length under each rule, beside the trained length."""
    spectra = {}
    for rule in found.rules:
        lengths = [n for label, n in found.pairs if label == rule.label]
        if not lengths:
            continue
        pairs = found.pairs[rule.label, max(lengths)]
        for kind in dict.fromkeys(pair.kind for pair in pairs):
            name = "as trained" if rule.label == TRAINED else rule.label
            several = len({pair.kind for pair in pairs}) > 1
            waves = [pair.wavelength or math.inf for pair in pairs if pair.kind == kind]
            spectra[f"{name}, {kind}" if several else name] = np.array(waves)
    longest = max(length for _, length in found.pairs)
    return wavelength_figure(
        spectra,
        found.subject.trained_length,
        Words(
            f"Rotary pairs beside the trained length, at {longest:,} tokens",
            f"{found.subject.name}: hollow where a turn takes longer than training ever showed",
        ),
    )
