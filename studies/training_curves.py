"""What runs told while they trained, as numbers: loss, held-out NLL by length, learning rate, over tokens."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies.errors import StudyError
from training.files import read_json
from training.log import read_metrics
from training.run import MANIFEST, is_run, not_a_run, read_settings

COLUMNS = ("run", "measure", "length", "step", "tokens", "attempt", "value")


@dataclass(frozen=True)
class Curves:
    """One run. Arrays over its steps, (n,); a loss that was not finite is NaN. Marks stand by step.

    `held_out`: {input tokens: [(step, NLL in nats)]}. `changes`: of positions, [(step, words)]; `resized`:
    [(step, tokens of a window from there on)]. `forked`: [(step it left after, its parent's name)].
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
    targets: str  # which held-out targets: their hash, or how many

    def smoothed(self, share: float) -> tuple[np.ndarray, int]:
        """Mean loss over a centred window of that share of the steps, and the steps in the window. No window
        reaches over a change of positions or length, before and after which losses are of two kinds."""
        width = max(1, round(share * len(self.steps)))
        edges = sorted({step for step, _ in [*self.changes, *self.resized]})
        parts = np.split(self.loss, np.searchsorted(self.steps, edges, "right"))
        return np.concatenate([centred_mean(part, width) for part in parts]), width

    def tokens_at(self, step: float) -> float:
        """Target tokens after a step, also between the steps that were written down."""
        return float(np.interp(step, [0, *self.steps], [0, *self.tokens]))


def read_curves(folder: Path, name: str) -> Curves:
    """The lines of a run that hold: of each step the last. Also of a run that is in training.

    Raises TrainingError for a broken file, StudyError for a folder without a trained step.
    """
    if not is_run(folder):
        raise StudyError(not_a_run(folder))
    file = folder / "metrics.jsonl"
    lines: dict[str, list[dict]] = {}
    for line in read_metrics(file) if file.exists() else []:
        lines.setdefault(line["kind"], []).append(line)
    train, looks = lines.get("train"), lines.get("validation", [])
    if not train:
        raise StudyError(f"{folder} has not trained a step yet: there is nothing to draw")
    about, changes = read_json(folder / MANIFEST), lines.get("change", [])
    parents = [one for one in about.get("lineage", [])[:1] if one.get("fork")]
    held_out: dict[int, list[tuple[int, float]]] = {}
    for line in looks:
        for length, nll in line["nll"].items():
            held_out.setdefault(int(length), []).append((line["step"], _number(nll)))
    return Curves(
        name=name,
        train_length=read_settings(folder).train_length,
        steps=np.array([line["step"] for line in train]),
        attempts=np.array([line["attempt"] for line in train]),
        tokens=np.array([line["tokens"] for line in train], dtype=float),
        loss=np.array([_number(line["loss"]) for line in train]),
        rate=np.array([line["lr"] for line in train]),
        held_out=dict(sorted(held_out.items())),
        resumed=[line["step"] for line in lines.get("start", []) if line["attempt"] > 1],
        changes=[(line["step"], ", ".join(line["words"])) for line in changes if line["words"]],
        resized=[(line["step"], line["length"]) for line in changes if "length" in line],
        forked=[(one["step"], Path(one["run"]).name) for one in parents],
        skipped=[line["step"] for line in train if _is_skipped(line)],
        tokenizer=about.get("tokenizer_hash", ""),
        targets=str(looks[-1].get("targets_hash", looks[-1]["targets"])) if looks else "",
    )


def _is_skipped(line: dict) -> bool:
    """Whether a step changed no weight."""
    return bool(line.get("skipped")) or not math.isfinite(_number(line["loss"]))


def _number(value: float | str) -> float:
    """A number of metrics.jsonl, where those that are not finite are words; NaN for all of these."""
    return float(value) if isinstance(value, float | int) else math.nan


def centred_mean(values: np.ndarray, width: int) -> np.ndarray:
    """(n,) mean of the finite among the `width` values around each, fewer at the ends; NaN where none is."""
    before = (width - 1) // 2
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    place = np.arange(len(values))
    low, high = np.maximum(place - before, 0), np.minimum(place + width - before, len(values))
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, with those before it where that is not enough to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise StudyError("a run is given twice; give each once")
    for n in range(1, max(map(len, parts))):
        names = ["/".join(one[-n:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def differences(runs: Sequence[Curves]) -> list[str]:
    """What keeps the numbers of these runs from being comparable, in words."""
    said = []
    if len({run.tokenizer for run in runs}) > 1:
        said.append("the tokenizers differ: losses are of other tokens")
    if len({run.targets for run in runs if run.held_out}) > 1:
        said.append("held-out targets differ")
    return said


def csv_text(runs: Sequence[Curves], share: float) -> str:
    """Every number of the figure, one a line: `measure` says which, `length` is that of a held-out one."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        smooth, _ = run.smoothed(share)
        for measure, values in (("loss", run.loss), ("loss_smoothed", smooth), ("lr", run.rate)):
            rows = zip(run.steps, run.tokens, run.attempts, values, strict=True)
            for step, tokens, attempt, value in rows:
                writer.writerow([run.name, measure, "", step, f"{tokens:.0f}", attempt, f"{value:.10g}"])
        marks: list[tuple[str, int | str, int, str]] = [
            ("held_out", length, step, f"{nll:.10g}")
            for length, points in run.held_out.items()
            for step, nll in points
        ]
        marks += [("resumed", "", step, "") for step in run.resumed]
        marks += [("change", "", step, words) for step, words in run.changes]
        marks += [("window", length, step, "") for step, length in run.resized]
        marks += [("forked", "", step, parent) for step, parent in run.forked]
        marks += [("skipped", "", step, "") for step in run.skipped]
        for measure, length, step, value in marks:
            writer.writerow([run.name, measure, length, step, f"{run.tokens_at(step):.0f}", "", value])
    return text.getvalue()
