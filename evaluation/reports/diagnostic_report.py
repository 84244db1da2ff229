"""Reports of `protocol: attention` and `protocol: generation`.

Besides `protocol`, `trained_length`, `checkpoint_hash` and similar entries, and `not_measured`
(method, length, reason: cells without numbers), results.json of attention has:

    cells        flat: method, length, layer, head, measure, value, low, high. head null: the mean
                 over the layer's heads; layer null too: over all layers. low and high, if head
                 is null: the interval over units (documents or clusters), null with fewer than 6.
                 The measures are in `measures`; one that does not exist for a cell has no row.
    by_distance  method, length, layer, head (null as above), edges (buckets + 1), mass (of each
                 bucket), and uniform: the mass of uniform attention over the visible keys.

The metrics of results.csv are the measures, and mass and uniform_mass of a layer by distance (`at`,
`until`); `where` is a layer and head, empty for means over all of them.

results.json of generated text:

    cells     flat: method, source, start, stop, measure, value, low, high, rows. source: `greedy`,
              `temperature T` or `real text` (the same documents' own continuation); start and stop:
              positions of the bucket, stop excluded; rows: continuations that reach it; low and
              high: the interval over units (documents or clusters), null with fewer than 6. The
              measures are in `measures`, which are also the metrics of results.csv.
    samples   method, source, text: the continuation of the first prompt.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure

from evaluation.diagnostics.attention import ATTENTION, AttentionMeasurement
from evaluation.diagnostics.diagnostic_session import DiagnosticMeasurement
from evaluation.diagnostics.generation import REAL, TEXT, GenerationMeasurement
from evaluation.methods import TRAINED, name_of
from evaluation.reports.document import ReportTable, counted
from evaluation.reports.figures import FigureText, LengthAxis, Styles, multiples, shades, styles_of
from evaluation.reports.loss_report import positions, tokens_seen
from evaluation.reports.report import (
    Columns,
    EvaluationReport,
    ReportedResults,
    basis,
    clean,
    metrics_table,
    report_of,
)
from evaluation.statistics.intervals import mean_over_units
from evaluation.statistics.results_table import ResultRow, number

DIGITS = 6  # significant digits in results.json
MEAN = "mean"
UNIFORM = "uniform attention"


def record_of(measurement: DiagnosticMeasurement, **record) -> dict:
    """The content of results.json."""
    common = {
        **basis(measurement),
        "documents": measurement.documents,
        "unit_count": len(np.unique(measurement.unit)),
        "unit": measurement.unit_kind,
        "bos": measurement.settings.bos,
    }
    return clean(common | record, DIGITS)


def meanings(measures: Mapping[str, tuple[str, str, str]]) -> dict[str, str]:
    return {measure: meaning for measure, (*_, meaning) in measures.items()}


def flat_rows(record: dict) -> Iterator[ResultRow]:
    """The long table of a record: `where` is a layer and head, or the source of the text; `at` and
    `until` are positions."""
    for cell in record["cells"]:
        yield flat_row(cell)


def flat_row(cell: dict) -> ResultRow:
    parts = [f"{part} {cell[part] + 1}" for part in ("layer", "head") if cell.get(part) is not None]
    return ResultRow(
        name_of(cell["method"]),
        cell["measure"],
        cell["value"],
        cell.get("length"),
        where=cell.get("source", ", ".join(parts)),
        at=cell.get("start"),
        until=cell.get("stop"),
        low=number(cell.get("low")),
        high=number(cell.get("high")),
    )


def measures_figure(
    measures: Columns,
    rows: Callable[[str], Iterable[ResultRow]],
    styles: Styles,
    axis: LengthAxis,
    text: FigureText,
    x: str = "length, tokens (log scale)",
) -> Figure:
    """A panel for each measure; `rows` returns its rows."""
    shares = [heading for heading, form, _ in measures.values() if str(form).endswith("%")]
    by_heading = {heading: rows(measure) for measure, (heading, *_) in measures.items()}
    return multiples(by_heading, styles, axis, text, x=x, shares=shares)


def renamed(rows: Iterable[ResultRow], name: Callable[[ResultRow], str]) -> list[ResultRow]:
    """Rows whose variant is replaced by the name of their line in a figure."""
    return [row._replace(variant=name(row)) for row in rows]


def stem_of(stem: str, name: str) -> str:
    """The file name of a method's figure."""
    return stem if name == name_of(TRAINED) else f"{stem}-{name}"


# Attention.


