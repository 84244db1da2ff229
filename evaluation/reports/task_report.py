"""Report of an evaluation by tasks, in text or on symbols: accuracy by length and, in text, by
depth of the answer.

Metrics: accuracy (by likelihood), exact (the whole answer is generated), symbol_accuracy (mean
share of correct symbols in an answer); the main metric of a task has a `verdict` against chance.
gain (over truncation); chance at each length, on symbols; accuracy_by_depth, whose `at` is a depth.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.figure import Figure

from evaluation.methods import TRAINED, name_of
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
from evaluation.statistics.intervals import unit_counts
from evaluation.statistics.results_table import ResultRow, number
from evaluation.tasks.task_analysis import ABOVE_CHANCE, analyse_tasks
from evaluation.tasks.task_session import TaskMeasurement

CLAIM_ITEMS = 200  # number of items per length that a claim about retrieval requires


def share_cell(row: ResultRow) -> Cell:
    """A share with its interval and its verdict against chance."""
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


def task_report(measurement: TaskMeasurement, name: str = "task") -> EvaluationReport:
    record = task_record(measurement)
    count = record["items"]
    kind = record["unit"]
    details = [
        f"{counted(record['unit_count'], kind)}; intervals by length: "
        f"{100 * measurement.settings.confidence:g}% over {kind}s, simultaneous over "
        f"{record['family']} methods and lengths. They describe this checkpoint, not the "
        "positional scheme."
    ]
    if not measurement.drawn.in_text:
        least, most = record["trained_lengths"]
        details.append(f"Trained on lengths {least if least == most else f'{least}–{most}'}.")
    elif count < CLAIM_ITEMS:
        details.append(f"{count} items: a claim about retrieval requires at least {CLAIM_ITEMS}.")
    title = f"{task_title(record)}:"
    report = report_of(measurement, record, task_rows(record), name, title, details)
    r = report.results
    report.verdict = task_verdict(r)
    first, *report.more_tables = task_tables(r)
    report.tables = [first]
    report.draw = lambda: figures_of(r)
    return report


def task_title(record: Mapping) -> str:
    return record["task"].capitalize().replace("_", " ")


def figures_of(r: ReportedResults) -> dict[str, Figure]:
    styles = styles_of(r.names, name_of(TRAINED))
    figures = {"accuracy_by_length": accuracy_figure(r, styles)} if r.record["cells"] else {}
    for name in dict.fromkeys(row.variant for row in r.rows("accuracy_by_depth")):
        stem = "trained" if name == name_of(TRAINED) else name
        figures[f"accuracy_by_depth_{stem}"] = depth_figure(r, name)
    return figures


def task_record(measurement: TaskMeasurement) -> dict:
    """The content of results.json."""
    drawn = measurement.drawn
    record = {
        **basis(measurement),
        "task": measurement.facts["task"],
        "items": drawn.count,
        "chance": drawn.chance,
        "unit_count": len(np.unique(drawn.unit)),
        "unit": drawn.unit_kind,
        "family": len(measurement.answers),
        "bos": drawn.bos,
        "items_hash": drawn.hash,
        "task_settings": drawn.task.model_dump(mode="json"),
        **analyse_tasks(measurement),
    }
    if not drawn.in_text:
        return {
            **record,
            "trained_lengths": list(measurement.subject.settings.data.symbol_source.bounds),
            "lengths": [[each.shortest, longest] for longest, each in drawn.lengths.items()],
            "per_item": measurement.files,
        }
    return {
        **record,
        "candidates": drawn.candidates,
        "haystack": measurement.facts["haystack"],
        "lengths": list(drawn.lengths),
        "units": {
            "kind": drawn.unit_kind,
            "names": drawn.unit_names,
            "items": unit_counts(drawn.unit).tolist(),
        },
        "per_item_nll": measurement.files,
    }


# Views of the long table.


def task_rows(record: dict) -> Iterator[ResultRow]:
    """The long table of a record."""
    for cell in record["cells"]:
        main = "accuracy" if "accuracy" in cell else "exact"
        for row in melted([cell], METRICS):
            verdict = cell.get("against_chance", "") if row.metric == main else ""
            yield row._replace(verdict=verdict)
    for spot in record.get("by_depth") or ():
        share = spot["share"]
        yield ResultRow(
            name_of(spot["method"]),
            "accuracy_by_depth",
            share["share"],
            spot["length"],
            at=spot["where"],
            low=number(share.get("low")),
            high=number(share.get("high")),
        )


def main_rows(r: ReportedResults) -> list[ResultRow]:
    """The rows of the metric that is compared with chance."""
    return r.rows("accuracy") or r.rows("exact")


def length_text(r: ReportedResults, row: ResultRow) -> str:
    """`21–40`, or `40`."""
    for length in r.record.get("lengths", ()):
        if isinstance(length, list) and length[0] < length[1] == row.length:
            return f"{length[0]:,}–{length[1]:,}"
    return f"{row.length:,}"


def task_verdict(r: ReportedResults) -> str:
    """The variants that answer above chance at the longest length, in one sentence."""
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
    return f"{r.record['chance']:.1%}"


def task_tables(r: ReportedResults) -> list[ReportTable]:
    """Tables with a row per variant and length, and of accuracy by depth."""
    length = {"length": lambda row: length_text(r, row)}
    by_depth = r.rows("accuracy_by_depth")
    title = f"{task_title(r.record)}: {r.subtitle}, chance {_chance(r)}"
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
    trained = r.record.get("trained_lengths", [r.trained_length])[-1]
    axis = LengthAxis(sorted({row.inputs for row in rows}), [trained])
    note = f"Thin: {METRICS[thin][0]}."
    if any(row.high > row.low for row in rows):
        note += " Bars: 95% intervals, simultaneous over all cells."
    chance = [(f"chance  {_chance(r)}", r.record["chance"])]
    rows += [row._replace(seed=thin) for row in r.rows(thin)]  # drawn like single seeds
    panel = length_panel(rows, styles, axis, y=METRICS[bold][0], levels=chance, share=True, top=1.0)
    text = FigureText(f"{task_title(r.record)}: {METRICS[bold][0]} by length", r.subtitle, note)
    return panels([panel], text, x="length (log scale)")


def depth_figure(r: ReportedResults, name: str) -> Figure:
    """A heat map of accuracy over lengths and depths."""
    lengths = r.lengths_of("accuracy")
    text = FigureText(
        f"{task_title(r.record)}, {name}: accuracy by depth of the answer",
        f"{r.subtitle}; in %, chance {_chance(r)}; trained at {r.trained_length:,}",
        "In brackets: Wilson's interval of each cell.",
    )
    panel = heat_map(r.rows("accuracy_by_depth", name), lengths, y="depth of the answer")
    width = max(6.0, 2.0 + 0.8 * len(lengths))
    return panels([panel], text, x="length, input tokens", width=width)
