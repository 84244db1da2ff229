"""Report of an evaluation by tasks: a row for each method and length, and items.csv with every item."""

import math
from dataclasses import asdict
from pathlib import Path

from evaluation.reports.base import Report, Table, basis, dtype_note, provenance, write_table
from evaluation.reports.sentences import sentences
from evaluation.statistics.intervals import Interval
from evaluation.tasks.analysis import TaskAnalysis, TaskRow, reference
from evaluation.tasks.figures import draw_task_figures
from evaluation.tasks.session import TaskResult

CLAIM_ITEMS = 200  # items at each length that a claim about retrieval requires


class TaskReport(Report):
    def __init__(self, result: TaskResult, analysis: TaskAnalysis, name: str = "task"):
        self.result = result
        self.analysis = analysis
        self.name = name

    def basis(self) -> dict:
        """What every number of this evaluation depends on."""
        drawn = self.result.drawn
        facts = self.result.facts
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
        result = self.result
        analysis = self.analysis
        drawn = self.result.drawn
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
        drawn = self.result.drawn
        result = self.result
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
        columns = [
            "method",
            "length",
            "accuracy",
            "against chance",
            "exact match",
            "gain over truncation",
        ]
        rows = []
        for row in self.analysis.rows:
            exact = _percent(row.exact.share, row.exact.low, row.exact.high)
            gain = _points(row.gain) if row.gain else ""
            accuracy = _percent(row.share.share, row.low, row.high)
            rows.append([row.method, str(row.length), accuracy, row.word, exact, gain])
        drawn = self.result.drawn
        task = self.result.facts["task"]
        dtype = dtype_note(self.result.settings)
        return [(f"{task}: {drawn.count} items, chance {drawn.chance:.1%}{dtype}", columns, rows)]

    def summary(self) -> list[str]:
        result = self.result
        methods = {}
        for row in self.analysis.rows:
            methods.setdefault(row.method, []).append(row)
        return sentences(
            "tasks",
            result=result,
            a=self.analysis,
            methods=methods,
            base=reference(result, self.analysis),
            missing=result.absent | result.failed,
            claim_items=CLAIM_ITEMS,
            percent=_percent,
            points=_points,
        )


def _points(gain: Interval, unit: str = "") -> str:
    """A difference of shares in percentage points."""
    text = f"{100 * gain.estimate:+.1f}{unit}"
    return (
        text if math.isnan(gain.low) else f"{text} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    )


def _percent(share: float, low: float, high: float) -> str:
    return f"{share:.1%}" + ("" if math.isnan(low) else f" [{low:.1%}, {high:.1%}]")


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
