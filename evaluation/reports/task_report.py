"""Report of an evaluation by tasks: a row for each method and length, and items.csv with every
item."""

import math
from collections.abc import Callable
from dataclasses import asdict

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.charts import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    STYLE,
    Curve,
    FigureText,
    Panel,
    canvas,
    mark,
    panels_figure,
    token_axis,
)
from evaluation.reports.document import ReportTable
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.provenance import basis, provenance
from evaluation.reports.results_table import interval_columns
from evaluation.reports.sentences import caveats, sentences
from evaluation.reports.text import dtype_note, percent
from evaluation.scoring.methods import TRAINED, name_of
from evaluation.statistics.intervals import Interval
from evaluation.tasks.task_analysis import DepthCell, TaskAnalysis, TaskRow, reference
from evaluation.tasks.task_session import TaskResult

CLAIM_ITEMS = 200  # items at each length that a claim about retrieval requires
SHADES = "cividis"  # even in lightness, and the same to every kind of color vision


def task_report(
    result: TaskResult,
    analysis: TaskAnalysis,
    name: str = "task",
) -> EvaluationReport:
    drawn = result.drawn
    task = result.facts["task"]
    common = task_basis(result, analysis)
    figures = {"accuracy_by_length": by_length(result, analysis)} if analysis.rows else {}
    for label in dict.fromkeys(spot.method for spot in analysis.by_depth):
        figures[f"accuracy_by_depth_{label}"] = by_place(
            result,
            analysis,
            label,
        )
    missing = {**result.absent, **result.failed}
    record = {
        **common,
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
    return EvaluationReport(
        name=name,
        title=f"{task.capitalize()}: {result.subject.name}",
        rows=[{**row_columns(row), **common} for row in analysis.rows],
        record=record,
        summary=summary_of(result, analysis),
        caveats=caveats(result.settings, analysis.units, drawn.unit_kind, missing),
        tables=[table_of(result, analysis)],
        figures=figures,
        more_tables={"items.csv": item_rows(result)},
    )


def task_basis(result: TaskResult, analysis: TaskAnalysis) -> dict:
    """What every number of this evaluation depends on."""
    drawn = result.drawn
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


def item_rows(result: TaskResult) -> list[dict]:
    """One record for each method, length and item."""
    drawn = result.drawn
    rows = []
    for label in [method.label for method in result.methods]:
        for length in drawn.lengths:
            answers = result.answers.get((label, length))
            for i, item in enumerate(drawn.items[length] if answers is not None else ()):
                rows.append(
                    {
                        "method": label,
                        "length": length,
                        "item": i,
                        drawn.unit_kind: drawn.unit_names[drawn.unit[i]],
                        "depth": item.depth,
                        "distance": item.distance,
                        "right": int(answers.right[i]),
                        "exact": int(answers.exact[i]),
                        "chosen": int(answers.chosen[i]),
                        "nll": round(float(answers.nll[i, 0]), 6),
                        "nll_of_best_other": round(float(answers.nll[i, 1:].min()), 6),
                    }
                )
    return rows


def table_of(result: TaskResult, analysis: TaskAnalysis) -> ReportTable:
    columns = [
        "method",
        "length",
        "accuracy",
        "against chance",
        "exact match",
        "gain over truncation",
    ]
    rows = []
    for row in analysis.rows:
        accuracy = percent(row.share.share, row.low, row.high)
        exact = percent(row.exact.share, row.exact.low, row.exact.high)
        gain = _points(row.gain) if row.gain else ""
        rows.append([row.method, str(row.length), accuracy, row.word, exact, gain])
    drawn = result.drawn
    title = f"{result.facts['task']}: {drawn.count} items, chance {drawn.chance:.1%}"
    return ReportTable(title + dtype_note(result.settings.dtype), columns, rows)


def summary_of(
    result: TaskResult,
    analysis: TaskAnalysis,
) -> list[str]:
    methods: dict[str, list[TaskRow]] = {}
    for row in analysis.rows:
        methods.setdefault(row.method, []).append(row)
    return sentences(
        "tasks",
        result=result,
        a=analysis,
        methods=methods,
        base=reference(result, analysis),
        claim_items=CLAIM_ITEMS,
        percent=percent,
        points=_points,
    )


def _points(gain: Interval, unit: str = "") -> str:
    """A difference of shares in percentage points."""
    text = f"{100 * gain.estimate:+.1f}{unit}"
    if math.isnan(gain.low):
        return text
    return f"{text} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def by_length(result: TaskResult, analysis: TaskAnalysis) -> Figure:
    """Accuracy against length: by likelihood as solid lines, exact match as dotted lines."""
    drawn = result.drawn
    trained_length = result.subject.trained_length
    curves = []
    for i, label in enumerate(dict.fromkeys(row.method for row in analysis.rows)):
        rows = [row for row in analysis.rows if row.method == label]
        color = INK if label == TRAINED else COLOURS[i % len(COLOURS)]
        marker = "o" if label == TRAINED else MARKERS[i % len(MARKERS)]
        x = [row.length for row in rows]
        exact = [100 * row.exact.share for row in rows]
        curves.append(Curve("", x, exact, color, width=1.1, dash=(0, (1, 1.6))))
        curves.append(
            Curve(
                f"{name_of(label)}  {100 * rows[-1].share.share:.0f}%",
                x,
                [100 * row.share.share for row in rows],
                color,
                low=[100 * row.low for row in rows],
                high=[100 * row.high for row in rows],
                width=1.7,
                marker=marker,
                order=4,
            )
        )

    def scales(axes: Axes, panel: Panel) -> None:
        mark(axes, trained_length, f"trained length {trained_length}")
        token_axis(axes, drawn.lengths)
        axes.set_ylim(-3, 103)

    bars = ""
    if not all(math.isnan(row.low) for row in analysis.rows):
        level = f"{100 * result.settings.confidence:g}%"
        bars = f"; bars: {level} over {drawn.unit_kind}s, simultaneous"
    text = FigureText(
        f"{result.facts['task'].capitalize()}: accuracy by length",
        f"{result.subject.name}: the same {drawn.count} items at every length, {drawn.candidates} "
        f"candidates each{dtype_note(result.settings.dtype)}",
        f"Solid lines: most likely candidate{bars}. Dotted: exact match.",
    )
    return panels_figure(
        [Panel(curves, levels=[(f"chance  {100 * drawn.chance:.0f}%", 100 * drawn.chance, SOFT)])],
        text,
        scales,
        x="length, input tokens",
        y="accuracy, %",
    )


def by_place(result: TaskResult, analysis: TaskAnalysis, label: str) -> Figure:
    """Two grids over the lengths: by depth, and by tokens between answer and question."""
    drawn = result.drawn
    depth = [spot for spot in analysis.by_depth if spot.method == label]
    distance = [spot for spot in analysis.by_distance if spot.method == label]
    rows = max(len({spot.where for spot in spots}) for spots in (depth, distance))
    level = f"{100 * result.settings.confidence:g}%"
    text = FigureText(
        f"{result.facts['task'].capitalize()}, {name_of(label)}: accuracy by place of the answer",
        f"{result.subject.name}: accuracy by likelihood in %; chance {100 * drawn.chance:.0f}%; "
        f"trained at {result.subject.trained_length}{dtype_note(result.settings.dtype)}",
        f"Right: tokens between the answer and the question. In brackets: Wilson's {level} "
        "interval of each cell.",
    )
    with rc_context(STYLE):
        width = max(7.4, 2.0 + 1.24 * len(drawn.lengths))
        figure, (low, high) = canvas(text, 0.9 + 0.42 * max(3, rows), width)
        low += 0.5 / figure.get_figheight()
        left, right = (figure.add_axes((x, low, 0.37, high - low)) for x in (0.085, 0.6))
        _grid(left, depth, drawn.lengths, lambda spot: f"{spot.where:.2f}")
        left.set_ylabel("depth of the answer", color=INK)
        left.invert_yaxis()
        _grid(right, distance, drawn.lengths, _tokens)
        right.set_ylabel("tokens to the question", color=INK)
    return figure


def _tokens(spot: DepthCell) -> str:
    return f"{spot.where:,.0f}–{(spot.until or 0) - 1:,.0f}"


def _grid(
    axes: Axes, spots: list[DepthCell], lengths: list[int], name: Callable[[DepthCell], str]
) -> None:
    """Shaded cells with accuracy and interval; columns are lengths, rows are named places."""
    shades = colormaps[SHADES]
    names = {spot.where: name(spot) for spot in spots}
    levels = sorted(names)
    for spot in spots:
        x = lengths.index(spot.length)
        y = levels.index(spot.where)
        share = spot.share
        red, green, blue, _ = shade = shades(share.share)
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK
        axes.fill(
            [x, x + 1, x + 1, x],
            [y, y, y + 1, y + 1],
            color=shade,
            ec="white",
            lw=1.2,
        )
        ends = f"({100 * share.low:.0f}–{100 * share.high:.0f})"
        for text, up, size in ((f"{100 * share.share:.0f}", 4, 9.5), (ends, -7, 6.5)):
            axes.annotate(
                text,
                (x + 0.5, y + 0.5),
                xytext=(0, up),
                textcoords="offset points",
                fontsize=size,
                ha="center",
                va="center",
                color=ink,
            )
    axes.set(xlim=(0, len(lengths)), ylim=(0, len(levels)))
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{n:,}" for n in lengths])
    axes.set_yticks([i + 0.5 for i in range(len(levels))], [names[level] for level in levels])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length, input tokens", color=INK)
