"""Report of an evaluation by tasks, in text or on symbols: accuracy by length, and by depth and
distance of the answer in text.

Metrics: accuracy (by likelihood), exact (the whole answer is generated), symbol_accuracy (mean
share of right symbols in an answer), each with a `verdict` against chance where it is the main one;
gain (over truncation); chance of each length on symbols; accuracy_by_depth and
accuracy_by_distance, whose `at` is a depth, or tokens before the question.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.figure import Figure

from evaluation.reports.document import (
    Cell,
    ReportTable,
    TableCell,
    counted,
    percent,
    pivot,
    with_ends,
)
from evaluation.reports.figures import (
    FigureText,
    LengthAxis,
    Styles,
    heat_map,
    length_panel,
    panels,
    styles_of,
)
from evaluation.reports.report import (
    Columns,
    EvaluationReport,
    ReportedResults,
    basis,
    melted,
    metrics_table,
    report_of,
)
from evaluation.results_table import ResultRow, number
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.scoring.session import MeasuredCells
from evaluation.statistics.intervals import unit_counts, wilson
from evaluation.tasks.item_session import ItemResult
from evaluation.tasks.task_analysis import (
    ABOVE_CHANCE,
    UNDECIDED,
    analyse_tasks,
    unit_interval,
)
from evaluation.tasks.task_session import TaskResult

CLAIM_ITEMS = 200  # items at each length that a claim about retrieval requires


def share_cell(row: ResultRow) -> Cell:
    """A share with its interval, and what it is compared with chance."""
    text = percent(row.value, max(row.low, 0.0), min(row.high, 1.0))
    if row.verdict == ABOVE_CHANCE:
        return TableCell(text, "good")
    return f"{text} {row.verdict}".rstrip()


def points_cell(row: ResultRow) -> Cell:
    return with_ends(*(100 * number for number in (row.value, row.low, row.high)), digits=1)


METRICS: Columns = {
    "accuracy": ("accuracy (most likely candidate)", share_cell),
    "exact": ("exact match (greedy decoding)", share_cell),
    "symbol_accuracy": ("right symbols of the answer", share_cell),
    "chance": ("chance", share_cell),
    "gain": ("gain over truncation, points", points_cell),
}


def task_report(result: TaskResult, name: str = "task") -> EvaluationReport:
    """Of a task in text."""
    count = result.drawn.count
    few = f"{count} items: a claim about retrieval requires at least {CLAIM_ITEMS}."
    return report_by_task(result, text_record(result), name, few if count < CLAIM_ITEMS else "")


def item_report(result: ItemResult, name: str) -> EvaluationReport:
    """Of a task on symbols."""
    record = item_record(result)
    least, most = record["trained_lengths"]
    trained = f"{most}" if least == most else f"{least}–{most}"
    return report_by_task(result, record, name, f"Trained on lengths {trained}.")


def report_by_task(result: MeasuredCells, record: dict, name: str, remark: str) -> EvaluationReport:
    record = {**basis(result), "task": result.facts["task"], **record}
    kind = record["unit"]
    intervals = (
        f"{counted(record['unit_count'], kind)}; intervals by length: "
        f"{100 * result.settings.confidence:g}% over {kind}s, simultaneous over "
        f"{record['family']} methods and lengths. They describe this checkpoint, not the "
        "positional scheme."
    )
    return report_of(
        result,
        record,
        name,
        f"{task_title(record)}:",
        rows=task_rows,
        verdict=task_verdict,
        details=[intervals, *filter(None, [remark])],
        tables=task_tables,
        draw=figures_of,
    )


def task_title(record: Mapping) -> str:
    return record["task"].capitalize().replace("_", " ")


def figures_of(r: ReportedResults) -> dict[str, Figure]:
    styles = styles_of(r.names, name_of(TRAINED))
    figures = {"accuracy_by_length": accuracy_figure(r, styles)} if r.facts["cells"] else {}
    for name in dict.fromkeys(row.variant for row in r.table.select("accuracy_by_depth")):
        stem = "trained" if name == name_of(TRAINED) else name
        figures[f"accuracy_by_depth_{stem}"] = place_figure(r, name)
    return figures


# results.json.


def text_record(result: TaskResult) -> dict:
    """Of a task in text."""
    drawn = result.drawn
    return {
        "items": drawn.count,
        "candidates": drawn.candidates,
        "chance": drawn.chance,
        "unit_count": len(np.unique(drawn.unit)),
        "unit": drawn.unit_kind,
        "family": len(result.answers),
        "haystack": result.facts["haystack"],
        "bos": drawn.bos is not None,
        "items_hash": drawn.hash,
        "task_settings": drawn.task.model_dump(mode="json"),
        "lengths": drawn.lengths,
        "units": {
            "kind": drawn.unit_kind,
            "names": drawn.unit_names,
            "items": unit_counts(drawn.unit).tolist(),
        },
        **analyse_tasks(result),
        "per_item_nll": result.files,
    }


def item_record(result: ItemResult) -> dict:
    """Of a task on symbols."""
    drawn = result.drawn.values()
    return {
        "trained_lengths": list(result.subject.settings.data.symbol_source.bounds),
        "items": result.settings.items,
        "chance": max(each.chance(result.task.choices) for each in drawn),
        "unit_count": result.settings.items,
        "unit": "item",
        "family": len(result.answers),
        "bos": result.subject.settings.data.bos,
        "items_hash": "-".join(each.hash[:16] for each in drawn),
        "task_settings": result.task.model_dump(mode="json"),
        "lengths": [[each.shortest, each.longest] for each in drawn],
        "cells": list(item_cells(result)),
        "per_item": result.files,
    }


def item_cells(result: ItemResult) -> Iterator[dict]:
    """The numbers of each method and length, with intervals that are simultaneous over all."""
    joint = (1 - result.settings.confidence) / max(1, len(result.answers))
    for (method, longest), answers in result.answers.items():
        drawn = result.drawn[longest]
        exact = answers[:, 0]
        symbols = answers[:, 1] / answers[:, 2]
        n = len(exact)
        low, high = wilson(float(exact.sum()), n, alpha=joint, n_eff=n)
        chance = drawn.chance(result.task.choices)
        symbols_low, symbols_high = unit_interval(symbols, np.arange(n), joint)
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


# Views of the long table.


def task_rows(record: dict) -> Iterator[ResultRow]:
    """The long table of a record."""
    for cell in record["cells"]:
        main = "accuracy" if "accuracy" in cell else "exact"
        for row in melted([cell], METRICS):
            verdict = cell.get("against_chance", "") if row.metric == main else ""
            yield row._replace(verdict=verdict)
    for metric in ("by_depth", "by_distance"):
        for spot in record.get(metric) or ():
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


def main_rows(r: ReportedResults) -> list[ResultRow]:
    """Of the metric that is compared with chance."""
    return r.table.select("accuracy") or r.table.select("exact")


def length_text(r: ReportedResults, row: ResultRow) -> str:
    """`21–40`, or `40`."""
    for length in r.facts.get("lengths", ()):
        if isinstance(length, list) and length[0] < length[1] == row.length:
            return f"{length[0]:,}–{length[1]:,}"
    return f"{row.length:,}"


def task_verdict(r: ReportedResults) -> str:
    """Which variants answer above chance at the longest length."""
    rows = main_rows(r)
    if not rows:
        return "No accuracy was measured."
    longest = max(row.inputs for row in rows)
    last = [row for row in rows if row.length == longest]
    where = length_text(r, last[0])
    above = [row.variant for row in last if row.verdict == ABOVE_CHANCE]
    if all(math.isnan(row.low) for row in last):
        return f"Accuracy up to {where} tokens as point estimates; chance {_chance(r)}."
    return f"Above chance ({_chance(r)}) at {where} tokens: {', '.join(above) or 'none'}."


def _chance(r: ReportedResults) -> str:
    return f"{r.facts['chance']:.1%}"


def task_tables(r: ReportedResults) -> list[ReportTable]:
    """A row per variant and length; and accuracy by depth."""
    length = {"length": lambda row: length_text(r, row)}
    by_depth = r.table.select("accuracy_by_depth")
    title = f"{task_title(r.facts)}: {r.subtitle}, chance {_chance(r)}"
    depths = sorted({row.at for row in by_depth if row.at is not None})
    return [
        metrics_table(r, title, METRICS, length),
        pivot(
            "Accuracy by depth of the answer (0: beginning of the text)",
            by_depth,
            lambda row: f"{row.value:.0%}",
            index={r.noun: lambda row: row.variant, **length},
            columns=lambda row: row.at,
            headings={at: f"depth {at:.2g}" for at in depths},
        ),
    ]


def accuracy_figure(r: ReportedResults, styles: Styles) -> Figure:
    """The main metric by length as bold lines, the next one as thin lines."""
    rows = [row._replace(low=max(row.low, 0.0), high=min(row.high, 1.0)) for row in main_rows(r)]
    bold = rows[0].metric
    thin = "exact" if bold == "accuracy" else "symbol_accuracy"
    trained = r.facts.get("trained_lengths", [r.trained_length])[-1]
    axis = LengthAxis(sorted({row.inputs for row in rows}), [trained])
    note = f"Thin: {METRICS[thin][0]}."
    if any(row.high > row.low for row in rows):
        note += " Bars: 95% intervals, simultaneous over all cells."
    chance = [(f"chance  {_chance(r)}", r.facts["chance"])]
    rows += [row._replace(seed=thin) for row in r.table.select(thin)]  # drawn as single seeds are
    panel = length_panel(rows, styles, axis, y=METRICS[bold][0], levels=chance, share=True, top=1.0)
    text = FigureText(f"{task_title(r.facts)}: {METRICS[bold][0]} by length", r.subtitle, note)
    return panels([panel], text, x="length (log scale)")


def place_figure(r: ReportedResults, name: str) -> Figure:
    """Two grids over the lengths: by depth, and by tokens between answer and question."""
    lengths = r.table.lengths("accuracy")
    text = FigureText(
        f"{task_title(r.facts)}, {name}: accuracy by place of the answer",
        f"{r.subtitle}; in %, chance {_chance(r)}; trained at {r.trained_length:,}",
        "In brackets: Wilson's interval of each cell.",
    )
    depths = r.table.select("accuracy_by_depth", name)
    distances = r.table.select("accuracy_by_distance", name)
    maps = [
        heat_map(
            depths,
            lengths=lengths,
            name=lambda row: f"{row.at:.2f}",
            y="depth of the answer",
            down=True,
        ),
        heat_map(
            distances,
            lengths=lengths,
            name=lambda row: f"{row.bounds[0]:,.0f}–{row.bounds[1] - 1:,.0f}",
            y="tokens to the question",
        ),
    ]
    width = max(7.4, 2.0 + 1.24 * len(lengths))
    return panels(maps, text, x="length, input tokens", columns=2, width=width)
