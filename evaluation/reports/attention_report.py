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
    absent        method, length, reason: cells that do not exist.
    mismatch      largest |weights·values − output of the model's own kernel| over all cells.

The metrics of results.csv are the measures, and mass and uniform_mass of a layer by distance (`at`,
`until`); `where` is a layer and head, empty for means over all of them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure

from evaluation.diagnostics.attention import AttentionResult, mean_of_finite
from evaluation.diagnostics.attention_weights import MEASURES
from evaluation.reports.caveats import caveats
from evaluation.reports.charts import LengthAxis, Styles, multiples, shades, styles_of
from evaluation.reports.document import ReportTable, pivot
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.figures import FigureText
from evaluation.reports.provenance import text_basis
from evaluation.reports.reported_results import ReportedResults
from evaluation.reports.results_files import mean_over_units, rounded, rounded_record
from evaluation.reports.text import counted
from evaluation.results_table import ResultRow, ResultsTable, number
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
LENGTH = "length, tokens (log scale)"
MEAN = "mean"
UNIFORM = "uniform attention"
Place = tuple[int | None, int | None]  # layer and head; None: the mean over all of them


def attention_report(result: AttentionResult, name: str = "attention") -> EvaluationReport:
    record = record_of(result)
    r = ReportedResults(
        title=result.subject.name,
        names=[name_of(method.label) for method in result.methods],
        facts=record,
        table=attention_rows(record),
    )

    def draw() -> dict[str, Figure]:
        figures = {}
        for method in result.methods:
            if result.lengths_of(method.label):
                end = "" if method.label == TRAINED else f"-{method.label}"
                for stem, figure in figures_of(r, name_of(method.label)).items():
                    figures[stem + end] = figure
        if len(r.names) > 1:
            styles = styles_of(r.names, name_of(TRAINED))
            figures["attention_by_method"] = attention_figure(r, styles)
        if result.pairs:
            figures["rotary_pairs"] = pairs_figure(r)
        return figures

    return EvaluationReport(
        name=name,
        title=f"Attention of {result.subject.name}",
        results=r,
        record=record,
        verdict=attention_verdict(r),
        details=[
            *_slow_pairs(r),
            f"Means over the last {result.settings.targets} queries of {result.windows} windows of "
            f"{counted(result.documents, 'document')}, over all heads and layers.",
        ],
        caveats=caveats(
            result.settings, len(np.unique(result.unit)), result.unit_kind, result.absent
        ),
        tables=attention_tables(r),
        draw=draw,
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


def measure_cells(result: AttentionResult) -> list[dict]:
    """One record for each method, length, layer or all, head or all, and measure."""
    confidence = result.settings.confidence
    cells = []
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
                cells.append({**cell, "measure": measure, **numbers})
    return [cell for cell in cells if cell["value"] is not None]


def record_of(result: AttentionResult) -> dict:
    """The content of results.json."""

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
        "cells": measure_cells(result),
        "by_distance": distance_cells(result),
        "pairs": records(pairs, "method", "length", "pair"),
        "absent": records(absent, "method", "length"),
        "mismatch": max((sample.mismatch for sample in result.seen.values()), default=None),
    }


