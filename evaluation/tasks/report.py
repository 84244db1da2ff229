"""Report of an evaluation by tasks: a row for each method and length, and items.csv with every item."""

import math
from dataclasses import asdict
from pathlib import Path

from evaluation.reports.base import Report, Table, basis, provenance, write_table
from evaluation.reports.sentences import name_of
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW, Interval
from evaluation.tasks.analysis import Accuracy, TaskAnalysis, TaskRow, reference
from evaluation.tasks.figures import draw_task_figures
from evaluation.tasks.session import TaskResult

CLAIM_ITEMS = 200  # items at each length that a claim about retrieval requires


class TaskReport(Report):
    def __init__(self, result: TaskResult, analysis: TaskAnalysis, name: str = "task"):
        self.result, self.analysis, self.name = result, analysis, name

    def basis(self) -> dict:
        """What every number of this evaluation depends on."""
        drawn, facts = self.result.drawn, self.result.facts
        return {
            **basis(self.result),
            "task": facts["task"],
            "items": drawn.count,
            "candidates": drawn.candidates,
            "chance": drawn.chance,
            "unit_count": self.analysis.units,
            "unit": drawn.unit_kind,
            "family": self.analysis.family,
            "haystack": facts["haystack"],
            "bos": drawn.bos is not None,
            "items_hash": drawn.hash,
            "tokenizer_hash": facts["tokenizer_hash"],
        }

    def rows(self) -> list[dict]:
        common = self.basis()
        return [{**_flat(row), **common} for row in self.analysis.rows]

    def document(self) -> dict:
        result, analysis, drawn = self.result, self.analysis, self.result.drawn
        return {
            **self.basis(),
            **provenance(result),
            "task_settings": drawn.task.model_dump(mode="json"),
            "lengths": drawn.lengths,
            "units": {"kind": drawn.unit_kind, "names": drawn.unit_names},
            "cells": [
                {**_flat(row), "unit_accuracy": row.unit_share, "unit_exact": row.unit_exact}
                for row in analysis.rows
            ],
            "by_depth": [asdict(spot) for spot in analysis.by_depth],
            "by_distance": [asdict(spot) for spot in analysis.by_distance],
            "not_measured": [
                {"method": method, "length": length, "reason": reason}
                for (method, length), reason in {**result.absent, **result.failed}.items()
            ],
            "per_item_nll": result.files,
        }

    def write(self, folder: Path) -> list[Path]:
        """Also writes items.csv."""
        files = super().write(folder)
        write_table(folder / "items.csv", self.items())
        return [*files, folder / "items.csv"]

    def items(self) -> list[dict]:
        """One record for each method, length and item."""
        drawn, result = self.result.drawn, self.result
        cells = [(method.label, length) for method in result.methods for length in drawn.lengths]
        return [
            {
                "method": label,
                "length": length,
                "item": i,
                drawn.unit_kind: drawn.unit_names[drawn.unit[i]],
                "depth": item.depth,
                "distance": item.distance,
                "right": int(right),
                "exact": int(answers.exact[i]),
                "chosen": int(chosen),
                "nll": round(float(answers.nll[i, 0]), 6),
                "nll_of_best_other": round(float(answers.nll[i, 1:].min()), 6),
            }
            for label, length in cells
            if (answers := result.answers.get((label, length))) is not None
            for i, (item, right, chosen) in enumerate(
                zip(drawn.items[length], answers.right, answers.chosen, strict=True)
            )
        ]

    def draw(self, folder: Path) -> list[Path]:
        return draw_task_figures(self.result, self.analysis, folder)

    def tables(self) -> list[Table]:
        columns = ["method", "length", "accuracy", "against chance", "exact match", "gain over truncation"]
        rows = []
        for row in self.analysis.rows:
            exact = f"{row.exact.share:.1%} [{row.exact.low:.1%}, {row.exact.high:.1%}]"
            gain = _points(row.gain) if row.gain else ""
            accuracy = f"{row.share.share:.1%}{_interval(row)}"
            rows.append([row.method, str(row.length), accuracy, row.word, exact, gain])
        drawn, task = self.result.drawn, self.result.facts["task"]
        return [(f"{task}: {drawn.count} items, chance {drawn.chance:.1%}", columns, rows)]

    def summary(self) -> list[str]:
        result, analysis, drawn = self.result, self.analysis, self.result.drawn
        l0, chance, unit = result.subject.trained_length, drawn.chance, drawn.unit_kind
        lines = [
            _method_sentence(label, [row for row in analysis.rows if row.method == label], l0)
            for label in dict.fromkeys(row.method for row in analysis.rows)
        ]
        base = reference(result, analysis)
        if base is not None:
            lines.append(
                f"As trained at {l0}: {_count(base.share)} correct by likelihood, {_count(base.exact)} exact "
                "matches (Wilson intervals)."
            )
        text = (
            f"{drawn.count} items per length, the same at every length, {drawn.candidates} candidates each: "
            f"chance is {chance:.1%}, and near zero for exact match. {analysis.units} {unit}s"
        )
        if analysis.units < POINTS_ONLY_BELOW:
            text += f": fewer than {POINTS_ONLY_BELOW}, so only point estimates are reported."
        else:
            few = " (few)" if analysis.units < FEW_BELOW else ""
            text += (
                f"{few}; intervals by length: {100 * result.settings.confidence:g}% over {unit}s, "
                f"simultaneous over {analysis.family} methods and lengths. They describe this checkpoint, "
                "not the positional scheme."
            )
        lines.append(text)
        if drawn.count < CLAIM_ITEMS:
            lines.append(f"{drawn.count} items: a claim about retrieval requires at least {CLAIM_ITEMS}.")
        for (label, length), reason in {**result.absent, **result.failed}.items():
            lines.append(f"Not measured: {label} at {length}: {reason}.")
        return lines


def _method_sentence(label: str, rows: list[TaskRow], l0: int) -> str:
    parts = [f"{row.share.share:.1%}{_interval(row)} at {row.length} ({row.word})" for row in rows]
    text, last = f"{name_of(label)}: accuracy {', '.join(parts)}.", rows[-1]
    if last.gain is not None and not math.isnan(last.gain.low):
        relation = "no significant difference from"
        if last.gain.low > 0 or last.gain.high < 0:
            relation = "better than" if last.gain.low > 0 else "worse than"
        text += (
            f" At {last.length} {relation} truncating the context to {l0}: {_points(last.gain, ' points')}."
        )
    return text


def _points(gain: Interval, unit: str = "") -> str:
    """A difference of shares in percentage points."""
    text = f"{100 * gain.estimate:+.1f}{unit}"
    return text if math.isnan(gain.low) else f"{text} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _interval(row: TaskRow) -> str:
    return "" if math.isnan(row.low) else f" [{row.low:.1%}, {row.high:.1%}]"


def _count(share: Accuracy) -> str:
    ends = f"[{share.low:.1%}, {share.high:.1%}]"
    return f"{round(share.share * share.n)} of {share.n} ({share.share:.1%} {ends})"


def _flat(row: TaskRow) -> dict:
    gain = row.gain
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
        "gain": gain.estimate if gain else None,
        "gain_low": gain.low if gain else None,
        "gain_high": gain.high if gain else None,
    }
