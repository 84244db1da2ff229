"""Training curves of one or several runs in one figure: loss, held-out NLL by length, learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from evaluation.reports.charts import DASHED, DOTTED, SOFT, Curve, FigureText, Panel, panels_figure
from studies.report.plots import PALETTE, SHAPES, WIDTH, styles_of
from studies.results.training_curves import TrainingCurves, differences

# inches of the rows
LOSS = 2.8
HELD_OUT = 1.75
RATE = 1.1
EARLY = 0.1  # of the tokens: losses before may be clipped,
FAR = 3.0  # if they would make the axis so many times as tall
LONGEST_NAME = 26  # letters
BINS = 4000  # along a line, more than the pixels of the axes
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
ANNOTATION = {"textcoords": "offset points", "va": "top", "fontsize": 7.5}


def training_figure(runs: Sequence[TrainingCurves], share: float) -> Figure:
    """Training loss, held-out NLL and learning rate. Bold lines: means over `share` of the steps."""
    styles = styles_of([run.name for run in runs], None)
    most = max(run.tokens[-1] for run in runs)
    highest = max(run.rate.max() for run in runs)
    smooth = [one for run in runs for one in _loss(run, styles[run.name][0], share)]
    loss = Panel(smooth, y="training loss, nats")
    held_out = _held_out(runs, styles)
    rates = [
        Curve("", *thinned(run.tokens, run.rate), styles[run.name][0], width=1.3) for run in runs
    ]

    def scales(axes: Axes, panel: Panel) -> None:
        token_counts(axes, most)
        if panel.curves is rates:
            axes.set_ylim(0, 1.1 * highest)
            axes.yaxis.set_major_locator(FixedLocator([0, highest / 2, highest]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
            return
        group = [loss] if panel is loss else held_out
        axes.set_ylim(*_limits([curve for one in group for curve in one.curves]))
        _annotate_clipped(axes, panel.curves)
        for run in runs if panel is loss else ():
            _mark_events(axes, run, styles[run.name][0], most)

    title = f"Training of {len(runs)} runs" if len(runs) > 1 else f"Training of {runs[0].name}"
    return panels_figure(
        [loss, *held_out, Panel(rates, y="learning rate")],
        FigureText(title, _subtitle(runs), _note(runs, share)),
        scales,
        x="target tokens trained on",
        height=[LOSS, *[HELD_OUT] * len(held_out), RATE],
        width=WIDTH,
        value=lambda axes, y: "↑" if y > axes.get_ylim()[1] else "",
    )


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The visible points of a line: of more than 2 × BINS points, the minimum and maximum of every bin."""
    if len(x) <= 2 * BINS:
        return x, y
    starts = np.linspace(0, len(x), BINS, endpoint=False).astype(int)
    ends = np.append(starts[1:], len(x)) - 1
    # of those that are finite
    low = np.fmin.reduceat(y, starts)
    high = np.fmax.reduceat(y, starts)
    return np.column_stack([x[starts], x[ends]]).ravel(), np.column_stack([low, high]).ravel()


def _subtitle(runs: Sequence[TrainingCurves]) -> str:
    lengths = sorted({run.train_length for run in runs})
    parts = [f"trained at {' and '.join(f'{n:,}' for n in lengths)} tokens"]
    if len(runs) == 1:
        parts.append(f"{runs[0].steps[-1]:,} steps, {runs[0].tokens[-1]:,.0f} target tokens")
        parts += [f"a fork of {parent} after step {step:,}" for step, parent in runs[0].forked]
    return "; ".join([*parts, *differences(runs)])


def _note(runs: Sequence[TrainingCurves], share: float) -> str:
    widths = sorted({run.smoothed(share)[1] for run in runs})
    steps = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    line = f"Loss in nats per token: each step (thin) and the mean of {steps} steps (bold)."
    marks = {
        "| resumed": "resumed",
        "○ start of a fork": "forked",
        "dashed: change of positions": "changes",
        "dotted: change of the window length, in tokens": "resized",
        "× a skipped step": "skipped",
    }
    shown = [text for text, name in marks.items() if any(getattr(run, name) for run in runs)]
    return "\n".join([line, ";  ".join(shown)]) if shown else line


def _end(name: str, value: float) -> str:
    if len(name) > LONGEST_NAME:
        half = LONGEST_NAME // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return f"{name}  {value:.3f}"


def _loss(run: TrainingCurves, color: str, share: float) -> list[Curve]:
    """Each step, the mean over steps, and the start of a fork."""
    smooth = run.smoothed(share)[0]
    curves = [Curve("", *thinned(run.tokens, run.loss), color, width=0.5, order=2, alpha=0.22)]
    known = np.flatnonzero(np.isfinite(smooth))
    if len(known):
        label = _end(run.name, float(smooth[known[-1]]))
        curves.append(Curve(label, *thinned(run.tokens, smooth), color, width=1.6, order=4))
    if len(known) and run.forked:
        start = {"dash": "", "marker": "o", "size": 6, "hollow": True, "order": 6}
        curves.append(Curve("", run.tokens[known[:1]], smooth[known[:1]], color, **start))
    return curves


