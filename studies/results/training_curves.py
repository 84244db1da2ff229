"""Training curves of runs: loss, held-out NLL by length and learning rate over tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from errors import StudyError
from run_directory.metrics_file import read_metrics
from run_directory.run import Run, is_run, not_a_run

COLUMNS = ("run", "measure", "length", "step", "tokens", "value")


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one run.

    Attributes:
        table: `COLUMNS`; `tokens` are the target tokens trained on after the step. Measures are
            loss (NaN if it was not finite), loss_smoothed, lr and held_out (`length`: input
            tokens), and events: `resumed`, `change` of positions or of the window length and
            `forked`, whose value is a text.
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
    rows: list[tuple[str, int | str, int, float | str]] = []  # measure, length, step, value
    trained = {}
    targets = ""
    for line in read_metrics(file) if file.exists() else ():
        step = line["step"]
        kind = line["kind"]
        if kind == "train":
            trained[step] = {key: _number(line.get(key)) for key in ("tokens", "loss", "lr")}
        elif kind == "start" and line["attempt"] > 1:
            rows.append(("resumed", "", step, ""))
        elif kind == "change":
            changes = [f"{line['length']:,} tokens"] if "length" in line else []
            changes += line["overrides"]
            if changes:
                rows.append(("change", "", step, ", ".join(changes)))
        elif kind == "validation":
            targets = str(line.get("targets_hash", line.get("targets", "")))
            by_length = {int(length): nll for length, nll in line["nll"].items()}
            for length, nll in sorted(by_length.items()):
                rows.append(("held_out", length, step, _number(nll)))
    if not trained:
        raise StudyError(f"{folder} has no trained step yet")
    run = Run(folder)
    lineage = run.manifest.get("lineage")
    if lineage and lineage[0].get("fork"):
        parent = lineage[0]
        rows.append(("forked", "", parent["step"], Path(parent["run"]).name))
    steps = pd.DataFrame.from_dict(trained, orient="index")
    width = max(1, round(share * len(steps)))
    steps["loss_smoothed"] = steps.loss.rolling(width, center=True, min_periods=1).mean()
    for measure in ("loss", "loss_smoothed", "lr"):
        rows += [(measure, "", step, value) for step, value in steps[measure].items()]
    table = pd.DataFrame(rows, columns=["measure", "length", "step", "value"], dtype=object)
    table["run"] = name
    known_steps = [0, *steps.index]
    known_tokens = [0, *steps.tokens]
    table["tokens"] = np.interp(table.step.astype(float), known_steps, known_tokens)
    return TrainingCurves(
        name=name,
        train_length=run.settings.train_length,
        table=table[list(COLUMNS)],
        tokenizer=run.manifest.get("tokenizer_hash", ""),
        targets=targets,
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
