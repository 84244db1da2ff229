"""Training curves of one or several runs in one figure: loss, held-out NLL by length, learning
rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from evaluation.reports.charts import Styles, styles_of
from evaluation.reports.figures import DASHED, Curve, FigureText, Panel, panels
from evaluation.reports.text import listed
from studies.results.training_curves import TrainingCurves, differences

EARLY = 0.1  # of the tokens: losses before may be clipped
EVENTS = {
    "change": "dashed: change of positions or length",
    "resumed": "| resumed",
    "skipped": "× a skipped step",
    "forked": "○ start of a fork",
}
MARKERS = {"resumed": "|", "forked": "o", "skipped": "x"}


def training_figure(runs: Sequence[TrainingCurves]) -> Figure:
    """Training loss (thin: each step), held-out NLL and learning rate."""
    styles = styles_of([run.name for run in runs])
    most = max(float(run.of("loss").tokens.max()) for run in runs)

    def panel(curves: Sequence[Curve], y: str, height: float, heading: str = "") -> Panel:
        def scales(axes: Axes) -> None:
            axes.set_xlim(0, 1.012 * most)
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
            if y == "learning rate":
                axes.set_ylim(0)
                return
            axes.set_ylim(*_limits(curves))
            for run in runs if y == "training loss, nats" else ():
                _mark_events(axes, run, styles[run.name].color)

        return Panel(curves, heading, y=y, scales=scales, height=height)

    losses = []
    rates = []
    for run in runs:
        color = styles[run.name].color
        losses.append(_curve(run.of("loss"), "", color, width=0.5, order=2, alpha=0.22))
        losses.append(_curve(run.of("loss_smoothed"), run.name, color, width=1.6, order=4))
        rates.append(_curve(run.of("lr"), "", color, width=1.3))
    shown = [panel(losses, "training loss, nats", 2.8)]
    for heading, curves in _held_out(runs, styles).items():
        shown.append(panel(curves, "held-out NLL, nats", 1.75, heading))
    shown.append(panel(rates, "learning rate", 1.1))
    kinds = {kind for run in runs for kind in run.table.measure}
    events = ";  ".join(text for kind, text in EVENTS.items() if kind in kinds)
    note = "Loss in nats per token: each step (thin) and the mean of neighboring steps (bold)."
    title = f"Training of {len(runs)} runs" if len(runs) > 1 else f"Training of {runs[0].name}"
    text = FigureText(title, _subtitle(runs), f"{note}\n{events}".rstrip())
    return panels(shown, text, x="target tokens trained on")


def _curve(rows: pd.DataFrame, name: str, color: str, **style) -> Curve:
    """A measure over tokens; a name is followed by the last finite value."""
    y = rows.value.to_numpy(dtype=float)
    known = y[np.isfinite(y)]
    label = f"{name}  {known[-1]:.3f}" if name and len(known) else ""
    return Curve(label, rows.tokens.to_numpy(dtype=float), y, color, **style)


def _subtitle(runs: Sequence[TrainingCurves]) -> str:
    lengths = sorted({run.train_length for run in runs})
    parts = [f"trained at {listed([f'{n:,}' for n in lengths])} tokens"]
    if len(runs) == 1:
        last = runs[0].of("loss").iloc[-1]
        parts.append(f"{last.step:,} steps, {last.tokens:,.0f} target tokens")
        for row in runs[0].of("forked").itertuples():
            parts.append(f"a fork of {row.value} after step {row.step:,}")
    return "; ".join([*parts, *differences(runs)])


def _held_out(runs: Sequence[TrainingCurves], styles: Styles) -> dict[str, list[Curve]]:
    """Held-out NLL over tokens by heading: one panel for a single run, or one per multiple of L0
    for several."""
    found: dict[float, list[Curve]] = {}
    single = len(runs) == 1
    for run in runs:
        by_length = run.of("held_out").groupby("length")
        colors = styles_of([str(length) for length, _ in by_length])
        for length, rows in by_length:
            multiple = length / run.train_length
            style = colors[str(length)] if single else styles[run.name]
            name = f"{length:,} ({multiple:g} × L0)" if single else ""
            marker = style.marker if single else "o"
            curve = _curve(rows, name, style.color, width=1.3, marker=marker, size=3.6)
            found.setdefault(multiple, []).append(curve)
    if single:
        curves = [curve for own in found.values() for curve in own]
        return {"held-out NLL of the same targets by context length": curves}
    return {f"held out, {multiple:g} × L0": found[multiple] for multiple in sorted(found)}


def _mark_events(axes: Axes, run: TrainingCurves, color: str) -> None:
    bottom, top = axes.get_ylim()
    for row in run.of("change").itertuples():
        axes.axvline(row.tokens, color=color, lw=0.9, ls=DASHED, zorder=1.5)
    for kind, marker in MARKERS.items():
        x = run.of(kind).tokens.to_numpy(dtype=float)
        y = [top if kind == "skipped" else bottom] * len(x)
        if len(x):
            axes.plot(x, y, marker=marker, ls="", ms=6, color=color, clip_on=False)


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show everything but early losses and the outliers among single steps."""
    values = []
    for curve in curves:
        late = curve.y[(curve.x >= EARLY * curve.x[-1]) & np.isfinite(curve.y)]
        if curve.alpha is not None and len(late):  # single steps
            late = np.percentile(late, [1, 99])
        values += late.tolist()
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    room = max(high - low, 0.05)
    return low - 0.08 * room, high + 0.12 * room
