"""Training curves of runs: loss, held-out NLL by length and learning rate over tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from errors import StudyError
from run_directory.metrics_file import held_lines, latest
from run_directory.run import Run, is_run, not_a_run

COLUMNS = ("run", "measure", "length", "step", "tokens", "value")


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one run.

    Attributes:
        table: `COLUMNS`; `tokens` are the target tokens trained on after the step. Measures are
            loss (NaN if it was not finite), loss_smoothed, lr and held_out (`length`: input
            tokens), and events: `resumed`, `skipped` (no update, or a loss that was not finite),
            `change` of positions or of the window length and `forked`, whose value is a text.
        targets: hash or number of the held-out targets.
    """

    name: str
    train_length: int
    table: pd.DataFrame
    tokenizer: str
    targets: str

    def of(self, measure: str) -> pd.DataFrame:
        return self.table[self.table.measure == measure]


def read_curves(folder: Path, name: str, share: float) -> TrainingCurves:
    """The curves of a finished or running run; if a step was repeated, its last line counts. Losses
    are smoothed over a centered window of `share` of the steps.

    Raises TrainingError for a broken file, StudyError if no step has been trained.
    """
    if not is_run(folder):
        raise StudyError(not_a_run(folder))
    file = folder / "metrics.jsonl"
    trained = {}  # without the rest of the line: there may be millions
    others = []
    for line in held_lines(file) if file.exists() else ():
        if line["kind"] == "train":
            numbers = [_number(line.get(key)) for key in ("tokens", "loss", "lr")]
            is_skipped = bool(line.get("skipped")) or math.isnan(numbers[1])
            trained[line["step"]] = (*numbers, is_skipped)
        else:
            others.append(line)
    if not trained:
        raise StudyError(f"{folder} has no trained step yet")
    columns = ["tokens", "loss", "lr", "skipped"]
    steps = pd.DataFrame.from_dict(trained, orient="index", columns=columns).sort_index()
    manifest = Run(folder).manifest
    rows = []
    last: dict = {}
    for line in latest(others):
        step = line["step"]
        if line["kind"] == "start" and line["attempt"] > 1:
            rows.append(("resumed", "", step, ""))
        elif line["kind"] == "change" and (line["overrides"] or "length" in line):
            length = [f"{line['length']:,} tokens"] if "length" in line else []
            rows.append(("change", "", step, ", ".join([*length, *line["overrides"]])))
        elif line["kind"] == "validation":
            last = line
            nll = sorted((int(length), _number(value)) for length, value in line["nll"].items())
            rows += [("held_out", length, step, value) for length, value in nll]
    rows += [("skipped", "", step, "") for step in steps.index[steps.skipped]]
    for parent in manifest.get("lineage", [])[:1]:
        if parent.get("fork"):
            rows.append(("forked", "", parent["step"], Path(parent["run"]).name))
    width = max(1, round(share * len(steps)))
    steps["loss_smoothed"] = steps.loss.rolling(width, center=True, min_periods=1).mean()
    for measure in ("loss", "loss_smoothed", "lr"):
        rows += [(measure, "", step, value) for step, value in steps[measure].items()]
    tokens = np.interp([row[2] for row in rows], [0, *steps.index], [0, *steps.tokens])
    records = [(name, *row[:3], t, row[3]) for row, t in zip(rows, tokens, strict=True)]
    return TrainingCurves(
        name=name,
        train_length=Run(folder).settings.train_length,
        table=pd.DataFrame(records, columns=list(COLUMNS), dtype=object),
        tokenizer=manifest.get("tokenizer_hash", ""),
        targets=str(last.get("targets_hash", last.get("targets", ""))),
    )


def _number(value: object) -> float:
    """A number of metrics.jsonl, which stores non-finite numbers as strings; NaN for those."""
    return float(value) if isinstance(value, float | int) else math.nan


def differences(runs: Sequence[TrainingCurves]) -> list[str]:
    """Reasons why the numbers of these runs are not comparable."""
    reasons = []
    if len({run.tokenizer for run in runs}) > 1:
        reasons.append("the tokenizers differ, so losses are of different tokens")
    if len({run.targets for run in runs if run.targets}) > 1:
        reasons.append("held-out targets differ")
    return reasons
