"""Training curves of runs: loss, held-out NLL by length and learning rate over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from errors import StudyError
from run_directory.metrics_file import held_lines, latest
from run_directory.run import Run, is_run, not_a_run

COLUMNS = ("step", "attempt", "tokens", "loss", "lr")


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one run.

    Attributes:
        steps: a row per step: step, attempt, tokens (target tokens trained on after it), loss (NaN
            if it was not finite) and lr.
        held_out: {input tokens: [(step, NLL in nats)]}.
        events: (kind, step, text): `resumed` after the step; `change` of positions or of the window
            length, in the text; `forked` from the run in the text; `skipped`: no update, or a loss
            that was not finite.
        targets: hash or number of the held-out targets.
    """

    name: str
    train_length: int
    steps: pd.DataFrame
    held_out: dict[int, list[tuple[int, float]]]
    events: list[tuple[str, int, str]]
    tokenizer: str
    targets: str

    @property
    def total_tokens(self) -> float:
        return float(self.steps.tokens.iloc[-1])

    def smoothed(self, share: float) -> pd.Series:
        """Mean loss over a centered window of that share of the steps. Windows do not cross a
        change of positions or length, where the loss may jump."""
        width = max(1, round(share * len(self.steps)))
        edges = sorted(step for kind, step, _ in self.events if kind == "change")
        stage = np.searchsorted(edges, self.steps.step)
        parts = [
            part.rolling(width, center=True, min_periods=1).mean()
            for _, part in self.steps.loss.groupby(stage)
        ]
        return pd.concat(parts)

    def tokens_at(self, step: float) -> float:
        """Target tokens after a step, interpolated between logged steps."""
        return float(np.interp(step, [0, *self.steps.step], [0, *self.steps.tokens]))


def read_curves(folder: Path, name: str) -> TrainingCurves:
    """The curves of a finished or running run; if a step was repeated, its last line counts.

    Raises TrainingError for a broken file, StudyError if no step has been trained.
    """
    if not is_run(folder):
        raise StudyError(not_a_run(folder))
    file = folder / "metrics.jsonl"
    steps = []
    other_lines = []
    for line in held_lines(file) if file.exists() else ():
        if line["kind"] != "train":
            other_lines.append(line)
            continue
        row = [_number(line.get(column)) for column in COLUMNS]
        steps.append([*row, bool(line.get("skipped")) or math.isnan(row[3])])
    events = []
    validations = []
    for line in latest(other_lines):
        if line["kind"] == "start" and line["attempt"] > 1:
            events.append(("resumed", line["step"], ""))
        elif line["kind"] == "change" and (line["overrides"] or "length" in line):
            length = [f"{line['length']:,} tokens"] if "length" in line else []
            events.append(("change", line["step"], ", ".join([*length, *line["overrides"]])))
        elif line["kind"] == "validation":
            validations.append(line)
    if not steps:
        raise StudyError(f"{folder} has no trained step yet")
    table = pd.DataFrame(steps, columns=[*COLUMNS, "skipped"])
    table = table.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    events += [("skipped", step, "") for step in table[table.pop("skipped")].step.astype(int)]
    manifest = Run(folder).manifest
    for parent in manifest.get("lineage", [])[:1]:
        if parent.get("fork"):
            events.append(("forked", parent["step"], Path(parent["run"]).name))
    held_out: dict[int, list[tuple[int, float]]] = {}
    for line in validations:
        for length, nll in line["nll"].items():
            held_out.setdefault(int(length), []).append((line["step"], _number(nll)))
    last = validations[-1] if validations else {}
    return TrainingCurves(
        name=name,
        train_length=Run(folder).settings.train_length,
        steps=table.astype({"step": int, "attempt": int}),
        held_out=dict(sorted(held_out.items())),
        events=events,
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
    if len({run.targets for run in runs if run.held_out}) > 1:
        reasons.append("held-out targets differ")
    return reasons


def curves_table(runs: Sequence[TrainingCurves], share: float) -> pd.DataFrame:
    """Every number of the figure in long format; `length` is that of a held-out NLL."""
    columns = ["run", "measure", "length", "step", "tokens", "value"]
    parts = []
    for run in runs:
        steps = run.steps.assign(run=run.name, length="", loss_smoothed=run.smoothed(share))
        place = ["run", "length", "step", "tokens"]
        measures = ["loss", "loss_smoothed", "lr"]
        parts.append(steps.melt(place, measures, "measure")[columns].astype(object))
        others = [
            *(("held_out", n, *point) for n, points in run.held_out.items() for point in points),
            *((kind, "", step, text) for kind, step, text in run.events),
        ]
        records = [(run.name, *o[:3], run.tokens_at(o[2]), o[3]) for o in others]
        parts.append(pd.DataFrame(records, columns=columns, dtype=object))
    return pd.concat(parts)