def attention_report(
    measurement: AttentionMeasurement, name: str = "attention"
) -> EvaluationReport:
    record = record_of(
        measurement,
        kind="attention",
        targets_hash=measurement.plan.hash,
        windows=len(measurement.unit),
        queries=measurement.settings.targets,
        lengths=measurement.plan.lengths,
        layer_kinds=measurement.layer_kinds,
        measures=meanings(ATTENTION),
        cells=list(measure_cells(measurement)),
        by_distance=list(distance_cells(measurement)),
    )
    details = [
        f"Means over the last {record['queries']} queries of {record['windows']} windows of "
        f"{counted(measurement.documents, 'document')}, over all heads and layers.",
    ]
    report = report_of(measurement, record, attention_rows(record), name, "Attention of", details)
    r = report.results
    report.verdict = attention_verdict(r)
    report.tables = attention_tables(r)
    report.draw = lambda: attention_figures(r)
    return report


def parts_of(values: torch.Tensor) -> Iterator[tuple[dict, torch.Tensor]]:
    """Parts of values (W, layers, H, ...): all layers and heads, then each layer with all its heads
    and each head alone."""
    _, layers, heads = values.shape[:3]
    yield {"layer": None, "head": None}, values
    for layer in range(layers):
        of_layer = values[:, layer : layer + 1]
        yield {"layer": layer, "head": None}, of_layer
        for head in range(heads):
            yield {"layer": layer, "head": head}, of_layer[:, :, head : head + 1]


def measure_cells(measurement: AttentionMeasurement) -> Iterator[dict]:
    """One record for each method, length, layer (or all layers), head (or all heads), and
    measure."""
    for (method, length), sample in measurement.values_by_role[""].items():
        for measure in ATTENTION:
            for layer_and_head, part in parts_of(sample[measure]):
                cell = {"method": method, "length": length, **layer_and_head, "measure": measure}
                if layer_and_head["head"] is None:
                    by_window = part.nanmean((1, 2)).numpy()
                    cell |= mean_over_units(
                        by_window,
                        measurement.unit,
                        measurement.settings.confidence,
                    )
                else:
                    cell |= {"value": float(part.nanmean()), "low": None, "high": None}
                if math.isfinite(cell["value"]):
                    yield cell


def distance_cells(measurement: AttentionMeasurement) -> Iterator[dict]:
    """Mass by distance of every layer and head, and its means over them."""
    for (method, length), sample in measurement.values_by_role[""].items():
        masses = parts_of(sample["by_distance"])
        uniform = parts_of(sample["visible"])
        for (layer_and_head, mass), (_, visible) in zip(masses, uniform, strict=True):
            yield {
                "method": method,
                "length": length,
                **layer_and_head,
                "edges": measurement.edges(length),
                "mass": mass.mean((0, 1, 2)).tolist(),
                "uniform": visible.mean((0, 1, 2)).tolist(),
            }


def attention_rows(record: dict) -> Iterator[ResultRow]:
    """The long table of a record."""
    yield from flat_rows(record)
    for cell in record.get("by_distance", ()):
        if cell["head"] is None:
            for metric, column in (("mass", "mass"), ("uniform_mass", "uniform")):
                edges = pairwise(cell["edges"])
                for (start, stop), value in zip(edges, cell[column], strict=True):
                    columns = {"measure": metric, "start": start, "stop": stop}
                    yield flat_row({**cell, **columns, "value": value})


def attention_verdict(r: ReportedResults) -> str:
    """The change of entropy with the length, and the mass beyond the trained length."""
    parts = []
    for name in r.names:
        entropy = r.rows("entropy_relative", name)
        beyond = r.rows("mass_beyond", name)
        if entropy and beyond:
            shares = f"{entropy[0].value:.0%} → {entropy[-1].value:.0%}"
            parts.append(f"{name} entropy {shares} of ln n, {beyond[-1].value:.1%} beyond L0")
    lengths = r.lengths_of("entropy_relative")
    return f"From {lengths[0]:,} to {lengths[-1]:,} tokens: {'; '.join(parts)}."


def attention_tables(r: ReportedResults) -> list[ReportTable]:
    index = {"length": lambda row: f"{row.length:,}"}
    return [
        metrics_table(r, f"Means over layers, heads and queries, {r.subtitle}", ATTENTION, index)
    ]


def attention_figures(r: ReportedResults) -> dict[str, Figure]:
    """Measures by length and layer and mass by distance for each method, and measures by method."""
    figures = {}
    for name in dict.fromkeys(row.variant for row in r.rows("entropy")):
        figures[stem_of("attention_by_length", name)] = layers_figure(r, name)
        figures[stem_of("mass_by_distance", name)] = mass_figure(r, name)
    if len(r.names) > 1:
        styles = styles_of(r.names, name_of(TRAINED))
        figures["attention_by_method"] = attention_figure(r, styles)
    return figures


