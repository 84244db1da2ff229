"""Report of `protocol: attention`.

results.json, in addition to `protocol`, `trained_length`, `checkpoint_hash` and the like:

    cells         flat: method, length, layer, head, measure, value, low, high. head null: the mean over
                  the layer's heads; layer null too: over all layers. low and high, where head is
                  null: the interval over units (documents or clusters), null with fewer than 6. The
                  measures are in `measures`; one that does not exist for a cell has no row.
    by_distance   method, length, layer, head (null as above), edges (buckets + 1), mass (of each
                  bucket), and uniform: the mass of uniform attention over the visible keys.
    pairs         rotary pairs: method, length, kind of layer, pair, wavelength (null: no rotation), turns
                  within that length, turns_trained within the trained length as trained.
    precision     method, length, dtype, and differences of the model's outputs from float64 on the same
                  windows: logit_max, logit_mean, nll_max, nll_mean (signed).
    absent        method, length, reason: cells that do not exist.
    mismatch      largest |weights·values − output of the model's own kernel| over all cells.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure

from evaluation.diagnostics.attention import AttentionResult, mean_of_finite
from evaluation.diagnostics.attention_weights import MEASURES
from evaluation.reports.charts import COLOURS, INK, Curve, FigureText, Panel
from evaluation.reports.document import ReportTable
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.measure_charts import (
    MeasureAxes,
    measures_figure,
    numbered,
    reference_curve,
    shaded,
    shades,
    titled,
)
from evaluation.reports.provenance import text_basis
from evaluation.reports.results_table import mean_over_units, rounded, rounded_record
from evaluation.reports.sentences import caveats, sentences
from evaluation.reports.text import dtype_note
from evaluation.schemes.scheme_figures import wavelength_figure
from evaluation.scoring.methods import TRAINED, name_of

SHOWN = {  # columns of the table: measure -> heading, format
    "entropy": ("entropy, nats", ".2f"),
    "entropy_relative": ("of ln n", ".0%"),
    "first_token": ("on first token", ".1%"),
    "mass_beyond": ("beyond L0", ".1%"),
    "logit_std": ("logit sd", ".2f"),
    "logit_max": ("logit max", ".2f"),
    "reach_90": ("reach 90%", ",.0f"),
}
DRAWN = {  # measure -> heading of its panel
    "entropy_relative": "entropy, share of ln n",
    "first_token": "mass on the first token",
    "logit_std": "standard deviation of logits",
    "mass_beyond": "mass beyond the trained distance",
}
SHARES = frozenset(DRAWN[key] for key in ("entropy_relative", "first_token", "mass_beyond"))
LENGTH = "length, tokens (log scale)"
Place = tuple[int | None, int | None]  # layer and head; None: the mean over all of them


def attention_report(result: AttentionResult, name: str = "attention") -> EvaluationReport:
    rows = measure_rows(result)
    return EvaluationReport(
        name=name,
        title=f"Attention of {result.subject.name}",
        rows=rows,
        record=record_of(result, rows),
        summary=summary_of(result),
        caveats=caveats(
            result.settings, len(np.unique(result.unit)), result.unit_kind, result.absent
        ),
        tables=[table_of(result)],
        figures=figures_of(result),
    )


def places(layers: int, heads: int) -> Iterator[Place]:
    """The mean over all layers and heads, then each layer: the mean over its heads, and each
    head."""
    yield None, None
    for layer in range(layers):
        yield layer, None
        for head in range(heads):
            yield layer, head


def at(values: torch.Tensor, place: Place) -> torch.Tensor:
    """The part of (W, layers, H, ...) of a place, with as many axes."""
    layer, head = (slice(None) if n is None else slice(n, n + 1) for n in place)
    return values[:, layer, head]


def measure_rows(result: AttentionResult) -> list[dict]:
    """One record for each method, length, layer or all, head or all, and measure."""
    confidence = result.settings.confidence
    rows = []
    for (method, length), sample in result.seen.items():
        for measure, values in sample.values.items():  # (W, layers, H)
            for layer, head in places(*values.shape[1:]):
                by_window = mean_of_finite(at(values, (layer, head)).numpy(), (1, 2))
                if head is None:
                    numbers = mean_over_units(
                        by_window,
                        result.unit,
                        confidence,
                    )
                else:
                    mean = float(mean_of_finite(by_window, (0,)))
                    numbers = {"value": rounded(mean), "low": None, "high": None}
                cell = {"method": method, "length": length, "layer": layer, "head": head}
                rows.append({**cell, "measure": measure, **numbers})
    return [row for row in rows if row["value"] is not None]


def record_of(result: AttentionResult, rows: list[dict]) -> dict:
    def records(table: dict[tuple, dict], *names: str) -> list[dict]:
        return [
            {**dict(zip(names, key, strict=True)), **rounded_record(row)}
            for key, row in table.items()
        ]

    pairs = {
        (*cell, n): asdict(pair)
        for cell, of_cell in result.pairs.items()
        for n, pair in enumerate(of_cell)
    }
    absent = {cell: {"reason": reason} for cell, reason in result.absent.items()}
    return {
        "kind": "attention",
        **text_basis(result),
        "targets_hash": result.plan.hash,
        "windows": result.windows,
        "queries": result.settings.targets,
        "lengths": result.plan.lengths,
        "layer_kinds": result.layer_kinds,
        "measures": MEASURES,
        "cells": rows,
        "by_distance": distance_rows(result),
        "pairs": records(pairs, "method", "length", "pair"),
        "precision": records(result.drift, "method", "length", "dtype"),
        "absent": records(absent, "method", "length"),
        "mismatch": max((sample.mismatch for sample in result.seen.values()), default=None),
    }


def distance_rows(result: AttentionResult) -> list[dict]:
    """Mass by distance of every layer and head, and of the means over them."""
    rows = []
    for (method, length), sample in result.seen.items():
        _, layers, heads, _ = sample.by_distance.shape
        for layer, head in places(layers, heads):
            mass = at(sample.by_distance, (layer, head)).mean((0, 1, 2))
            uniform = sample.visible.mean(0) if layer is None else sample.visible[layer]
            rows.append(
                {
                    "method": method,
                    "length": length,
                    "layer": layer,
                    "head": head,
                    "edges": result.edges(length),
                    "mass": [rounded(value) for value in mass.tolist()],
                    "uniform": [rounded(value) for value in uniform.tolist()],
                }
            )
    return rows


def summary_of(result: AttentionResult) -> list[str]:
    drift = {}
    for dtype in result.settings.precision:
        rows = [
            (length, row)
            for (label, length, drift_dtype), row in result.drift.items()
            if (label, drift_dtype) == (TRAINED, dtype)
        ]
        drift[dtype] = sorted(rows, key=lambda row: -abs(row[1]["nll_mean"]))
    pairs = [pairs for (label, _), pairs in result.pairs.items() if label == TRAINED]
    return sentences(
        "attention",
        result=result,
        pairs=pairs[0] if pairs else [],
        drift=drift,
    )


def table_of(result: AttentionResult) -> ReportTable:
    rows = []
    for method in result.methods:
        for length in result.plan.lengths:
            cell = (method.label, length)
            means = result.overall(*cell) if cell in result.seen else {}
            numbers = [
                format(means[key], spec) if key in means else "—"
                for key, (_, spec) in SHOWN.items()
            ]
            rows.append([method.label, str(length), *numbers])
    columns = ["method", "length", *(heading for heading, _ in SHOWN.values())]
    title = "attention: means over layers, heads and queries"
    return ReportTable(title + dtype_note(result.settings.dtype), columns, rows)


def figures_of(result: AttentionResult) -> dict[str, Figure]:
    """Three figures for each method, one of all methods and one of rotary pairs."""
    drawn = {}
    measured = {method.label: result.lengths_of(method.label) for method in result.methods}
    measured = {label: lengths for label, lengths in measured.items() if lengths}
    for label, lengths in measured.items():
        end = "" if label == TRAINED else f"-{label}"
        drawn[f"attention_by_length{end}"] = by_length(result, label, lengths)
        drawn[f"mass_by_distance{end}"] = by_distance(result, label, lengths)
        drawn[f"reach_of_heads{end}"] = reach(result, label, lengths)
    if len(measured) > 1:
        drawn["attention_by_method"] = by_method(result, list(measured))
    if result.pairs:
        drawn["rotary_pairs"] = wavelengths(result)
    return drawn


def _text(result: AttentionResult, title: str, note: str = "") -> FigureText:
    queries = f"last {result.settings.targets} queries of {result.windows} windows"
    subtitle = f"{result.subject.name}: {queries}, the same at every length"
    return FigureText(title, subtitle + dtype_note(result.settings.dtype), note)


def _by_measure(
    result: AttentionResult,
    curves: Callable[[str], list[Curve]],
    text: FigureText,
    ticks: Sequence[int],
) -> Figure:
    """A panel for each measure by length."""
    panels = [Panel(curves(measure), heading) for measure, heading in DRAWN.items()]
    trained_length = result.subject.trained_length
    return measures_figure(
        panels,
        text,
        MeasureAxes(LENGTH, trained_length, ticks, shares=SHARES),
    )


def by_length(
    result: AttentionResult,
    method: str,
    lengths: list[int],
) -> Figure:
    """A panel for each measure, a line for each layer, and the mean over layers in black."""
    layers = len(result.layer_kinds)

    def curves(measure: str) -> list[Curve]:
        values = np.array(
            [result.seen[method, n].values[measure].mean((0, 2)).tolist() for n in lengths]
        )
        lines = [
            shaded(f"layer {n + 1}", lengths, values[:, n], color)
            for n, color in enumerate(shades(layers))
        ]
        if layers > 1:
            lines.append(Curve("mean", lengths, values.mean(1), INK, width=2.2))
        return lines

    title = titled("Attention beyond the trained length", method)
    return _by_measure(result, curves, _text(result, title), lengths)


def by_method(result: AttentionResult, labels: Sequence[str]) -> Figure:
    """A panel for each measure, a line for each method, means over layers and heads."""

    def curves(measure: str) -> list[Curve]:
        lines = []
        for n, label in enumerate(labels):
            lengths = result.lengths_of(label)
            values = [result.overall(label, length)[measure] for length in lengths]
            lines.append(numbered(n, name_of(label), lengths, values))
        return lines

    title = "Attention beyond the trained length, by method"
    text = _text(result, title, "Means over layers and heads.")
    return _by_measure(result, curves, text, result.plan.lengths)


def _heading(result: AttentionResult, layer: int) -> str:
    if len(set(result.layer_kinds)) == 1:
        return f"layer {layer + 1}"
    return f"layer {layer + 1}, {result.layer_kinds[layer]}"


def by_distance(
    result: AttentionResult,
    method: str,
    lengths: list[int],
) -> Figure:
    """A panel for each layer, a line for each length: mass in buckets of distance, and that of
    uniform attention over the keys visible in the longest window."""
    longest = lengths[-1]
    panels = []
    for layer in range(len(result.layer_kinds)):
        lines = []
        for color, length in zip(shades(len(lengths)), lengths, strict=True):
            mass = result.seen[method, length].by_distance[:, layer].mean((0, 1)).tolist()
            middles = _middles(result.edges(length))
            lines.append(shaded(f"{length:,} tokens", middles, mass, color))
        uniform = result.seen[method, longest].visible[layer].tolist()
        label = f"uniform at {longest:,}"
        lines.append(reference_curve(label, _middles(result.edges(longest)), uniform))
        panels.append(Panel(lines, _heading(result, layer)))
    note = "Mass in buckets that double: distance 0, 1, 2–3, 4–7, ...; heads of a layer together."
    axes = MeasureAxes(
        x="distance + 1, tokens (log scale)",
        y="share of attention",
        trained_length=result.subject.trained_length,
        ticks=[4**k for k in range(12) if 4**k <= longest],
        shares=frozenset(panel.heading for panel in panels),
    )
    title = titled("How far back attention goes", method)
    return measures_figure(panels, _text(result, title, note), axes)


def _middles(edges: list[int]) -> list[float]:
    """Geometric middles of the buckets, in distance + 1."""
    return [math.sqrt((low + 1) * high) for low, high in pairwise(edges)]


def reach(result: AttentionResult, method: str, lengths: list[int]) -> Figure:
    """A panel for each layer, a line for each head: how far 90% of its mass reaches."""
    panels = []
    for layer in range(len(result.layer_kinds)):
        values = np.array(
            [result.seen[method, n].values["reach_90"][:, layer].mean(0).tolist() for n in lengths]
        )  # (lengths, heads)
        lines = [
            Curve("" if head else "one head", lengths, of_head, COLOURS[0], width=1.0)
            for head, of_head in enumerate(values.T)
        ]
        uniform = [0.9 * length for length in lengths]
        lines.append(reference_curve("uniform attention", lengths, uniform))
        panels.append(Panel(lines, _heading(result, layer)))
    axes = MeasureAxes(
        LENGTH, result.subject.trained_length, lengths, y="tokens (log scale)", log_y=True
    )
    title = titled("Tokens that hold 90% of a head's mass", method)
    return measures_figure(panels, _text(result, title), axes)


def wavelengths(result: AttentionResult) -> Figure:
    """Wavelength of every rotary pair at the longest length under each method, and the trained
    length."""
    spectra = {}
    longest = {}
    for method, length in result.pairs:
        longest[method] = max(length, longest.get(method, 0))
    for method, length in longest.items():
        pairs = result.pairs[method, length]
        kinds = dict.fromkeys(pair.kind for pair in pairs)
        for kind in kinds:
            name = name_of(method) if len(kinds) == 1 else f"{name_of(method)}, {kind}"
            spectra[name] = np.array(
                [pair.wavelength or math.inf for pair in pairs if pair.kind == kind]
            )
    text = FigureText(
        f"Rotary pairs and the trained length, at {max(longest.values()):,} tokens",
        f"{result.subject.name}: hollow where a turn takes longer than the trained length",
    )
    return wavelength_figure(spectra, result.subject.trained_length, text)
