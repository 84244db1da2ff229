"""Report of an evaluation by task items on symbols: a row for each method and length, and items.csv
with every item."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.charts import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    Curve,
    FigureText,
    Panel,
    mark,
    panels_figure,
    token_axis,
)
from evaluation.reports.document import ReportTable
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.provenance import basis, provenance
from evaluation.reports.sentences import caveats
from evaluation.reports.text import dtype_note, percent
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.statistics.binomial import wilson
from evaluation.tasks.item_session import ItemResult
from evaluation.tasks.task_analysis import unit_interval


@dataclass(frozen=True)
class ItemRow:
    """One method at one length. exact, symbols: share, and ends of its interval, simultaneous over
    all rows; of items whose whole answer is right, and mean share of right answer symbols."""

    method: str
    shortest: int
    longest: int
    exact: tuple[float, float, float]
    chance: float
    symbols: tuple[float, float, float]
    unit_exact: list[float]


def item_rows(result: ItemResult) -> list[ItemRow]:
    """Compute every number of the report."""
    joint = (1 - result.settings.confidence) / max(1, len(result.answers))
    rows = []
    for (method, longest), answers in result.answers.items():
        drawn = result.drawn[longest]
        exact = answers[:, 0]
        n = len(exact)
        shares = answers[:, 1] / answers[:, 2]
        rows.append(
            ItemRow(
                method=method,
                shortest=drawn.shortest,
                longest=longest,
                exact=(float(exact.mean()), *wilson(float(exact.sum()), n, alpha=joint, n_eff=n)),
                chance=drawn.chance(result.task.choices),
                symbols=(
                    float(shares.mean()),
                    *unit_interval(shares, shares, np.arange(n), joint),
                ),
                unit_exact=exact.tolist(),
            )
        )
    return rows


def item_report(result: ItemResult, name: str) -> EvaluationReport:
    rows = item_rows(result)
    task = result.facts["task"]
    first = next(iter(result.drawn.values()))
    common = {
        **basis(result),
        "task": task,
        "items": result.settings.items,
        "chance": first.chance(result.task.choices),
        "unit": "item",
        "unit_count": result.settings.items,
        "family": len(result.answers),
        "positions": result.settings.positions,
        "bos": result.subject.settings.data.bos,
        "items_hash": "-".join(drawn.hash[:16] for drawn in result.drawn.values()),
        "tokenizer_hash": result.facts["tokenizer_hash"],
    }
    missing = {**result.absent, **result.failed}
    record = {
        **common,
        **provenance(result),
        "task_settings": result.task.model_dump(mode="json"),
        "lengths": [[drawn.shortest, drawn.longest] for drawn in result.drawn.values()],
        "cells": [{**columns_of(row), "unit_accuracy": row.unit_exact} for row in rows],
        "not_measured": [
            {"method": method, "length": length, "reason": reason}
            for (method, length), reason in missing.items()
        ],
        "per_item": result.files,
    }
    return EvaluationReport(
        name=name,
        title=f"{task.capitalize().replace('_', ' ')}: {result.subject.name}",
        rows=[{**columns_of(row), **common, "chance": row.chance} for row in rows],
        record=record,
        summary=[sentence(result, row) for row in rows],
        caveats=caveats(result.settings, result.settings.items, "item", missing),
        tables=[table_of(result, rows)],
        figures={"exact_match_by_length": figure_of(result, rows)} if rows else {},
    )


def columns_of(row: ItemRow) -> dict:
    exact, exact_low, exact_high = row.exact
    symbols, symbols_low, symbols_high = row.symbols
    return {
        "method": row.method,
        "length": row.longest,
        "shortest": row.shortest,
        "exact": exact,
        "exact_low": exact_low,
        "exact_high": exact_high,
        "chance_of_exact": row.chance,
        "symbol_accuracy": symbols,
        "symbol_accuracy_low": symbols_low,
        "symbol_accuracy_high": symbols_high,
    }


def sentence(result: ItemResult, row: ItemRow) -> str:
    """What a row shows."""
    return (
        f"{name_of(row.method).capitalize()} at {range_text(row)}: {percent(*row.exact)} of "
        f"{result.settings.items} items are right (chance {row.chance:.1%}), and "
        f"{row.symbols[0]:.1%} of the symbols of an answer."
    )


def range_text(row: ItemRow) -> str:
    return f"{row.longest}" if row.shortest == row.longest else f"{row.shortest}–{row.longest}"


def table_of(result: ItemResult, rows: list[ItemRow]) -> ReportTable:
    columns = ["method", "length", "exact match", "chance", "answer symbols"]
    cells = [
        [
            row.method,
            range_text(row),
            percent(*row.exact),
            f"{row.chance:.1%}",
            percent(*row.symbols),
        ]
        for row in rows
    ]
    title = f"{result.facts['task']}: {result.settings.items} items of each length"
    return ReportTable(title + dtype_note(result.settings.dtype), columns, cells)


def figure_of(result: ItemResult, rows: list[ItemRow]) -> Figure:
    """Exact match against length as solid lines, shares of right symbols as dotted lines."""
    least, trained = result.subject.settings.data.source.bounds
    curves = []
    for i, label in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == label]
        color = INK if label == TRAINED else COLOURS[i % len(COLOURS)]
        x = [row.longest for row in own]
        symbols = [100 * row.symbols[0] for row in own]
        curves.append(Curve("", x, symbols, color, width=1.1, dash=(0, (1, 1.6))))
        share, low, high = 100 * np.array([row.exact for row in own]).T
        curves.append(
            Curve(
                f"{name_of(label)}  {share[-1]:.0f}%",
                x,
                share,
                color,
                low=low,
                high=high,
                width=1.7,
                marker="o" if label == TRAINED else MARKERS[i % len(MARKERS)],
                order=4,
            )
        )

    def scales(axes: Axes, panel: Panel) -> None:
        mark(axes, trained, f"trained to {trained}")
        token_axis(axes, list(result.drawn))
        axes.set_ylim(-3, 103)

    level = f"{100 * result.settings.confidence:g}%"
    text = FigureText(
        f"{result.facts['task'].capitalize().replace('_', ' ')}: exact match by length",
        f"{result.subject.name}: {result.settings.items} items of each length, trained on lengths "
        f"{least} to {trained}{dtype_note(result.settings.dtype)}",
        f"Solid lines: whole answers; bars: {level}, simultaneous. Dotted: symbols of answers.",
    )
    chance = 100 * rows[-1].chance
    return panels_figure(
        [Panel(curves, levels=[(f"chance  {chance:.0f}%", chance, SOFT)])],
        text,
        scales,
        x="length of the problem",
        y="right, %",
    )