def attention_figure(
    r: ReportedResults,
    styles: Styles,
    rows: Callable[[str], Iterable[ResultRow]] | None = None,
    title: str = "Attention by context length",
) -> Figure:
    """A panel for each measure; by default a line for each variant, means over layers and heads."""
    axis = LengthAxis(r.lengths_of("entropy_relative"), [r.trained_length])
    text = FigureText(title, r.subtitle, "Dotted: trained length.")
    return measures_figure(ATTENTION, rows or r.rows, styles, axis, text)


def layers_figure(r: ReportedResults, name: str) -> Figure:
    """A line for each layer, and for the mean over them."""
    layers = [f"layer {n + 1}" for n in range(len(r.record["layer_kinds"]))]

    def rows(measure: str) -> list[ResultRow]:
        rows = [row for where in ("", *layers) for row in r.rows(measure, name, where=where)]
        return renamed(rows, lambda row: row.where or MEAN)

    styles = shades(layers) | styles_of([MEAN], MEAN)
    return attention_figure(r, styles, rows, f"Attention beyond the trained length, {name}")


def mass_figure(r: ReportedResults, name: str) -> Figure:
    """A panel for each layer, a line for each length."""
    lengths = [row.length for row in r.rows("entropy", name)]
    longest = lengths[-1]
    by_layer = {}
    for n, kind in enumerate(r.record["layer_kinds"], start=1):
        mass = r.rows("mass", name, where=f"layer {n}")
        uniform = r.rows("uniform_mass", name, where=f"layer {n}")
        uniform = [row for row in uniform if row.length == longest]
        by_layer[f"layer {n}, {kind}"] = [
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


# Generated text.


def generation_report(
    measurement: GenerationMeasurement, name: str = "generation"
) -> EvaluationReport:
    record = record_of(
        measurement,
        kind="generation",
        targets_hash=measurement.targets_hash,
        prompts=len(measurement.unit),
        edges=measurement.edges,
        measures=meanings(TEXT),
        cells=list(generation_cells(measurement)),
        samples=[
            {"method": method, "source": source, "text": text}
            for method, source, text, _ in measurement.continuations()
        ],
    )
    details = [
        f"{record['prompts']} prompts of {measurement.edges[0]:,} tokens from "
        f"{counted(measurement.documents, 'document')}; trained at {record['trained_length']:,}."
    ]
    report = report_of(measurement, record, flat_rows(record), name, "Text generated by", details)
    r = report.results
    report.verdict = generation_verdict(r)
    report.tables = generation_tables(r)
    report.draw = lambda: {
        stem_of("generation", each): source_figure(r, each, measurement.sources) for each in r.names
    }
    return report


def generation_cells(measurement: GenerationMeasurement) -> Iterator[dict]:
    """One record for each method, source, measure and bucket that any row reaches."""
    buckets = list(pairwise(measurement.edges))
    for method, source, _, measures in measurement.continuations():
        for measure, by_bucket in measures.items():
            for (start, stop), values in zip(buckets, by_bucket.T, strict=True):
                rows = int(np.isfinite(values).sum())
                if rows:
                    yield {
                        "method": method,
                        "source": source,
                        "start": start,
                        "stop": stop,
                        "measure": measure,
                        **mean_over_units(
                            values,
                            measurement.unit,
                            measurement.settings.confidence,
                        ),
                        "rows": rows,
                    }


def generation_verdict(r: ReportedResults) -> str:
    """The share of repeated 4-grams in the last bucket of positions."""
    rows = r.rows("repeated_4", where=None)
    last = max((row.bounds[1] for row in rows), default=0)
    parts = [f"{row.variant}, {row.where} {row.value:.0%}" for row in rows if row.until == last]
    return f"4-grams repeated up to {last:,} tokens: {'; '.join(parts)}."


def generation_tables(r: ReportedResults) -> list[ReportTable]:
    index = {"source": lambda row: row.where, "positions": positions}
    return [metrics_table(r, f"Text by position, {r.subtitle}", TEXT, index)]


def source_figure(r: ReportedResults, name: str, sources: list[str]) -> Figure:
    """A panel for each measure, a line for each source of text."""
    edges = r.record["edges"]
    text = FigureText(
        f"Generation past the trained length, {name}",
        f"{r.title}: {r.record['prompts']} prompts of {edges[0]:,} tokens",
        f"Repetitions within the previous {edges[1] - edges[0]:,} tokens. Dotted: trained length.",
    )
    return measures_figure(
        TEXT,
        lambda measure: renamed(r.rows(measure, name, where=None), lambda row: row.where),
        styles_of(sources, REAL),
        LengthAxis(edges, [r.trained_length], lambda row: sum(row.bounds) / 2),
        text,
        x="position, tokens (log scale)",
    )
