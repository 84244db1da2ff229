"""Report of an evaluation by task items on symbols.

Metrics, by the largest length of a problem: exact (share of items whose whole answer is right,
`verdict`: against chance), symbol_accuracy (mean share of right symbols in an answer).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from evaluation.reports.caveats import caveats
from evaluation.reports.charts import LengthAxis, Styles, curves_of, length_panel, styles_of
from evaluation.reports.document import ReportTable, TableCell
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.figures import FigureText, panels
from evaluation.reports.provenance import basis, provenance
from evaluation.reports.reported_results import ReportedResults
from evaluation.reports.task_report import ABOVE_CHANCE, task_rows
from evaluation.reports.text import percent
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.statistics.binomial import wilson
from evaluation.tasks.item_session import ItemResult
from evaluation.tasks.task_analysis import UNDECIDED, unit_interval

NOTE = "Exact match: greedy decoding generates the whole answer and ends it."


def item_report(result: ItemResult, name: str) -> EvaluationReport:
    record = record_of(result)
    r = ReportedResults(
        title=result.subject.name,
        names=[name_of(method.label) for method in result.methods],
        facts=record,
        table=task_rows(record),
    )
    styles = styles_of(r.names, name_of(TRAINED))
    missing = {**result.absent, **result.failed}
    level = f"{100 * result.settings.confidence:g}%"
    return EvaluationReport(
        name=name,
        title=f"{task_title(record)}: {result.subject.name}",
        results=r,
        record=record,
        verdict=verdict_of(record),
        details=[
            f"Intervals: {level} over items, simultaneous over {record['family']} methods and "
            "lengths. They describe this checkpoint, not the positional scheme."
        ],
        caveats=caveats(result.settings, record["items"], "item", missing),
        tables=[table_of(record, r.subtitle)],
        draw=lambda: {"exact_match_by_length": exact_figure(r, styles)} if record["cells"] else {},
    )


def record_of(result: ItemResult) -> dict:
    """The content of results.json."""
    drawn = result.drawn.values()
    missing = {**result.absent, **result.failed}
    return {
        **basis(result),
        "task": result.facts["task"],
        "trained_lengths": list(result.subject.settings.data.source.bounds),
        "items": result.settings.items,
        "chance": max(each.chance(result.task.choices) for each in drawn),
        "unit_count": result.settings.items,
        "unit": "item",
        "family": len(result.answers),
        "bos": result.subject.settings.data.bos,
        "items_hash": "-".join(each.hash[:16] for each in drawn),
        "tokenizer_hash": result.facts["tokenizer_hash"],
        **provenance(result),
        "task_settings": result.task.model_dump(mode="json"),
        "lengths": [[each.shortest, each.longest] for each in drawn],
        "cells": list(cells_of(result)),
        "not_measured": [
            {"method": method, "length": length, "reason": reason}
            for (method, length), reason in missing.items()
        ],
        "per_item": result.files,
    }


def cells_of(result: ItemResult) -> Iterator[dict]:
    """The numbers of each method and length, with intervals that are simultaneous over all."""
    joint = (1 - result.settings.confidence) / max(1, len(result.answers))
    for (method, longest), answers in result.answers.items():
        drawn = result.drawn[longest]
        exact = answers[:, 0]
        symbols = answers[:, 1] / answers[:, 2]
        n = len(exact)
        low, high = wilson(float(exact.sum()), n, alpha=joint, n_eff=n)
        chance = drawn.chance(result.task.choices)
        symbols_low, symbols_high = unit_interval(symbols, symbols, np.arange(n), joint)
        yield {
            "method": method,
            "length": longest,
            "shortest": drawn.shortest,
            "exact": float(exact.mean()),
            "exact_low": low,
            "exact_high": high,
            "chance": chance,
            "against_chance": ABOVE_CHANCE if low > chance else UNDECIDED,
            "symbol_accuracy": float(symbols.mean()),
            "symbol_accuracy_low": symbols_low,
            "symbol_accuracy_high": symbols_high,
            "unit_exact": exact.tolist(),
            "unit_symbol_accuracy": symbols.tolist(),
        }


def range_text(cell: dict) -> str:
    """`21–40`, or `40`."""
    longest = f"{cell['length']:,}"
    return longest if cell["shortest"] == cell["length"] else f"{cell['shortest']:,}–{longest}"


def verdict_of(record: dict) -> str:
    """The exact match at each length, as trained."""
    own = [cell for cell in record["cells"] if cell["method"] == TRAINED]
    shares = [f"{cell['exact']:.1%} at {range_text(cell)}" for cell in own]
    least, most = record["trained_lengths"]
    trained = f"{most}" if least == most else f"{least}–{most}"
    return f"Exact match {', '.join(shares) or 'was not measured'}; trained on lengths {trained}."


def table_of(record: dict, subtitle: str) -> ReportTable:
    """A row per method and length."""
    lines = []
    for cell in record["cells"]:
        exact = percent(cell["exact"], cell["exact_low"], cell["exact_high"])
        symbols = (cell[f"symbol_accuracy{end}"] for end in ("", "_low", "_high"))
        tone = "good" if cell["against_chance"] == ABOVE_CHANCE else ""
        lines.append(
            [
                name_of(cell["method"]),
                range_text(cell),
                TableCell(exact, tone),
                f"{cell['chance']:.1%}",
                percent(*symbols),
            ]
        )
    columns = ["method", "length", "exact match", "chance", "symbols of the answer"]
    return ReportTable(f"{record['task']}: {subtitle}", columns, lines, NOTE, numbers=2)


def task_title(facts: Mapping) -> str:
    return facts["task"].capitalize().replace("_", " ")


def exact_figure(r: ReportedResults, styles: Styles) -> Figure:
    """Exact match against length as solid lines, symbols of answers as dotted ones."""
    axis = LengthAxis(r.table.lengths("exact"), [r.facts["trained_lengths"][1]])
    levels = [("chance", max(cell["chance"] for cell in r.facts["cells"]))]
    rows = r.table.select("exact")
    panel = length_panel(rows, styles, axis, y="right", levels=levels, share=True, top=1.0)
    dotted = {"dash": (0, (1, 1.6)), "label": "", "width": 1.1, "marker": "", "low": ()}
    symbols = curves_of(r.table.select("symbol_accuracy"), styles, axis)
    thin = [replace(curve, **dotted) for curve in symbols]
    note = "Solid: exact match of whole answers, with simultaneous 95% intervals. Dotted: symbols."
    text = FigureText(f"{task_title(r.facts)}: exact match by length", r.subtitle, note)
    return panels(
        [replace(panel, curves=[*panel.curves, *thin])], text, x="length of the problem (log scale)"
    )
