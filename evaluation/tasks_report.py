"""What an evaluation by tasks leaves behind: words, a table, CSV, JSON."""

import csv
import io
import math
from dataclasses import asdict
from pathlib import Path

from data.files import write_text
from evaluation.records import write_clean_json
from evaluation.rules import TRAINED
from evaluation.statistics import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.tasks_analysis import Row, Share, TaskAnalysis, reference
from evaluation.tasks_measure import TaskResult


def task_words(result: TaskResult, analysis: TaskAnalysis) -> list[str]:
    """What happened, in sentences."""
    drawn, l0 = result.drawn, result.subject.trained_length
    lines = [
        _rule_sentence(label, [row for row in analysis.rows if row.rule == label], drawn.chance, l0)
        for label in dict.fromkeys(row.rule for row in analysis.rows)
    ]
    base = reference(result, analysis)
    if base is not None:
        lines.append(
            f"As trained at {l0}: {_count(base.share)} right by likelihood, {_count(base.exact)} written "
            "exactly (Wilson intervals)."
        )
    level = 100 * result.settings.confidence
    text = (
        f"{drawn.count} items a length, the same at every length, {drawn.candidates} candidates each: chance "
        f"is {drawn.chance:.1%}, and next to nothing for exact answers. {analysis.units} {drawn.unit_kind}s"
    )
    if analysis.units < POINTS_ONLY_BELOW:
        text += f": fewer than {POINTS_ONLY_BELOW}, hence points without intervals."
    else:
        few = ", few of them" if analysis.units < FEW_BELOW else ""
        text += (
            f"{few}; intervals by length: {level:g}% over {drawn.unit_kind}s, simultaneous over "
            f"{analysis.family} rules and lengths. They speak of this checkpoint, not of the scheme."
        )
    lines.append(text)
    if drawn.count < 200:
        lines.append(f"{drawn.count} items are fewer than the 200 a claim about retrieval should rest on.")
    for (label, length), reason in {**result.absent, **result.failed}.items():
        lines.append(f"Not measured: {label} at {length}: {reason}.")
    return lines


def _rule_sentence(label: str, rows: list[Row], chance: float, l0: int) -> str:
    name = "as trained" if label == TRAINED else label
    parts = [f"{row.share.share:.1%}{_interval(row)} at {row.length} ({row.word})" for row in rows]
    text = f"{name}: right {', '.join(parts)}."
    last = rows[-1]
    if last.gain is not None and not math.isnan(last.gain.low):
        sign = (
            "better than"
            if last.gain.low > 0
            else "worse than"
            if last.gain.high < 0
            else "not told apart from"
        )
        text += (
            f" At {last.length} {sign} the context cut to {l0}: {100 * last.gain.estimate:+.1f} points "
            f"[{100 * last.gain.low:+.1f}, {100 * last.gain.high:+.1f}]."
        )
    return text


def _interval(row: Row) -> str:
    return "" if math.isnan(row.low) else f" [{row.low:.1%}, {row.high:.1%}]"


def _count(share: Share) -> str:
    return (
        f"{round(share.share * share.n)} of {share.n} ({share.share:.1%} [{share.low:.1%}, {share.high:.1%}])"
    )


