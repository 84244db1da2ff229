"""Reports of `protocol: attention` and `protocol: generation`.

results.json of attention, in addition to `protocol`, `trained_length`, `checkpoint_hash` and the
like:

    cells        flat: method, length, layer, head, measure, value, low, high. head null: the mean
                 over the layer's heads; layer null too: over all layers. low and high, where head
                 is null: the interval over units (documents or clusters), null with fewer than 6.
                 The measures are in `measures`; one that does not exist for a cell has no row.
    by_distance  method, length, layer, head (null as above), edges (buckets + 1), mass (of each
                 bucket), and uniform: the mass of uniform attention over the visible keys.
    pairs        rotary pairs: method, length, kind of layer, pair, wavelength (null: no rotation),
                 turns within that length, turns_trained within the trained length as trained.
    absent       method, length, reason: cells that do not exist.
    mismatch     largest |weights·values − output of the model's own kernel| over all cells.

The metrics of results.csv are the measures, and mass and uniform_mass of a layer by distance (`at`,
`until`); `where` is a layer and head, empty for means over all of them.

results.json of generated text:

    cells     flat: method, source, start, stop, measure, value, low, high, rows. source: `greedy`,
              `temperature T` or `real text` (the same documents' own continuation); start and stop:
              positions of the bucket, stop excluded; rows: continuations that reach it; low and
              high: the interval over units (documents or clusters), null with fewer than 6. The
              measures are in `measures`, which are also the metrics of results.csv.
    samples   method, source, text: what the first prompt was continued with.
    absent    method, reason: methods that end before the full length.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure

from evaluation.diagnostics import attention_weights, repetition
from evaluation.diagnostics.attention import AttentionResult, mean_of_finite
from evaluation.diagnostics.diagnostic_session import DiagnosticResult
from evaluation.diagnostics.generation import REAL, GenerationResult
from evaluation.reports.caveats import caveats
from evaluation.reports.charts import LengthAxis, Styles, multiples, shades, styles_of
from evaluation.reports.document import ReportTable, pivot
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.figures import FigureText
from evaluation.reports.position_report import positions, tokens_seen
from evaluation.reports.provenance import text_basis
from evaluation.reports.reported_results import ReportedResults
from evaluation.reports.results_files import clean
from evaluation.reports.text import counted
from evaluation.results_table import ResultRow, ResultsTable, number
from evaluation.schemes.scheme_figures import wavelength_figure
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.statistics.intervals import mean_over_units

# Measures of tables and figures: heading, format.
ATTENTION = {
    "entropy": ("entropy, nats", ".2f"),
    "entropy_relative": ("entropy / ln n", ".0%"),
    "first_token": ("mass on first token", ".1%"),
    "mass_beyond": ("mass beyond L0", ".1%"),
    "logit_std": ("sd of logits", ".2f"),
    "logit_max": ("largest logit", ".2f"),
    "reach_90": ("reach of 90%, tokens", ",.0f"),
}
TEXT = {
    "repeated_4": ("4-grams repeated", ".1%"),
    "distinct_1": ("distinct tokens of a bucket", ".1%"),
    "longest_run": ("longest repeated stretch, tokens", ".1f"),
    "nll": ("NLL of the text, nats", ".2f"),
}
Measures = Mapping[str, tuple[str, str]]
DIGITS = 6  # significant ones in results.json
LENGTH = "length, tokens (log scale)"
MEAN = "mean"
UNIFORM = "uniform attention"
Place = tuple[int | None, int | None]  # layer and head; None: the mean over all of them


def diagnostic_report(
    result: DiagnosticResult,
    name: str,
    title: str,
    record: dict,
    table: ResultsTable,
    make: Callable[[ReportedResults], dict],
) -> EvaluationReport:
    """`make` returns the other fields of the report."""
    names = [name_of(method.label) for method in result.methods]
    r = ReportedResults(title=result.subject.name, names=names, facts=record, table=table)
    fields = {"caveats": [], **make(r)}
    units = len(np.unique(result.unit))
    fields["caveats"] = [
        *caveats(result.settings, units, result.unit_kind, result.absent),
        *fields["caveats"],
    ]
    title = f"{title} {result.subject.name}"
    return EvaluationReport(name=name, title=title, results=r, record=record, **fields)


def measures_table(
    r: ReportedResults,
    title: str,
    measures: Measures,
    index: Mapping[str, Callable[[ResultRow], str]],
    where: str | None = "",
) -> ReportTable:
    """A column for each measure."""
    rows = [row for measure in measures for row in r.table.select(measure, where=where)]
    rows.sort(key=lambda row: (r.names.index(row.variant), row.length or 0))
    return pivot(
        f"{title}, {r.subtitle}",
        rows,
        lambda row: format(row.value, measures[row.metric][1]),
        index={r.noun: lambda row: row.variant, **index},
        columns=lambda row: row.metric,
        headings={measure: heading for measure, (heading, _) in measures.items()},
    )


def measures_figure(
    measures: Measures,
    rows: Callable[[str], Iterable[ResultRow]],
    styles: Styles,
    axis: LengthAxis,
    text: FigureText,
    x: str = LENGTH,
) -> Figure:
    """A panel for each measure, whose `rows` these are."""
    shares = [heading for heading, form in measures.values() if form.endswith("%")]
    by_heading = {heading: rows(measure) for measure, (heading, _) in measures.items()}
    return multiples(by_heading, styles, axis, text, x=x, shares=shares)


def renamed(rows: Iterable[ResultRow], name: Callable[[ResultRow], str]) -> Iterator[ResultRow]:
    """Rows with another variant: what a line of a figure shows."""
    for row in rows:
        yield row._replace(variant=name(row))


def stem_of(stem: str, name: str) -> str:
    """The name of a method's figure."""
    return stem if name == name_of(TRAINED) else f"{stem}-{name}"