def _held_out(runs: Sequence[TrainingCurves], styles: dict[str, tuple[str, str]]) -> list[Panel]:
    """Held-out NLL over tokens: one panel for a single run, one panel per multiple of L0 for several runs,
    whose colors are named at the training loss."""
    found: dict[float, list[tuple[int, Curve]]] = {}
    several = len(runs) > 1
    own = cycle(zip(PALETTE, SHAPES, strict=True))
    for run in runs:
        for length, points in run.held_out.items():
            finite = [(run.tokens_at(step), nll) for step, nll in points if math.isfinite(nll)]
            if finite:
                x, y = zip(*finite, strict=True)
                multiple = length / run.train_length
                label = "" if several else _end(f"{length:,} ({multiple:g} × L0)", y[-1])
                color, marker = styles[run.name] if several else next(own)
                line = Curve(label, x, y, color, width=1.3, marker=marker, size=3.6)
                found.setdefault(multiple, []).append((length, line))
    if found and not several:
        lines = [line for _, entries in sorted(found.items()) for _, line in entries]
        return [Panel(lines, "held-out NLL of the same targets by context length", y="NLL, nats")]
    panels = []
    for multiple, entries in sorted(found.items()):
        lengths = {length for length, _ in entries}
        tokens = f" = {lengths.pop():,}" if len(lengths) == 1 else ""
        heading = f"held out, {multiple:g} × L0{tokens}"
        panels.append(Panel([line for _, line in entries], heading, y="NLL, nats"))
    return panels


def _mark_events(axes: Axes, run: TrainingCurves, color: str, most: float) -> None:
    """Changes of positions and length, resumptions and skipped steps."""
    bottom, top = axes.get_ylim()
    for step, _ in run.changes:
        axes.axvline(run.tokens_at(step), color=color, lw=0.9, ls=DASHED, zorder=1.5)
    row = 0
    before = -most
    for step, length in run.resized:
        x = run.tokens_at(step)
        axes.axvline(x, color=color, lw=1.1, ls=DOTTED, zorder=1.5)
        row = row + 1 if x - before < 0.07 * most else 0  # below an overlapping label
        axes.annotate(f"{length:,}", (x, top), (3, -9 * row), color=color, zorder=6, **ANNOTATION)
        before = x
    for steps, at, marker in ((run.resumed, bottom, "|"), (run.skipped, top, "x")):
        x = [run.tokens_at(step) for step in steps]
        axes.plot(
            x, [at] * len(x), marker=marker, ls="", ms=6, color=color, clip_on=False, zorder=5
        )


def _annotate_clipped(axes: Axes, curves: Sequence[Curve]) -> None:
    """The first values of lines that begin above the axis, where they enter it."""
    top = axes.get_ylim()[1]
    above = []
    entries = []
    for one in curves:
        begins = next((i for i, value in enumerate(one.y) if value <= top), 0)
        if begins and one.alpha is None and math.isfinite(first := max(one.y[:begins])):
            above.append(first)
            entries.append(one.x[begins])
    if above:
        ends = dict.fromkeys(f"{value:.2f}" for value in (min(above), max(above)))
        axes.annotate(
            f"↑ from {' to '.join(ends)}", (max(entries), top), (3, 0), color=SOFT, **ANNOTATION
        )


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """One scale for all curves, and most of the noise of thin ones. It includes early values, unless these
    make the axis FAR times as tall."""
    late = []
    early = []
    for one in curves:
        x = np.asarray(one.x, float)
        y = np.asarray(one.y, float)
        first = (x < EARLY * x[-1]) | (x == x[0]) if len(x) > 3 else x < 0
        if one.alpha is None:
            early += y[first & np.isfinite(y)].tolist()
            late += y[~first & np.isfinite(y)].tolist()
        elif len(noise := y[~first & np.isfinite(y)]):
            late += np.percentile(noise, [1, 99]).tolist()
    values = late or early or [0.0, 1.0]
    low = min(values)
    high = max(values)
    if max([high, *early]) - min([low, *early]) <= FAR * (high - low):
        low = min([low, *early])
        high = max([high, *early])
    room = max(high - low, 0.05)
    return low - 0.08 * room, high + 0.08 * room


def token_counts(axes: Axes, most: float) -> None:
    """A linear axis of up to `most` tokens in the largest unit."""
    unit, letter = next((unit, letter) for unit, letter in UNITS if most >= unit)
    axes.set_xlim(0, 1.012 * most)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / unit:g}{letter if value else ''}")
    )
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
