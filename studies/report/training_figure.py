"""Training curves of one or several runs in one figure: loss, held-out NLL by length, learning
rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from evaluation.reports.charts import styles_of
from evaluation.reports.figures import COLOURS, DASHED, MARKERS, Curve, FigureText, Panel, panels
from evaluation.reports.text import listed
from studies.results.training_curves import TrainingCurves, differences

LOSS = "training loss, nats"
HELD_OUT = "held-out NLL, nats"
RATE = "learning rate"
HEIGHTS = {LOSS: 2.8, HELD_OUT: 1.75, RATE: 1.1}  # inches
EARLY = 0.1  # of the tokens: losses before may be clipped
EVENTS = {
    "change": "dashed: change of positions or length",
    "resumed": "| resumed",
    "skipped": "× a skipped step",
    "forked": "○ start of a fork",
}


def training_figure(runs: Sequence[TrainingCurves], share: float) -> Figure:
    """Training loss, held-out NLL and learning rate. Bold lines: means over `share` of the
    steps."""
    styles = styles_of([run.name for run in runs])
    colors = {name: style.color for name, style in styles.items()}
    most = max(run.total_tokens for run in runs)

    def scales(axes: Axes, top: tuple[float, float] | None = None) -> None:
        axes.set_xlim(0, 1.012 * most)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
        axes.set_ylim(*(top or (0, None)))

    def panel(curves: Sequence[Curve], y: str, heading: str = "") -> Panel:
        limits = None if y == RATE else _limits(curves)

        def apply(axes: Axes) -> None:
            scales(axes, limits)
            for run in runs if y == LOSS else ():
                _mark_events(axes, run, colors[run.name])

        return Panel(curves, heading, y=y, scales=apply, height=HEIGHTS[y])

    losses = [curve for run in runs for curve in _losses(run, colors[run.name], share)]
    rates = [Curve("", run.steps.tokens, run.steps.lr, colors[run.name], width=1.3) for run in runs]
    shown = [panel(losses, LOSS)]
    shown += [panel(curves, HELD_OUT, name) for name, curves in _held_out(runs, colors).items()]
    shown.append(panel(rates, RATE))
    kinds = {kind for run in runs for kind, _, _ in run.events}
    note = f"Loss in nats per token: each step (thin) and the mean of {share:.0%} of them (bold)."
    events = [text for kind, text in EVENTS.items() if kind in kinds]
    title = f"Training of {len(runs)} runs" if len(runs) > 1 else f"Training of {runs[0].name}"
    text = FigureText(title, _subtitle(runs), "\n".join([note, ";  ".join(events)]).rstrip())
    return panels(shown, text, x="target tokens trained on")


def _subtitle(runs: Sequence[TrainingCurves]) -> str:
    lengths = sorted({run.train_length for run in runs})
    parts = [f"trained at {listed([f'{n:,}' for n in lengths])} tokens"]
    if len(runs) == 1:
        run = runs[0]
        parts.append(f"{run.steps.step.iloc[-1]:,} steps, {run.total_tokens:,.0f} target tokens")
        for kind, step, text in run.events:
            if kind == "forked":
                parts.append(f"a fork of {text} after step {step:,}")
    return "; ".join([*parts, *differences(runs)])


def _label(name: str, value: float) -> str:
    return f"{name}  {value:.3f}"


def _losses(run: TrainingCurves, color: str, share: float) -> list[Curve]:
    """Each step, and the mean over steps."""
    tokens = run.steps.tokens
    smooth = run.smoothed(share)
    steps = Curve("", tokens, run.steps.loss, color, width=0.5, order=2, alpha=0.22)
    if not smooth.notna().any():
        return [steps]
    label = _label(run.name, smooth.dropna().iloc[-1])
    return [steps, Curve(label, tokens, smooth, color, width=1.6, order=4)]


def _held_out(runs: Sequence[TrainingCurves], colors: dict[str, str]) -> dict[str, list[Curve]]:
    """Held-out NLL over tokens by heading: one panel for a single run, or one per multiple of L0
    for several."""
    panels: dict[float, list[Curve]] = {}
    for run in runs:
        for n, (length, points) in enumerate(run.held_out.items()):
            multiple = length / run.train_length
            points = [point for point in points if math.isfinite(point[1])]
            if not points:
                continue
            x = [run.tokens_at(step) for step, _ in points]
            y = [nll for _, nll in points]
            curve = Curve("", x, y, colors[run.name], width=1.3, marker="o", size=3.6)
            if len(runs) == 1:
                label = _label(f"{length:,} ({multiple:g} × L0)", y[-1])
                curve = replace(curve, label=label, color=COLOURS[n], marker=MARKERS[n])
            panels.setdefault(multiple, []).append(curve)
    if len(runs) == 1:
        curves = [curve for own in panels.values() for curve in own]
        return {"held-out NLL of the same targets by context length": curves}
    return {f"held out, {multiple:g} × L0": own for multiple, own in sorted(panels.items())}


def _mark_events(axes: Axes, run: TrainingCurves, color: str) -> None:
    bottom, top = axes.get_ylim()
    marks = {"resumed": ("|", bottom), "forked": ("o", bottom), "skipped": ("x", top)}
    for kind, step, _ in run.events:
        x = run.tokens_at(step)
        if kind == "change":
            axes.axvline(x, color=color, lw=0.9, ls=DASHED, zorder=1.5)
        else:
            marker, y = marks[kind]
            axes.plot(
                x,
                y,
                marker=marker,
                ls="",
                ms=6,
                color=color,
                clip_on=False,
            )


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show everything but early losses and the outliers among single steps."""
    values = []
    for curve in curves:
        x = np.asarray(curve.x, float)
        y = np.asarray(curve.y, float)
        late = y[(x >= EARLY * x[-1]) & np.isfinite(y)]
        if curve.alpha is not None and len(late):  # single steps
            late = np.percentile(late, [1, 99])
        values += late.tolist()
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    room = max(high - low, 0.05)
    return low - 0.08 * room, high + 0.12 * room