# Attention.


def attention_report(result: AttentionResult, name: str = "attention") -> EvaluationReport:
    record = clean(attention_record(result), DIGITS)
    details = (
        f"Means over the last {result.settings.targets} queries of {result.windows} windows of "
        f"{counted(result.documents, 'document')}, over all heads and layers."
    )
    return diagnostic_report(
        result,
        name,
        "Attention of",
        record,
        attention_rows(record),
        lambda r: {
            "verdict": attention_verdict(r),
            "details": [*_slow_pairs(r), details],
            "tables": [attention_table(r)],
            "draw": lambda: attention_figures(r),
        },
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


def measure_cells(result: AttentionResult) -> Iterator[dict]:
    """One record for each method, length, layer or all, head or all, and measure."""
    for (method, length), sample in result.seen.items():
        for measure, values in sample.values.items():  # (W, layers, H)
            for layer, head in places(*values.shape[1:]):
                by_window = mean_of_finite(at(values, (layer, head)).numpy(), (1, 2))
                if head is None:
                    numbers = mean_over_units(by_window, result.unit, result.settings.confidence)
                else:
                    mean = float(mean_of_finite(by_window, (0,)))
                    numbers = {"value": mean, "low": None, "high": None}
                if math.isfinite(numbers["value"]):
                    cell = {"method": method, "length": length, "layer": layer, "head": head}
                    yield {**cell, "measure": measure, **numbers}


def distance_cells(result: AttentionResult) -> Iterator[dict]:
    """Mass by distance of every layer and head, and of the means over them."""
    for (method, length), sample in result.seen.items():
        _, layers, heads, _ = sample.by_distance.shape
        for layer, head in places(layers, heads):
            mass = at(sample.by_distance, (layer, head)).mean((0, 1, 2))
            uniform = sample.visible.mean(0) if layer is None else sample.visible[layer]
            yield {
                "method": method,
                "length": length,
                "layer": layer,
                "head": head,
                "edges": result.edges(length),
                "mass": mass.tolist(),
                "uniform": uniform.tolist(),
            }


def attention_record(result: AttentionResult) -> dict:
    """The content of results.json."""

    def records(table: Mapping[tuple, dict], *names: str) -> list[dict]:
        return [dict(zip(names, key, strict=True)) | row for key, row in table.items()]

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
        "measures": attention_weights.MEASURES,
        "cells": list(measure_cells(result)),
        "by_distance": list(distance_cells(result)),
        "pairs": records(pairs, "method", "length", "pair"),
        "absent": records(absent, "method", "length"),
        "mismatch": max((sample.mismatch for sample in result.seen.values()), default=None),
    }


