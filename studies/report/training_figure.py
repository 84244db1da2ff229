"""Training curves of one or several runs in one figure: loss, held-out NLL by length, learning
rate."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from evaluation.reports.charts import styles_of
from evaluation.reports.figures import DASHED, DOTTED, Curve, FigureText, Panel, panels
from evaluation.reports.text import listed
from studies.results.training_curves import TrainingCurves, differences

EARLY = 0.1  # of the tokens: losses before may be clipped
EVENTS = {  # line style, height as a share of the axes, text
    "change": (DASHED, 1.0, "dashed: change of positions or length"),
    "resumed": (DOTTED, 1.0, "dotted: resumed"),
    "forked": ("-", 1.0, "solid: start of a fork"),
    "skipped": ("-", 0.05, "short: a skipped step"),
}


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
        by_length = run.of("held_out").groupby("length")
        colors = styles_of([f"{run.name}, {length:,}" for length, _ in by_length])
        for (length, rows), (name, style) in zip(by_length, colors.items(), strict=True):
            curve = _curve(
                rows,
                f"{name} ({length / run.train_length:g} × L0)",
                style.color if len(runs) == 1 else color,
                width=1.3,
                marker=style.marker,
                size=3.6,
            )
            held_out.append(curve)

    def mark_events(axes: Axes) -> None:
        for run in runs:
            for kind, (dash, top, _) in EVENTS.items():
                for tokens in run.of(kind).tokens:
                    color = styles[run.name].color
                    axes.axvline(tokens, ymax=top, color=color, lw=0.9, ls=dash, zorder=1.5)

    def panel(curves: Sequence[Curve], y: str, height: float) -> Panel:
        def scales(axes: Axes) -> None:
            axes.set_xlim(0)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
            if y == "learning rate":
                axes.set_ylim(0)
                return
            axes.set_ylim(*_limits(curves))
            mark_events(axes)

        return Panel(curves, y=y, scales=scales, height=height)

    shown = [
        panel(losses, "training loss, nats", 2.8),
        panel(held_out, "held-out NLL, nats", 1.9),
        panel(rates, "learning rate", 1.1),
    ]
    kinds = {kind for run in runs for kind in run.table.measure}
    events = "; ".join(text for kind, (*_, text) in EVENTS.items() if kind in kinds)
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


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show everything but early losses and the outliers among single steps."""
    values = [curve.y[curve.x >= EARLY * curve.x[-1]] for curve in curves]
    low, high = np.nanpercentile(np.concatenate(values), [0.5, 99.5])
    room = max(high - low, 0.05)
    return low - 0.08 * room, high + 0.12 * room
