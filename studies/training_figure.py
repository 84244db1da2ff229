"""Training curves of one or several runs: loss, held-out NLL by length, learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from errors import StudyError
from evaluation.reports.figures import DASHED, DOTTED, Curve, FigureText, Panel, panels, styles_of
from run_directory.metrics_file import read_metrics
from run_directory.run import Run

SMOOTHED = 0.02  # share of the steps
EARLY = 0.1  # of the tokens: losses before may be clipped
EVENTS = {"change": DASHED, "resumed": DOTTED, "forked": "-"}
NOTE = """Loss in nats per token: each step (thin) and the mean of neighboring steps (bold).
Dashed: change of positions or length; dotted: resumed; solid: start of a fork."""


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one run.

    Attributes:
        table: run, measure, length, step, tokens (target tokens trained on after the step), value.
            Measures are loss (NaN if it was not finite), loss_smoothed, lr and held_out (`length`:
            input tokens), and events: `resumed`, `change` of positions or of the window length and
            `forked`, whose value is a text.
        targets: hash or number of the held-out targets.
    """

    name: str
    train_length: int
    table: pd.DataFrame
    tokenizer: str
    targets: str

    def of(self, measure: str) -> pd.DataFrame:
        return self.table.loc[self.table.measure == measure]


def read_curves(folder: Path, name: str, smoothed: float = SMOOTHED) -> TrainingCurves:
    """The curves of a finished or running run; if a step was repeated, its last line counts. Losses
    are smoothed over a centered window of this share of the steps.

    Raises TrainingError for no run or a broken file, StudyError if no step has been trained.
    """
    run = Run.open(folder)
    file = folder / "metrics.jsonl"
    rows: list[tuple[str, int | str, Any, Any]] = []  # measure, length, step, value
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
    lineage = run.manifest.get("lineage")
    if lineage and lineage[0].get("fork"):
        parent = lineage[0]
        rows.append(("forked", "", parent["step"], Path(parent["run"]).name))
    steps = pd.DataFrame.from_dict(trained, orient="index")
    width = max(1, round(smoothed * len(steps)))
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
        table=table.filter(["run", "measure", "length", "step", "tokens", "value"]),
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


def training_figure(runs: Sequence[TrainingCurves]) -> Figure:
    """Training loss (thin: each step), held-out NLL and learning rate."""
    styles = styles_of([run.name for run in runs])
    losses = []
    held_out = []
    rates = []
    for run in runs:
        color = styles[run.name].color
        each_step = _curve(run.of("loss"), "", color, width=0.5, order=2, alpha=0.22)
        smoothed = _curve(run.of("loss_smoothed"), run.name, color, width=1.6, order=4)
        losses += [each_step, smoothed]
        rates.append(_curve(run.of("lr"), "", color, width=1.3))
        by_length = run.of("held_out").groupby("length")
        by_color = styles_of([str(length) for length, _ in by_length])
        for _, rows in by_length:
            length = int(rows["length"].iloc[0])
            style = by_color[str(length)]
            curve = _curve(
                rows,
                f"{run.name}, {length:,} ({length / run.train_length:g} × L0)",
                style.color if len(runs) == 1 else color,
                width=1.3,
                marker=style.marker,
                size=3.6,
            )
            held_out.append(curve)

    def scales(axes: Axes) -> None:
        axes.set_xlim(0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
        for run in runs:
            color = styles[run.name].color
            for kind, dash in EVENTS.items():
                for tokens in run.of(kind).tokens:
                    axes.axvline(tokens, color=color, lw=0.9, ls=dash, zorder=1.5)

    def loss_panel(curves: Sequence[Curve], y: str, height: float) -> Panel:
        def loss_scales(axes: Axes) -> None:
            scales(axes)
            shown = [
                np.asarray(curve.y)[np.asarray(curve.x) >= EARLY * curve.x[-1]] for curve in curves
            ]
            values = np.concatenate(shown)
            low, high = np.nanpercentile(values, [0.5, 99.5])  # without outlying steps
            room = max(high - low, 0.05)
            axes.set_ylim(low - 0.08 * room, high + 0.12 * room)

        return Panel(curves, y=y, scales=loss_scales, height=height)

    shown = [
        loss_panel(losses, "training loss, nats", 2.8),
        loss_panel(held_out, "held-out NLL, nats", 1.9),
        Panel(rates, y="learning rate", scales=scales, height=1.1),
    ]
    lengths = dict.fromkeys(f"{run.train_length:,}" for run in runs)
    name = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
    subtitle = "; ".join([f"trained at {', '.join(lengths)} tokens", *differences(runs)])
    text = FigureText(f"Training of {name}", subtitle, NOTE)
    return panels(shown, text, x="target tokens trained on")


def _curve(rows: pd.DataFrame, name: str, color: str, **style) -> Curve:
    """A measure over tokens; a name is followed by the last finite value."""
    x = rows.tokens.to_numpy(dtype=float)
    y = rows.value.to_numpy(dtype=float)
    known = y[np.isfinite(y)]
    label = f"{name}  {known[-1]:.3f}" if name and len(known) else ""
    return Curve(label, x, y, color, **style)
