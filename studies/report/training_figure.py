"""Training curves of one or several runs in one figure: loss, held-out NLL by length, learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from evaluation.reports.figures import (
    DASHED,
    DOTTED,
    INK,
    SOFT,
    STYLE,
    Curve,
    FigureText,
    Numbers,
    Panel,
    canvas,
    fit_left,
    grid,
    label_ends,
)
from studies.report.plots import PALETTE, SHAPES, WIDTH, styles_of
from studies.results.training_curves import TrainingCurves, differences

LOSS, PANEL, RATE = 2.5, 1.35, 0.75  # inches of the axes' heights
LEFT, GAP, HEADING, TICKS = 0.72, 0.18, 0.26, 0.48  # left of and between axes, above a small one, below all
EARLY = 0.1  # of the tokens: losses before may be clipped,
FAR = 3.0  # if they would make the axis so many times as tall
LONGEST_NAME = 26  # letters
BINS = 4000  # along a line, more than the pixels of the axes
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
ANNOTATION = {"textcoords": "offset points", "va": "top", "fontsize": 7.5}


def training_figure(runs: Sequence[TrainingCurves], share: float) -> Figure:
    """Training loss, held-out NLL and learning rate. Bold lines: means over `share` of the steps."""
    with rc_context(STYLE):
        styles = styles_of([run.name for run in runs], None)
        panels = _panels(runs, styles)
        columns, tall = (3, PANEL) if len(panels) > 1 else (1, 1.3 * PANEL)
        rows = math.ceil(len(panels) / columns)
        name = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
        text = FigureText(f"Training of {name}", _subtitle(runs), _note(runs, share))
        below = rows * (GAP + HEADING + tall) + GAP + HEADING + RATE + TICKS
        figure, (_, top) = canvas(text, LOSS + below, WIDTH)
        inch = 1 / figure.get_figheight()

        def place(left: float, down: float, wide: float, tall: float) -> Axes:
            """Axes of a size, so many inches from the left and below the title."""
            area = (left / WIDTH, top - (down + tall) * inch, wide / WIDTH, tall * inch)
            return figure.add_axes(area, label=f"{left} {down}")

        labels = [run.name for run in runs] + [line.label for panel in panels for line in panel.curves]
        wide = WIDTH - LEFT - 0.35 - 0.072 * max(len(_end(label, 0.0)) for label in labels)
        most = max(run.tokens[-1] for run in runs)
        _loss(figure, place(LEFT, 0, wide, LOSS), runs, styles, share, most)
        limits = _limits_of([line for panel in panels for line in panel.curves])
        step = wide if columns == 1 else (WIDTH - LEFT - 0.12) / columns
        for n, panel in enumerate(panels):
            row, column = divmod(n, columns)
            down = LOSS + row * (tall + HEADING + GAP) + HEADING + GAP
            axes = place(LEFT + column * step, down, step - (0.14 if columns > 1 else 0), tall)
            _held_out(figure, axes, panel, limits, most, column if columns > 1 else None)
        axes = place(LEFT, LOSS + below - RATE - TICKS, wide, RATE)
        for run in runs:
            axes.plot(*thinned(run.tokens, run.rate), color=styles[run.name][0], lw=1.3, zorder=3)
        _frame(axes, most, 6)
        highest = max(run.rate.max() for run in runs)
        axes.set_ylim(0, 1.1 * highest)
        axes.yaxis.set_major_locator(FixedLocator([0, highest / 2, highest]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        axes.set_ylabel("learning rate", fontsize=8, color=INK)
        fit_left(figure, axes)
        axes.set_xlabel("target tokens trained on", color=INK)
        return figure


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The visible points of a line: of more than 2 × BINS points, the minimum and maximum of every bin."""
    if len(x) <= 2 * BINS:
        return x, y
    starts = np.linspace(0, len(x), BINS, endpoint=False).astype(int)
    ends = np.append(starts[1:], len(x)) - 1
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)  # of those that are finite
    return np.column_stack([x[starts], x[ends]]).ravel(), np.column_stack([low, high]).ravel()