def attention_rows(record: dict) -> ResultsTable:
    """The long table of a record."""
    table = ResultsTable()

    def put(cell: dict, metric: str, value: float, **more) -> None:
        parts = [f"{part} {cell[part] + 1}" for part in ("layer", "head") if cell[part] is not None]
        row = ResultRow(name_of(cell["method"]), metric, value, cell["length"])
        table.put(row._replace(where=", ".join(parts), **more))

    for cell in record["cells"]:
        ends = {end: number(cell.get(end)) for end in ("low", "high")}
        put(cell, cell["measure"], cell["value"], **ends)
    for cell in record.get("by_distance", ()):
        if cell["head"] is None:
            for metric, values in (("mass", cell["mass"]), ("uniform_mass", cell["uniform"])):
                for (low, high), value in zip(pairwise(cell["edges"]), values, strict=True):
                    put(cell, metric, value, at=low, until=high)
    return table


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


def attention_table(r: ReportedResults) -> ReportTable:
    index = {"length": lambda row: f"{row.length:,}"}
    return measures_table(r, "Means over layers, heads and queries", ATTENTION, index)


def attention_figures(r: ReportedResults) -> dict[str, Figure]:
    """Of each method: measures by length and layer, and mass by distance; of all together."""
    figures = {}
    for name in dict.fromkeys(row.variant for row in r.table.select("mass")):
        figures[stem_of("attention_by_length", name)] = layers_figure(r, name)
        figures[stem_of("mass_by_distance", name)] = mass_figure(r, name)
    if len(r.names) > 1:
        styles = styles_of(r.names, name_of(TRAINED))
        figures["attention_by_method"] = attention_figure(r, styles)
    if r.facts["pairs"]:
        figures["rotary_pairs"] = pairs_figure(r)
    return figures


def attention_figure(r: ReportedResults, styles: Styles) -> Figure:
    """A line for each variant, means over layers and heads."""
    axis = LengthAxis(r.table.lengths("entropy_relative"), [r.trained_length])
    text = FigureText("Attention by context length", r.subtitle, "Dotted: trained length.")
    return measures_figure(ATTENTION, r.table.select, styles, axis, text)


def layers_figure(r: ReportedResults, name: str) -> Figure:
    """A line for each layer, and for the mean over them."""
    layers = [f"layer {n + 1}" for n in range(len(r.facts["layer_kinds"]))]
    axis = LengthAxis(r.table.lengths("entropy_relative"), [r.trained_length])

    def rows(measure: str) -> Iterator[ResultRow]:
        for where in ("", *layers):
            own = r.table.select(measure, name, where=where)
            yield from renamed(own, lambda row: row.where or MEAN)

    styles = shades(layers) | styles_of([MEAN], MEAN)
    title = f"Attention beyond the trained length, {name}"
    text = FigureText(title, r.subtitle, "Dotted: trained length.")
    return measures_figure(ATTENTION, rows, styles, axis, text)


def mass_figure(r: ReportedResults, name: str) -> Figure:
    """A panel for each layer, a line for each length."""
    lengths = sorted({row.length for row in r.table.select("mass", name)})
    longest = lengths[-1]
    by_layer = {}
    for n, kind in enumerate(r.facts["layer_kinds"]):
        where = f"layer {n + 1}"
        mass = r.table.select("mass", name, where=where)
        uniform = [
            row
            for row in r.table.select("uniform_mass", name, where=where)
            if row.length == longest
        ]
        by_layer[f"{where}, {kind}"] = [
            *renamed(mass, lambda row: f"{row.length:,} tokens"),
            *renamed(uniform, lambda row: UNIFORM),
        ]
    ticks = [*(4**k for k in range(12) if 4**k < longest), longest]
    note = "Buckets of distance that double: 0, 1, 2–3, 4–7, ... Dotted: trained length."
    return multiples(
        by_layer,
        shades([f"{n:,} tokens" for n in lengths]) | styles_of([UNIFORM], UNIFORM),
        LengthAxis(ticks, [r.trained_length], tokens_seen),
        FigureText(f"How far back attention goes, {name}", r.subtitle, note),
        x="distance + 1, tokens (log scale)",
        y="share of attention",
        shares=by_layer,
        top=max(row.value for rows in by_layer.values() for row in rows),
    )


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


