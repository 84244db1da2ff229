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
from studies.results.training_curves import TrainingCurves, differences

EARLY = 0.1  # of the tokens: losses before may be clipped
EVENTS = {"change": DASHED, "resumed": DOTTED, "forked": "-"}
NOTE = """Loss in nats per token: each step (thin) and the mean of neighboring steps (bold).
Dashed: change of positions or length; dotted: resumed; solid: start of a fork."""


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
        for length, rows in by_length:
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
            shown = [curve.y[curve.x >= EARLY * curve.x[-1]] for curve in curves]
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