def _subtitle(runs: Sequence[TrainingCurves]) -> str:
    lengths = sorted({run.train_length for run in runs})
    parts = [f"trained at {' and '.join(f'{n:,}' for n in lengths)} tokens"]
    if len(runs) == 1:
        parts.append(f"{runs[0].steps[-1]:,} steps, {runs[0].tokens[-1]:,.0f} target tokens")
        parts += [f"a fork of {parent} after step {step:,}" for step, parent in runs[0].forked]
    return "; ".join([*parts, *differences(runs)])


def _end(name: str, value: float) -> str:
    if len(name) > LONGEST_NAME:
        half = LONGEST_NAME // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return f"{name}  {value:.3f}"


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


def _loss(
    figure: Figure, axes: Axes, runs: Sequence[TrainingCurves], styles: dict, share: float, most: float
) -> None:
    late, early, ends, lines = [], [], [], []
    for run in runs:
        color, smooth = styles[run.name][0], run.smoothed(share)[0]
        lines.append((run.tokens.tolist(), smooth.tolist()))
        axes.plot(*thinned(run.tokens, run.loss), color=color, lw=0.5, alpha=0.22, zorder=2)
        axes.plot(*thinned(run.tokens, smooth), color=color, lw=1.6, zorder=4)
        known = np.flatnonzero(np.isfinite(smooth))
        is_late = run.tokens[known] >= EARLY * most
        early += list(smooth[known][~is_late])
        late += list(smooth[known][is_late])
        noise = run.loss[(run.tokens >= EARLY * most) & np.isfinite(run.loss)]
        late += list(np.percentile(noise, [1, 99])) if len(noise) else []
        if len(known):
            ends.append((run.name, run.tokens[known[-1]], smooth[known[-1]], color))
        if len(known) and run.forked:
            begin = {"marker": "o", "ms": 6, "mfc": "white", "mew": 1.3, "color": color, "ls": ""}
            axes.plot(run.tokens[known[:1]], smooth[known[:1]], zorder=6, **begin)
    _frame(axes, most, 6)
    axes.set_ylim(*_limits(late, early))
    _annotate_clipped(axes, lines)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("training loss, nats", color=INK)
    bottom, top = axes.get_ylim()
    for run in runs:
        color = styles[run.name][0]
        for step, _ in run.changes:
            axes.axvline(run.tokens_at(step), color=color, lw=0.9, ls=DASHED, zorder=1.5)
        row, before = 0, -most
        for step, length in run.resized:
            x = run.tokens_at(step)
            axes.axvline(x, color=color, lw=1.1, ls=DOTTED, zorder=1.5)
            row = row + 1 if x - before < 0.07 * most else 0  # below an overlapping label
            axes.annotate(f"{length:,}", (x, top), (3, -9 * row), color=color, zorder=6, **ANNOTATION)
            before = x
        for steps, at, marker in ((run.resumed, bottom, "|"), (run.skipped, top, "x")):
            x = [run.tokens_at(step) for step in steps]
            axes.plot(x, [at] * len(x), marker=marker, ls="", ms=6, color=color, clip_on=False, zorder=5)
    _label(figure, axes, ends)


def _panels(runs: Sequence[TrainingCurves], styles: dict[str, tuple[str, str]]) -> list[Panel]:
    """Held-out NLL over tokens: one panel for a single run, one panel per multiple of L0 for several runs."""
    found: dict[float, list[tuple[int, Curve]]] = {}
    looks = cycle(zip(PALETTE, SHAPES, strict=True))
    for run in runs:
        for length, points in run.held_out.items():
            x, y = [run.tokens_at(step) for step, _ in points], [nll for _, nll in points]
            multiple = length / run.train_length
            label = run.name if len(runs) > 1 else f"{length:,} ({multiple:g} × L0)"
            color, marker = styles[run.name] if len(runs) > 1 else next(looks)
            line = Curve(label, x, y, color, width=1.3, marker=marker, size=3.6)
            found.setdefault(multiple, []).append((length, line))
    if len(runs) == 1:
        lines = [line for _, entries in sorted(found.items()) for _, line in entries]
        heading = "held-out NLL of the same targets by context length"
        return [Panel(lines, heading)] if lines else []
    panels = []
    for multiple, entries in sorted(found.items()):
        lengths = {length for length, _ in entries}
        tokens = f" = {lengths.pop():,}" if len(lengths) == 1 else ""
        panels.append(Panel([line for _, line in entries], f"held out, {multiple:g} × L0{tokens}"))
    return panels


