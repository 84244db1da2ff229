"""Training curves of runs: loss, held-out NLL by length and learning rate over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    steps = []
    skipped = {}

    def other_lines() -> Iterator[dict]:
        file = folder / "metrics.jsonl"
        for line in held_lines(file) if file.exists() else ():
            if line["kind"] == "train":
                row = [_number(line.get(column)) for column in COLUMNS]
                steps.append(row)  # without the rest of the line: there may be millions
                skipped[line["step"]] = line.get("skipped") or not math.isfinite(row[3])
            else:
                yield line

    events = []
    validations = []
    for line in latest(other_lines()):
        if line["kind"] == "start" and line["attempt"] > 1:
            events.append(("resumed", line["step"], ""))
        elif line["kind"] == "change" and (line["overrides"] or "length" in line):
            length = [f"{line['length']:,} tokens"] if "length" in line else []
            events.append(("change", line["step"], ", ".join([*length, *line["overrides"]])))
        elif line["kind"] == "validation":
            validations.append(line)
    if not steps:
        raise StudyError(f"{folder} has no trained step yet")
    events += [("skipped", step, "") for step in sorted(skipped) if skipped[step]]
    manifest = Run(folder).manifest
    for parent in manifest.get("lineage", [])[:1]:
        if parent.get("fork"):
            events.append(("forked", parent["step"], Path(parent["run"]).name))
    table = pd.DataFrame(steps, columns=list(COLUMNS))
    table = table.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
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


def csv_records(runs: Sequence[TrainingCurves], share: float) -> list[dict]:
    """Every number of the figure in long format; `length` is that of a held-out NLL."""
    records = []
    for run in runs:
        steps = run.steps.assign(loss_smoothed=run.smoothed(share))
        for measure in ("loss", "loss_smoothed", "lr"):
            for step, tokens, value in zip(
                steps.step,
                steps.tokens,
                steps[measure],
                strict=True,
            ):
                records.append((run.name, measure, "", step, tokens, value))
        for length, points in run.held_out.items():
            for step, nll in points:
                place = (run.name, "held_out", length, step, run.tokens_at(step))
                records.append((*place, nll))
        for kind, step, text in run.events:
            records.append((run.name, kind, "", step, run.tokens_at(step), text))
    columns = ("run", "measure", "length", "step", "tokens", "value")
    return [dict(zip(columns, record, strict=True)) for record in records]
