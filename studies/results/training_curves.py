"""Training curves of runs: loss, held-out NLL by length and learning rate over tokens."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd

from errors import StudyError
from run_directory.metrics_file import held_lines, latest
from run_directory.run import Run, is_run, not_a_run

COLUMNS = ("run", "measure", "length", "step", "tokens", "attempt", "value")


@dataclass(frozen=True)
class TrainingCurves:
    """One run. Arrays are over its steps, (n,); a non-finite loss is NaN.

    `held_out`: {input tokens: [(step, NLL in nats)]}. `changes` of positions: [(step, overrides)]. `resized`:
    [(step, new window length)]. `forked`: [(step of the fork, name of the parent)].
    """

    name: str
    train_length: int
    steps: np.ndarray
    attempts: np.ndarray
    tokens: np.ndarray  # target tokens trained on after each step
    loss: np.ndarray
    rate: np.ndarray
    held_out: dict[int, list[tuple[int, float]]]
    resumed: list[int]
    changes: list[tuple[int, str]]
    resized: list[tuple[int, int]]
    forked: list[tuple[int, str]]
    skipped: list[int]
    tokenizer: str
    targets: str  # hash or number of the held-out targets

    def smoothed(self, share: float) -> tuple[np.ndarray, int]:
        """Mean loss over a centered window of that share of the steps, and its width. Windows do not cross
        a change of positions or length, where the loss may jump."""
        width = max(1, round(share * len(self.steps)))
        edges = sorted({step for step, _ in [*self.changes, *self.resized]})
        parts = np.split(self.loss, np.searchsorted(self.steps, edges, "right"))
        return np.concatenate([centred_mean(part, width) for part in parts]), width

    def tokens_at(self, step: float) -> float:
        """Target tokens after a step, interpolated between logged steps."""
        return float(np.interp(step, *self._budget))

    @cached_property
    def _budget(self) -> tuple[np.ndarray, np.ndarray]:
        """Logged steps and the tokens after them, beginning at 0."""
        return np.append(0.0, self.steps), np.append(0.0, self.tokens)


def read_curves(folder: Path, name: str) -> TrainingCurves:
    """The curves of a finished or running run; if a step was repeated, its last line counts.

    Raises TrainingError for a broken file, StudyError if no step has been trained.
    """
    if not is_run(folder):
        raise StudyError(not_a_run(folder))
    file = folder / "metrics.jsonl"
    train = {key: array("d") for key in ("step", "attempt", "tokens", "loss", "lr", "skipped")}

    def others() -> Iterator[dict]:
        """All lines except those of steps, of which only the numbers are kept: there may be millions."""
        for line in held_lines(file) if file.exists() else ():
            if line["kind"] == "train":
                finite = math.isfinite(_number(line.get("loss")))
                line["skipped"] = float(bool(line.get("skipped")) or not finite)
                for key, values in train.items():
                    values.append(_number(line.get(key)))
            elif line["kind"] != "samples":
                yield line

    lines: dict[str, list[dict]] = {}
    for line in latest(others()):
        lines.setdefault(line["kind"], []).append(line)
    if not train["step"]:
        raise StudyError(f"{folder} has no trained step yet")
    steps = np.array(train["step"])
    order = np.argsort(steps, kind="stable")
    order = order[np.append(np.diff(steps[order]) > 0, True)]  # the last line of each step
    columns = {key: np.array(values)[order] for key, values in train.items()}
    about = Run(folder).manifest
    changes = lines.get("change", [])
    validations = lines.get("validation", [])
    held_out: dict[int, list[tuple[int, float]]] = {}
    for line in validations:
        for length, nll in line["nll"].items():
            held_out.setdefault(int(length), []).append((line["step"], _number(nll)))
    parents = [one for one in about.get("lineage", [])[:1] if one.get("fork")]
    return TrainingCurves(
        name=name,
        train_length=Run(folder).settings.train_length,
        steps=columns["step"].astype(int),
        attempts=columns["attempt"].astype(int),
        tokens=columns["tokens"],
        loss=columns["loss"],
        rate=columns["lr"],
        held_out=dict(sorted(held_out.items())),
        resumed=[line["step"] for line in lines.get("start", []) if line["attempt"] > 1],
        changes=[
            (line["step"], ", ".join(line["overrides"])) for line in changes if line["overrides"]
        ],
        resized=[(line["step"], line["length"]) for line in changes if "length" in line],
        forked=[(one["step"], Path(one["run"]).name) for one in parents],
        skipped=columns["step"][columns["skipped"] > 0].astype(int).tolist(),
        tokenizer=about.get("tokenizer_hash", ""),
        targets=str(validations[-1].get("targets_hash", validations[-1]["targets"]))
        if validations
        else "",
    )


def _number(value: object) -> float:
    """A number of metrics.jsonl, which stores non-finite numbers as strings; NaN for those."""
    return float(value) if isinstance(value, float | int) else math.nan


def centred_mean(values: np.ndarray, width: int) -> np.ndarray:
    """(n,) mean of the finite values in a centered window of `width`, truncated at the ends; NaN if there are
    none."""
    backwards = pd.Series(values[::-1]).rolling(width, center=True, min_periods=1)
    return backwards.mean().to_numpy()[::-1]


_HASH = re.compile(r"-[0-9a-f]{10}$")  # at the end of a run directory's name


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest unique endings of the paths, without the hash of the settings if possible."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise StudyError("duplicate run: name each run once")
    for n in range(1, max(map(len, parts))):
        names = ["/".join(one[-n:]) for one in parts]
        for found in ([_HASH.sub("", name) for name in names], names):
            if len(set(found)) == len(found):
                return found
    return [str(folder) for folder in folders]


def differences(runs: Sequence[TrainingCurves]) -> list[str]:
    """Reasons why the numbers of these runs are not comparable."""
    tokenizers = {run.tokenizer for run in runs}
    targets = {run.targets for run in runs if run.held_out}
    found = (
        ["the tokenizers differ, so losses are of different tokens"] if len(tokenizers) > 1 else []
    )
    return found + (["held-out targets differ"] if len(targets) > 1 else [])


def write_csv(file: TextIO, runs: Sequence[TrainingCurves], share: float) -> None:
    """Write every number of the figure in long format, one per line; `length` is that of a held-out NLL."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        by_step = {"loss": run.loss, "loss_smoothed": run.smoothed(share)[0], "lr": run.rate}
        for measure, values in by_step.items():
            for step, tokens, attempt, value in zip(
                run.steps, run.tokens, run.attempts, values, strict=True
            ):
                writer.writerow(
                    [run.name, measure, "", step, f"{tokens:.0f}", attempt, f"{value:.10g}"]
                )
        marks: list[tuple[str, int | str, int, str]] = [
            *(
                ("held_out", n, step, f"{nll:.10g}")
                for n, points in run.held_out.items()
                for step, nll in points
            ),
            *(("resumed", "", step, "") for step in run.resumed),
            *(("change", "", step, overrides) for step, overrides in run.changes),
            *(("window", length, step, "") for step, length in run.resized),
            *(("forked", "", step, parent) for step, parent in run.forked),
            *(("skipped", "", step, "") for step in run.skipped),
        ]
        for measure, length, step, value in marks:
            writer.writerow(
                [run.name, measure, length, step, f"{run.tokens_at(step):.0f}", "", value]
            )
