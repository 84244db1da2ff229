"""Training curves of one or several runs: loss, held-out NLL by length, learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    lines = read_metrics(file) if file.exists() else []
    trained = [line for line in lines if line["kind"] == "train"]
    if not trained:
        raise StudyError(f"{folder} has no trained step yet")
    steps = pd.DataFrame(trained, columns=["step", "tokens", "loss", "lr"])
    # numbers that are not finite are stored as texts
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
    losses = []
    held_out = []
    rates = []
    for run in runs:
        color = styles[run.name].color
        losses.append(_curve(run.of("loss"), "", color, width=0.5, order=2, alpha=0.22))
        losses.append(_curve(run.of("loss_smoothed"), run.name, color, width=1.6, order=4))
        rates.append(_curve(run.of("lr"), "", color, width=1.3))
        rows_of = run.of("held_out")
        evaluated = rows_of["length"].unique().tolist()
        of_length = styles_of([str(length) for length in evaluated])
        for length in evaluated:
            style = of_length[str(length)]
            rows = rows_of.loc[rows_of["length"] == length]
            name = f"{run.name}, {length:,} ({length / run.train_length:g} × L0)"
            shade = style.color if len(runs) == 1 else color
            held_out.append(_curve(rows, name, shade, width=1.3, marker=style.marker, size=3.6))

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
                np.asarray(each.y)[np.asarray(each.x) >= EARLY * each.x[-1]] for each in curves
            ]
            # without outlying steps
            low, high = np.nanpercentile(np.concatenate(shown), [0.5, 99.5])
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