def task_table(result: TaskResult, analysis: TaskAnalysis) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns, rows for a terminal: a line for each rule and length."""
    columns = [
        "rule",
        "length",
        "right by likelihood",
        "against chance",
        "written exactly",
        "gain over truncation",
    ]
    rows = []
    for row in analysis.rows:
        gain = f"{100 * row.gain.estimate:+.1f}" if row.gain else ""
        if row.gain and not math.isnan(row.gain.low):
            gain += f" [{100 * row.gain.low:+.1f}, {100 * row.gain.high:+.1f}]"
        exact = f"{row.exact.share:.1%} [{row.exact.low:.1%}, {row.exact.high:.1%}]"
        right = f"{row.share.share:.1%}{_interval(row)}"
        rows.append([row.rule, str(row.length), right, row.word, exact, gain])
    task = result.facts["task"]
    title = f"{task}: share of {result.drawn.count} items, chance {result.drawn.chance:.1%}"
    return title, columns, rows


def write_tasks(result: TaskResult, analysis: TaskAnalysis, folder: Path) -> None:
    """`results.csv`, `results.json`, `items.csv` and `summary.txt` in `folder`."""
    basis = _basis(result, analysis)
    rows = [{**_flat(row), **basis} for row in analysis.rows]
    _write_csv(folder / "results.csv", rows)
    _write_csv(folder / "items.csv", _per_item(result))
    drawn, summary = result.drawn, task_words(result, analysis)
    document = {
        "format": 1,
        "summary": summary,
        **basis,
        **{key: result.facts[key] for key in ("command", "changed", "finished") if key in result.facts},
        "settings": result.settings.model_dump(mode="json"),
        "task_settings": drawn.task.model_dump(mode="json"),
        "lengths": drawn.lengths,
        "rules": {
            rule.label: {"words": list(rule.words), "position": result.schemes[rule.label]}
            for rule in result.rules
        },
        "units": {"kind": drawn.unit_kind, "names": drawn.unit_names},
        "cells": [
            {**_flat(row), "unit_accuracy": row.unit_share, "unit_exact": row.unit_exact}
            for row in analysis.rows
        ],
        "by_depth": [asdict(spot) for spot in analysis.by_depth],
        "by_distance": [asdict(spot) for spot in analysis.by_distance],
        "not_measured": [
            {"rule": rule, "length": length, "reason": reason}
            for (rule, length), reason in {**result.absent, **result.failed}.items()
        ],
        "per_item_nll": result.files,
    }
    write_clean_json(folder / "results.json", document)
    write_text(folder / "summary.txt", "\n".join(summary) + "\n")


def _basis(result: TaskResult, analysis: TaskAnalysis) -> dict:
    """What every number of this evaluation rests on."""
    drawn, subject = result.drawn, result.subject
    return {
        "protocol": result.settings.protocol,
        "task": result.facts["task"],
        "trained_length": subject.trained_length,
        "items": drawn.count,
        "candidates": drawn.candidates,
        "chance": drawn.chance,
        "unit_count": analysis.units,
        "unit": drawn.unit_kind,
        "family": analysis.family,
        "confidence": result.settings.confidence,
        "haystack": result.facts["haystack"],
        "bos": drawn.bos is not None,
        "items_hash": drawn.hash,
        "tokenizer_hash": result.facts["tokenizer_hash"],
        "checkpoint": subject.name,
        "checkpoint_step": subject.step,
        "checkpoint_hash": subject.checkpoint_hash,
        "dtype": result.settings.dtype,
        "seed": result.settings.seed,
    }


def _flat(row: Row) -> dict:
    gain = row.gain
    return {
        "rule": row.rule,
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


def _per_item(result: TaskResult) -> list[dict]:
    drawn, rows = result.drawn, []
    cells = [(rule.label, length) for rule in result.rules for length in drawn.lengths]
    for label, length in (cell for cell in cells if cell in result.answers):
        answers = result.answers[label, length]
        right, chosen = answers.right, answers.chosen
        for i, item in enumerate(drawn.items[length]):
            rows.append(
                {
                    "rule": label,
                    "length": length,
                    "item": i,
                    drawn.unit_kind: drawn.unit_names[drawn.unit[i]],
                    "depth": item.depth,
                    "distance": item.distance,
                    "right": int(right[i]),
                    "exact": int(answers.exact[i]),
                    "chosen": int(chosen[i]),
                    "nll": round(float(answers.nll[i, 0]), 6),
                    "nll_of_best_other": round(float(answers.nll[i, 1:].min()), 6),
                }
            )
    return rows


def _write_csv(path: Path, rows: list[dict]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["rule"])
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
