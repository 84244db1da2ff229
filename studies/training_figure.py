"""Training curves of one or several runs: loss, held-out NLL by length, learning rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from errors import StudyError
from evaluation.reports.figures import (
    DASHED,
    DOTTED,
    FigureText,
    Panel,
    draw_line,
    panels,
    styles_of,
)
from run_directory.metrics_file import read_metrics
from run_directory.run import Run

SMOOTHED = 0.02  # width of the smoothing window as a share of the steps
EARLY = 0.1  # share of the tokens before which losses may be clipped
EVENTS = {"change": DASHED, "resumed": DOTTED, "forked": "-"}
NOTE = """Loss in nats per token: each step (thin) and the mean of neighboring steps (bold).
Dashed: change of positions or length; dotted: resumed; solid: start of a fork."""


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one run.

    Attributes:
        table: run, measure, length, step, tokens (target tokens trained on after the step), value.
            Measures are loss (NaN if it was not finite), loss_smoothed, lr and held_out (`length`:
            input tokens), and the events `resumed`, `change` (of positions or window length) and
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
    are smoothed over a centered window; `smoothed` is its share of the steps.

    Raises TrainingError if the folder is not a run or a file is broken, StudyError if no step has
    been trained.
    """
    run = Run.open(folder)
    file = folder / "metrics.jsonl"
    lines = read_metrics(file) if file.exists() else []
    trained = [line for line in lines if line["kind"] == "train"]
    if not trained:
        raise StudyError(f"{folder} has no trained step yet")
    steps = pd.DataFrame(trained, columns=["step", "tokens", "loss", "lr"])
    # numbers that are not finite are stored as strings
    steps = steps.apply(pd.to_numeric, errors="coerce").replace([math.inf, -math.inf], math.nan)
    width = max(1, round(smoothed * len(steps)))
    steps["loss_smoothed"] = steps.loss.rolling(width, center=True, min_periods=1).mean()
    events: list[tuple] = []  # step, measure, value, length
    targets = ""
    for line in lines:
        step = line["step"]
        if line["kind"] == "start" and line["attempt"] > 1:
            events.append((step, "resumed", "", ""))
        elif line["kind"] == "change":
            length = [f"{line['length']:,} tokens"] if "length" in line else []
            if changes := ", ".join([*length, *line["overrides"]]):
                events.append((step, "change", changes, ""))
        elif line["kind"] == "validation":
            targets = str(line.get("targets_hash", line.get("targets", "")))
            for length in sorted(line["nll"], key=int):
                events.append((step, "held_out", float(line["nll"][length]), int(length)))
    parent = next(iter(run.manifest.get("lineage") or ()), {})
    if parent.get("fork"):
        events.append((parent["step"], "forked", Path(parent["run"]).name, ""))
    numbers = steps.melt("step", ["loss", "loss_smoothed", "lr"], "measure").assign(length="")
    table = pd.concat([pd.DataFrame(events, columns=numbers.columns, dtype=object), numbers])
    table["tokens"] = np.interp(table.step.astype(float), [0, *steps.step], [0, *steps.tokens])
    table["run"] = name
    return TrainingCurves(
        name=name,
        train_length=run.settings.train_length,
        table=table.filter(["run", "measure", "length", "step", "tokens", "value"]),
        tokenizer=run.manifest.get("tokenizer_hash", ""),
        targets=targets,
    )


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

    def draw(
        axes: Axes, run: TrainingCurves, rows: pd.DataFrame, name: str = "", **style: Any
    ) -> None:
        """Draw a measure over tokens; the label is the name with the last finite value."""
        values = rows.value.to_numpy(dtype=float)
        known = values[np.isfinite(values)]
        label = f"{name}  {known[-1]:.3f}" if name and len(known) else ""
        style = {"color": styles[run.name].color, **style}
        draw_line(axes, rows.tokens.to_numpy(dtype=float), values, label=label, **style)

    def draw_loss(axes: Axes, run: TrainingCurves) -> None:
        draw(axes, run, run.of("loss"), lw=0.5, zorder=2, alpha=0.22)
        draw(axes, run, run.of("loss_smoothed"), run.name, lw=1.6, zorder=4)

    def draw_held_out(axes: Axes, run: TrainingCurves) -> None:
        rows = run.of("held_out")
        lengths = rows["length"].unique().tolist()
        of_length = styles_of([str(length) for length in lengths])
        for length in lengths:
            shade, marker, _ = of_length[str(length)]
            style = {"marker": marker, "color": shade if len(runs) == 1 else styles[run.name].color}
            name = f"{run.name}, {length:,} ({length / run.train_length:g} × L0)"
            draw(axes, run, rows.loc[rows["length"] == length], name, lw=1.3, ms=3.6, **style)

    def draw_rate(axes: Axes, run: TrainingCurves) -> None:
        draw(axes, run, run.of("lr"), lw=1.3)

    def panel(draw_run: Callable, y: str, height: float) -> Panel:
        def draw_all(axes: Axes) -> None:
            for run in runs:
                draw_run(axes, run)
            if draw_run is not draw_rate:
                limit_losses(axes)
            axes.set_xlim(0)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
            for run in runs:
                for kind, dash in EVENTS.items():
                    style = {"color": styles[run.name].color, "lw": 0.9, "ls": dash, "zorder": 1.5}
                    for tokens in run.of(kind).tokens:
                        axes.axvline(tokens, **style)

        return Panel(draw_all, y=y, height=height)

    has_held_out = any(len(run.of("held_out")) for run in runs)
    shown = [
        panel(draw_loss, "training loss, nats", 2.8),
        panel(draw_held_out, "held-out NLL, nats", 1.9) if has_held_out else None,
        panel(draw_rate, "learning rate", 1.1),
    ]
    lengths = dict.fromkeys(f"{run.train_length:,}" for run in runs)
    name = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
    subtitle = "; ".join([f"trained at {', '.join(lengths)} tokens", *differences(runs)])
    text = FigureText(f"Training of {name}", subtitle, NOTE)
    return panels(shown, text, x="target tokens trained on")


def limit_losses(axes: Axes) -> None:
    """Set the limits of the y axis, ignoring losses of the first steps and outliers."""
    late = []
    for line in axes.get_lines():
        tokens, losses = np.asarray(line.get_xydata(), dtype=float).T
        late.append(losses[tokens >= EARLY * tokens[-1]])
    low, high = np.nanpercentile(np.concatenate(late), [0.5, 99.5])
    room = max(high - low, 0.05)
    axes.set_ylim(low - 0.08 * room, high + 0.12 * room)
