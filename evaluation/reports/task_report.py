"""Report of an evaluation by tasks: accuracy by length, depth and distance, and every item in
items.csv.

Metrics: accuracy (by likelihood, `verdict`: against chance), exact, gain (over truncation);
accuracy_by_depth and accuracy_by_distance, whose `at` is a depth, or tokens before the question.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pandas as pd
from matplotlib.figure import Figure

from evaluation.reports.caveats import caveats
from evaluation.reports.charts import (
    LengthAxis,
    Styles,
    curves_of,
    heat_map,
    length_panel,
    styles_of,
)
from evaluation.reports.document import Cell, ReportTable, TableCell, pivot
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.figures import FigureText, panels
from evaluation.reports.provenance import basis, provenance
from evaluation.reports.reported_results import ReportedResults, melted
from evaluation.reports.results_files import interval_columns
from evaluation.reports.text import counted, percent
from evaluation.results_table import ResultRow, ResultsTable, number
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.tasks.task_analysis import TaskAnalysis, TaskRow
from evaluation.tasks.task_session import TaskResult

CLAIM_ITEMS = 200  # items at each length that a claim about retrieval requires
ABOVE_CHANCE = "above chance"
METRICS = {  # symbol_accuracy: of tasks on symbols (item_report.py), which have no accuracy
    "accuracy": "accuracy",
    "exact": "exact match",
    "symbol_accuracy": "symbols of the answer",
    "gain": "gain over truncation, points",
}


def task_report(
    result: TaskResult,
    analysis: TaskAnalysis,
    name: str = "task",
) -> EvaluationReport:
    drawn = result.drawn
    record = record_of(result, analysis)
    r = ReportedResults(
        title=result.subject.name,
        names=[name_of(method.label) for method in result.methods],
        facts=record,
        table=task_rows(record),
    )
    styles = styles_of(r.names, name_of(TRAINED))

    def draw() -> dict[str, Figure]:
        figures = {"accuracy_by_length": accuracy_figure(r, styles)} if analysis.rows else {}
        for label in dict.fromkeys(spot.method for spot in analysis.by_depth):
            figures[f"accuracy_by_depth_{label}"] = place_figure(r, name_of(label))
        return figures

    first, *more = task_tables(r)
    level = f"{100 * result.settings.confidence:g}%"
    kind = drawn.unit_kind
    details = [
        f"{counted(analysis.units, kind)}; intervals by length: {level} over {kind}s, simultaneous "
        f"over {analysis.family} methods and lengths. They describe this checkpoint, not the "
        "positional scheme."
    ]
    if drawn.count < CLAIM_ITEMS:
        details.append(
            f"{drawn.count} items: a claim about retrieval requires at least {CLAIM_ITEMS}."
        )
    missing = {**result.absent, **result.failed}
    return EvaluationReport(
        name=name,
        title=f"{result.facts['task'].capitalize()}: {result.subject.name}",
        results=r,
        record=record,
        verdict=task_verdict(r),
        details=details,
        caveats=caveats(result.settings, analysis.units, drawn.unit_kind, missing),
        tables=[first],
        more_tables=more,
        draw=draw,
        items={"items.csv": item_rows(result)},
    )


def record_of(result: TaskResult, analysis: TaskAnalysis) -> dict:
    """The content of results.json."""
    drawn = result.drawn
    missing = {**result.absent, **result.failed}
    return {
        **basis(result),
        "task": result.facts["task"],
        "items": drawn.count,
        "candidates": drawn.candidates,
        "chance": drawn.chance,
        "unit_count": analysis.units,
        "unit": drawn.unit_kind,
        "family": analysis.family,
        "haystack": result.facts["haystack"],
        "bos": drawn.bos is not None,
        "items_hash": drawn.hash,
        "tokenizer_hash": result.facts["tokenizer_hash"],
        **provenance(result),
        "task_settings": drawn.task.model_dump(mode="json"),
        "lengths": drawn.lengths,
        "units": {"kind": drawn.unit_kind, "names": drawn.unit_names},
        "cells": [
            {**row_columns(row), "unit_accuracy": row.unit_share, "unit_exact": row.unit_exact}
            for row in analysis.rows
        ],
        "by_depth": [asdict(spot) for spot in analysis.by_depth],
        "by_distance": [asdict(spot) for spot in analysis.by_distance],
        "not_measured": [
            {"method": method, "length": length, "reason": reason}
            for (method, length), reason in missing.items()
        ],
        "per_item_nll": result.files,
    }


def row_columns(row: TaskRow) -> dict:
    return {
        "method": row.method,
        "length": row.length,
        "accuracy": row.share.share,
        "accuracy_low": row.low,
        "accuracy_high": row.high,
        "against_chance": row.word,
        "wilson_low": row.share.low,
        "wilson_high": row.share.high,
        "n_eff": row.share.n_eff,
        "exact": row.exact.share,
        "exact_low": row.exact.low,
        "exact_high": row.exact.high,
        **interval_columns("gain", row.gain),
    }


def item_rows(result: TaskResult) -> pd.DataFrame:
    """One row for each method, length and item."""
    drawn = result.drawn
    parts = []
    for (label, length), answers in result.answers.items():
        items = drawn.items[length]
        columns = {
            "method": label,
            "length": length,
            "item": range(len(items)),
            drawn.unit_kind: [drawn.unit_names[unit] for unit in drawn.unit],
            "depth": [item.depth for item in items],
            "distance": [item.distance for item in items],
            "right": answers.right.astype(int),
            "exact": answers.exact.astype(int),
            "chosen": answers.chosen,
            "nll": answers.nll[:, 0].round(6),
            "nll_of_best_other": answers.nll[:, 1:].min(axis=1).round(6),
        }
        parts.append(pd.DataFrame(columns, dtype=object))
    return pd.concat(parts) if parts else pd.DataFrame()


def task_rows(record: dict) -> ResultsTable:
    """The long table of a record."""
    table = ResultsTable()
    for cell in record["cells"]:
        compared = "accuracy" if "accuracy" in cell else "exact"
        for row in melted([cell], METRICS):
            verdict = cell.get("against_chance", "") if row.metric == compared else ""
            table.put(row._replace(verdict=verdict))
    for metric in ("by_depth", "by_distance"):
        for row in _spots(record, metric):
            table.put(row)
    return table


def _spots(record: dict, metric: str) -> Iterator[ResultRow]:
    for spot in record.get(metric) or []:
        share = spot["share"]
        yield ResultRow(
            name_of(spot["method"]),
            f"accuracy_{metric}",
            share["share"],
            spot["length"],
            at=spot["where"],
            until=spot.get("until"),
            low=number(share.get("low")),
            high=number(share.get("high")),
        )


def task_verdict(r: ReportedResults) -> str:
    """Which variants answer above chance at the longest length."""
    rows = r.table.select("accuracy")
    if not rows:
        return "No accuracy was measured."
    longest = max(row.length for row in rows)
    last = [row for row in rows if row.length == longest]
    above = [row.variant for row in last if row.verdict == ABOVE_CHANCE]
    if all(math.isnan(row.low) for row in last):
        return f"Accuracy up to {longest:,} tokens as point estimates; chance {_chance(r)}."
    return f"Above chance ({_chance(r)}) at {longest:,} tokens: {', '.join(above) or 'none'}."


def _chance(r: ReportedResults) -> str:
    return f"{r.facts['chance']:.1%}"


def task_tables(r: ReportedResults) -> list[ReportTable]:
    """A row per variant and length: accuracy, exact match and gain; and accuracy by depth."""
    rows = [row for metric in METRICS for row in r.table.select(metric)]
    rows.sort(key=lambda row: (r.names.index(row.variant), row.length))
    index = {r.noun: lambda row: row.variant, "length": lambda row: f"{row.length:,}"}
    drawn = {row.metric for row in rows}
    by_depth = r.table.select("accuracy_by_depth")
    depths = sorted({row.at for row in by_depth})
    return [
        pivot(
            f"{r.facts.get('task', 'task')}: {r.subtitle}, chance {_chance(r)}",
            rows,
            task_cell,
            index=index,
            columns=lambda row: row.metric,
            headings={metric: name for metric, name in METRICS.items() if metric in drawn},
            note="Accuracy: share of items whose answer is the most likely candidate.",
        ),
        pivot(
            "Accuracy by depth of the answer (0: beginning of the text)",
            by_depth,
            lambda row: f"{row.value:.0%}",
            index=index,
            columns=lambda row: row.at,
            headings={depth: f"depth {depth:.2g}" for depth in depths},
        ),
    ]


def task_cell(row: ResultRow) -> Cell:
    if row.metric == "gain":
        ends = f" [{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        return f"{100 * row.value:+.1f}" + ("" if math.isnan(row.low) else ends)
    text = percent(row.value, max(row.low, 0.0), min(row.high, 1.0))
    if row.verdict and row.verdict != ABOVE_CHANCE:
        text += f" {row.verdict}"
    return TableCell(text, "good" if row.verdict == ABOVE_CHANCE else "")


def accuracy_figure(r: ReportedResults, styles: Styles) -> Figure:
    """Accuracy against length: by likelihood as solid lines, exact match as dotted lines."""
    axis = LengthAxis(r.table.lengths("accuracy"), [r.trained_length])
    rows = [
        row._replace(low=max(row.low, 0.0), high=min(row.high, 1.0))
        for row in r.table.select("accuracy")
    ]
    note = "Solid: most likely candidate. Dotted: exact match."
    if any(row.high > row.low for row in rows):
        note += " Bars: 95% intervals, simultaneous over all cells."
    chance = [(f"chance  {_chance(r)}", r.facts["chance"])]
    panel = length_panel(rows, styles, axis, y="accuracy", levels=chance, share=True, top=1.0)
    dotted = {"dash": (0, (1, 1.6)), "label": "", "width": 1.1, "marker": "", "low": ()}
    exact = curves_of(r.table.select("exact"), styles, axis)
    thin = [replace(curve, **dotted) for curve in exact]
    text = FigureText(f"{r.facts['task'].capitalize()}: accuracy by length", r.subtitle, note)
    return panels([replace(panel, curves=[*panel.curves, *thin])], text, x="length, input tokens")


def place_figure(r: ReportedResults, name: str) -> Figure:
    """Two grids over the lengths: by depth, and by tokens between answer and question."""
    lengths = r.table.lengths("accuracy")
    text = FigureText(
        f"{r.facts['task'].capitalize()}, {name}: accuracy by place of the answer",
        f"{r.subtitle}; accuracy by likelihood in %, chance {_chance(r)}; trained at "
        f"{r.trained_length:,}",
        "In brackets: Wilson's interval of each cell.",
    )
    maps = [
        heat_map(
            r.table.select("accuracy_by_depth", name),
            lengths=lengths,
            name=lambda row: f"{row.at:.2f}",
            y="depth of the answer",
            down=True,
        ),
        heat_map(
            r.table.select("accuracy_by_distance", name),
            lengths=lengths,
            name=lambda row: f"{row.at:,.0f}–{row.until - 1:,.0f}",
            y="tokens to the question",
        ),
    ]
    width = max(7.4, 2.0 + 1.24 * len(lengths))
    return panels(maps, text, x="length, input tokens", columns=2, width=width)