def distance_cells(result: AttentionResult) -> list[dict]:
    """Mass by distance of every layer and head, and of the means over them."""
    cells = []
    for (method, length), sample in result.seen.items():
        _, layers, heads, _ = sample.by_distance.shape
        for layer, head in places(layers, heads):
            mass = at(sample.by_distance, (layer, head)).mean((0, 1, 2))
            uniform = sample.visible.mean(0) if layer is None else sample.visible[layer]
            cells.append(
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
    return cells


def attention_rows(record: dict) -> ResultsTable:
    """The long table of a record."""
    table = ResultsTable()
    for cell in record["cells"]:
        ends = {end: number(cell.get(end)) for end in ("low", "high")}
        if cell["value"] is not None:
            row = ResultRow(name_of(cell["method"]), cell["measure"], cell["value"], cell["length"])
            table.put(row._replace(where=_where(cell), **ends))
    for cell in record.get("by_distance", ()):
        if cell["head"] is None:
            for metric, values in (("mass", cell["mass"]), ("uniform_mass", cell["uniform"])):
                for (low, high), value in zip(pairwise(cell["edges"]), values, strict=True):
                    row = ResultRow(name_of(cell["method"]), metric, value, cell["length"])
                    table.put(row._replace(where=_where(cell), at=low, until=high))
    return table


def _where(cell: dict) -> str:
    names = ("layer", "head")
    return ", ".join(f"{name} {cell[name] + 1}" for name in names if cell[name] is not None)


def attention_verdict(r: ReportedResults) -> str:
    """How entropy and the mass beyond the trained distance change with the length."""
    parts = []
    for name in r.names:
        entropy = r.table.select("entropy_relative", name)
        beyond = r.table.select("mass_beyond", name)
        if entropy and beyond:
            shares = f"{entropy[0].value:.0%} → {entropy[-1].value:.0%}"
            parts.append(f"{name} entropy {shares} of ln n, {beyond[-1].value:.1%} beyond L0")
    lengths = r.table.lengths("entropy_relative")
    return f"From {lengths[0]:,} to {lengths[-1]:,} tokens: {'; '.join(parts)}."


def _slow_pairs(r: ReportedResults) -> Iterator[str]:
    """Rotary pairs that never complete a turn."""
    pairs = {pair["pair"]: pair for pair in r.facts["pairs"] if pair["method"] == TRAINED}
    if pairs:
        slow = sum(pair["turns_trained"] < 1 for pair in pairs.values())
        yield (
            f"{slow} of {len(pairs)} rotary pairs never completed a turn within "
            f"{r.trained_length:,} tokens."
        )


def attention_tables(r: ReportedResults) -> list[ReportTable]:
    rows = [row for measure in SHOWN for row in r.table.select(measure)]
    rows.sort(key=lambda row: (r.names.index(row.variant), row.length))
    measured = {row.metric for row in rows}
    return [
        pivot(
            f"Means over layers, heads and queries, {r.subtitle}",
            rows,
            lambda row: format(row.value, SHOWN[row.metric][1]),
            index={r.noun: lambda row: row.variant, "length": lambda row: f"{row.length:,}"},
            columns=lambda row: row.metric,
            headings={key: name for key, (name, _) in SHOWN.items() if key in measured},
        )
    ]


def attention_figure(
    r: ReportedResults,
    styles: Styles,
    title: str = "Attention by context length",
    rows: Callable[[str], list[ResultRow]] | None = None,
) -> Figure:
    """A panel for each measure; by default a line for each variant, means over layers and heads."""
    by_heading = {name: (rows or r.table.select)(measure) for measure, name in DRAWN.items()}
    shares = [name for measure, name in DRAWN.items() if SHOWN[measure][1].endswith("%")]
    axis = LengthAxis(r.table.lengths("entropy_relative"), [r.trained_length])
    return multiples(by_heading, styles, axis, _text(r, title), x=LENGTH, shares=shares)


def _text(r: ReportedResults, title: str, note: str = "") -> FigureText:
    return FigureText(title, r.subtitle, f"{note} Dotted: trained length.".strip())


def figures_of(r: ReportedResults, name: str) -> dict[str, Figure]:
    """Of one method: measures by length and layer, mass by distance, and reach of heads."""
    lengths = sorted({row.length for row in r.table.select("entropy_relative", name)})
    kinds = r.facts["layer_kinds"]
    layers = {f"layer {n + 1}": f"layer {n + 1}, {kind}" for n, kind in enumerate(kinds)}
    if len(set(kinds)) == 1:
        layers = {layer: layer for layer in layers}

    def by_layer(measure: str) -> list[ResultRow]:
        rows = r.table.select(measure, name, where=None)
        return [row._replace(variant=row.where or MEAN) for row in rows if "head" not in row.where]

    mass = {}
    reach = {}
    for layer, heading in layers.items():
        uniform = r.table.select("uniform_mass", name, where=layer)
        mass[heading] = [
            *(
                row._replace(variant=f"{row.length:,} tokens")
                for row in r.table.select("mass", name, where=layer)
            ),
            *(row._replace(variant=UNIFORM) for row in uniform if row.length == lengths[-1]),
        ]
        reach[heading] = [
            *(
                row._replace(variant=row.where.removeprefix(f"{layer}, "))
                for row in r.table.select("reach_90", name, where=None)
                if row.where.startswith(f"{layer}, ")
            ),
            *(ResultRow(UNIFORM, "reach_90", 0.9 * length, length) for length in lengths),
        ]
    by_distance = LengthAxis(
        [*(4**k for k in range(12) if 4**k < lengths[-1]), lengths[-1]],
        [r.trained_length],
        lambda row: math.sqrt((row.at + 1) * row.until),
    )
    uniform_style = styles_of([UNIFORM], UNIFORM)
    heads = dict.fromkeys(row.variant for rows in reach.values() for row in rows)
    buckets = "Buckets of distance that double: 0, 1, 2–3, 4–7, ...; heads of a layer together."
    return {
        "attention_by_length": attention_figure(
            r,
            shades(list(layers)) | styles_of([MEAN], MEAN),
            f"Attention beyond the trained length, {name}",
            by_layer,
        ),
        "mass_by_distance": multiples(
            mass,
            shades([f"{n:,} tokens" for n in lengths]) | uniform_style,
            by_distance,
            _text(r, f"How far back attention goes, {name}", buckets),
            x="distance + 1, tokens (log scale)",
            y="share of attention",
            shares=mass,
            top=max(row.value for rows in mass.values() for row in rows),
        ),
        "reach_of_heads": multiples(
            reach,
            styles_of(list(heads)) | uniform_style,
            LengthAxis(lengths, [r.trained_length]),
            _text(r, f"Tokens that hold 90% of a head's mass, {name}"),
            x=LENGTH,
            y="tokens",
        ),
    }


def pairs_figure(r: ReportedResults) -> Figure:
    """Wavelength of every rotary pair at the longest length under each method, and the trained
    length."""
    longest = {pair["method"]: pair["length"] for pair in r.facts["pairs"]}
    by_curve: dict[str, list[float]] = {}
    for pair in r.facts["pairs"]:
        if pair["length"] == longest[pair["method"]]:
            kinds = {p["kind"] for p in r.facts["pairs"] if p["method"] == pair["method"]}
            name = name_of(pair["method"]) + (f", {pair['kind']}" if len(kinds) > 1 else "")
            by_curve.setdefault(name, []).append(pair["wavelength"] or math.inf)
    spectra = {name: np.array(waves) for name, waves in by_curve.items()}
    text = FigureText(
        f"Rotary pairs and the trained length, at {max(longest.values()):,} tokens",
        f"{r.title}: hollow where a turn takes longer than the trained length",
    )
    return wavelength_figure(spectra, r.trained_length, text)