# Generated text.


def generation_report(result: GenerationResult, name: str = "generation") -> EvaluationReport:
    record = clean(generation_record(result), DIGITS)
    details = (
        f"{len(result.unit)} prompts of {result.edges[0]:,} tokens from "
        f"{counted(result.documents, 'document')}; trained at {result.subject.trained_length:,}."
    )
    return diagnostic_report(
        result,
        name,
        "Text generated by",
        record,
        generation_rows(record),
        lambda r: {
            "verdict": generation_verdict(r),
            "details": [details],
            "caveats": [f"{label} ends early: {why}." for label, why in result.shorter.items()],
            "tables": [generation_table(r)],
            "draw": lambda: {
                stem_of("generation", name): source_figure(r, name, result.sources)
                for name in dict.fromkeys(name_of(label) for label, _ in result.values)
            },
        },
    )


def generation_record(result: GenerationResult) -> dict:
    """The content of results.json."""
    cells = []
    for (method, source), values in result.values.items():
        for measure, value in values.items():  # (P, buckets)
            for n, (start, stop) in enumerate(pairwise(result.edges)):
                rows = int(np.isfinite(value[:, n]).sum())
                place = {"method": method, "source": source, "start": start, "stop": stop}
                mean = mean_over_units(value[:, n], result.unit, result.settings.confidence)
                cells.append({**place, "measure": measure, **mean, "rows": rows})
    return {
        "kind": "generation",
        **text_basis(result),
        "targets_hash": result.targets_hash,
        "prompts": len(result.unit),
        "edges": result.edges,
        "measures": repetition.MEASURES,
        "cells": [cell for cell in cells if cell["rows"]],
        "samples": [
            {"method": method, "source": source, "text": text}
            for (method, source), text in result.text.items()
        ],
        "absent": [
            {"method": method, "reason": reason} for method, reason in result.shorter.items()
        ],
    }


def generation_rows(record: dict) -> ResultsTable:
    """The long table of a record: `where` is the source of the text, `at` and `until` positions."""
    return ResultsTable(
        ResultRow(
            name_of(cell["method"]),
            cell["measure"],
            cell["value"],
            where=cell["source"],
            at=cell["start"],
            until=cell["stop"],
            low=number(cell.get("low")),
            high=number(cell.get("high")),
        )
        for cell in record["cells"]
    )


def generation_verdict(r: ReportedResults) -> str:
    """How much the text repeats itself where the evaluation ends."""
    rows = r.table.select("repeated_4", where=None)
    last = max((row.until for row in rows), default=0)
    parts = [f"{row.variant}, {row.where} {row.value:.0%}" for row in rows if row.until == last]
    return f"4-grams repeated up to {last:,} tokens: {'; '.join(parts)}."


def generation_table(r: ReportedResults) -> ReportTable:
    index = {"source": lambda row: row.where, "positions": positions}
    return measures_table(r, "Text by position", TEXT, index, where=None)


def source_figure(r: ReportedResults, name: str, sources: list[str]) -> Figure:
    """A panel for each measure, a line for each source of text."""
    edges = r.facts["edges"]
    width = edges[1] - edges[0]
    text = FigureText(
        f"Generation past the trained length, {name}",
        f"{r.title}: {r.facts['prompts']} prompts of {edges[0]:,} tokens",
        f"Repetitions within the previous {width:,} tokens. Dotted: trained length.",
    )
    return measures_figure(
        TEXT,
        lambda measure: renamed(r.table.select(measure, name, where=None), lambda row: row.where),
        styles_of(sources, REAL),
        LengthAxis(edges, [r.trained_length], lambda row: (row.at + row.until) / 2, log=False),
        text,
        x="position, tokens",
    )