def _limits_of(lines: Sequence[Curve]) -> tuple[float, float]:
    """One scale for all lines; early outliers may be clipped."""
    late, early = [], []
    for line in lines:
        first = max(1, sum(x < EARLY * line.x[-1] for x in line.x)) if len(line.y) > 3 else 0
        early += [value for value in line.y[:first] if math.isfinite(value)]
        late += [value for value in line.y[first:] if math.isfinite(value)]
    return _limits(late, early)


def _held_out(
    figure: Figure,
    axes: Axes,
    panel: Panel,
    limits: tuple[float, float],
    most: float,
    column: int | None,
) -> None:
    """One held-out panel; one that is alone in its row (`column` None) has labels on the right."""
    for one in panel.curves:
        one.draw(axes)
    _frame(axes, most, 6 if column is None else 3)
    if not column:
        axes.set_ylabel("NLL, nats", fontsize=8.5, color=INK)
    axes.set_ylim(*limits)
    _annotate_clipped(axes, [(one.x, one.y) for one in panel.curves])
    axes.set_title(panel.heading, loc="left", fontsize=9, color=INK, pad=3)
    axes.tick_params(labelbottom=column is not None, labelleft=not column)
    if column is None:
        ends = [(one.label, one.x[-1], one.y[-1], one.color) for one in panel.curves]
        _label(figure, axes, [end for end in ends if math.isfinite(end[2])])
    else:
        axes.tick_params(labelsize=7.5, length=2.5)
        axes.set_xlabel("target tokens", fontsize=7.5, color=INK, labelpad=1)


def _label(figure: Figure, axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """The name and last value of each line, with an arrow if it is clipped."""
    top = axes.get_ylim()[1]
    labels = [(_end(name, y) + (" ↑" if y > top else ""), x, y, color) for name, x, y, color in ends]
    label_ends(figure, axes, labels)


def _annotate_clipped(axes: Axes, lines: Sequence[tuple[Numbers, Numbers]]) -> None:
    """The first values of lines that begin above the axis, where they enter it."""
    top = axes.get_ylim()[1]
    above, entries = [], []
    for x, y in lines:
        begins = next((i for i, value in enumerate(y) if value <= top), len(y))
        if begins and begins < len(y) and math.isfinite(max(y[:begins])):
            above.append(max(y[:begins]))
            entries.append(x[begins])
    if above:
        ends = dict.fromkeys(f"{value:.2f}" for value in (min(above), max(above)))
        axes.annotate(f"↑ from {' to '.join(ends)}", (max(entries), top), (3, 0), color=SOFT, **ANNOTATION)


def _limits(late: Sequence[float], early: Sequence[float]) -> tuple[float, float]:
    """Limits including early values, unless these make the axis FAR times as tall."""
    values = list(late) or list(early)
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if max([high, *early]) - min([low, *early]) <= FAR * (high - low):
        low, high = min([low, *early]), max([high, *early])
    room = max(high - low, 0.05)
    return low - 0.08 * room, high + 0.08 * room


def _frame(axes: Axes, most: float, ticks: int) -> None:
    unit, letter = next((unit, letter) for unit, letter in UNITS if most >= unit)
    axes.set_xlim(0, 1.012 * most)
    axes.xaxis.set_major_locator(MaxNLocator(ticks))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / unit:g}{letter if value else ''}")
    )
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    grid(axes)
