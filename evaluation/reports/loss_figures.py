"""Figures of loss: NLL against length, and by position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.base import dtype_note
from evaluation.reports.figures import (
    COLOURS,
    DASHED,
    FAINT,
    INK,
    MARKERS,
    Curve,
    FigureText,
    save,
)
from evaluation.reports.length_figures import ReferenceLines, joint_figure
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.analysis import Analysis
from evaluation.statistics.intervals import Interval

NLL = "NLL, nats per token"


def draw_figures(
    result: EvaluationResult,
    analysis: Analysis,
    folder: Path,
    below: Callable[[Figure, Axes], object] | None = None,
) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files. `below` adds a strip
    under the axes of each."""
    folder.mkdir(parents=True, exist_ok=True)
    name, draw = (
        ("nll_by_position", _by_position) if analysis.buckets else ("nll_by_length", _by_length)
    )
    figure = draw(result, analysis)
    if below is not None:
        below(figure, figure.axes[0])
    return [save(figure, folder, name)]


def loss_curve(
    label: str, x: Sequence[float], y: Sequence[float], bars: Sequence[Interval | None]
) -> Curve:
    """NLL with bars as wide as the intervals of differences at the same points."""
    half = [math.nan if bar is None else bar.half for bar in bars]
    low, high = ([at + sign * h for at, h in zip(y, half, strict=True)] for sign in (-1, 1))
    return Curve(label, x, y, low=low, high=high)


def _by_length(result: EvaluationResult, analysis: Analysis) -> Figure:
    l0 = result.subject.trained_length
    curves = []
    for method in result.methods:
        rows = [row for row in analysis.rows if row.method == method.label and row.nll is not None]
        if method.label == TRUNCATE or not rows:
            continue
        gains = [row.gain if row.gain and row.length > l0 else None for row in rows]
        x = [float(row.length) for row in rows]
        y = [row.nll or 0.0 for row in rows]
        curves.append(loss_curve(name_of(method.label), x, y, gains))
    same = "the same " if result.plan.protocol == "fixed-targets" else ""
    return length_figure(
        curves,
        None if result.truncated is None else float(result.truncated.sum() / len(result.truncated)),
        l0,
        FigureText(
            "Loss beyond the trained length",
            f"{result.subject.name}: {same}{analysis.n_targets:,} targets of {analysis.documents} documents"
            f"{' at every length' if same else ''} ({result.plan.protocol}{dtype_note(result.settings)})",
            _note(result, analysis, curves),
        ),
    )


def _note(result: EvaluationResult, analysis: Analysis, curves: list[Curve]) -> str:
    if not any(
        high > low for curve in curves for low, high in zip(curve.low, curve.high, strict=True)
    ):
        return ""
    level = 100 * result.settings.confidence
    units = f"{analysis.unit_kind}s"
    return f"Bars: {level:g}% intervals over {units} of the paired difference from the dashed line."


def length_figure(
    curves: Sequence[Curve], baseline: float | None, trained: int | Sequence[int], text: FigureText
) -> Figure:
    """NLL against length: a line per method, trained lengths and the truncation baseline marked.

    Grey lines far above all others leave the axes; their labels state their values.
    """
    first, *also = [trained] if isinstance(trained, int) else trained
    levels = [] if baseline is None else [(f"context truncated to {first}  {{}}", baseline)]
    curves = _styled(curves)
    top = None
    highest = max((y for one in curves if one.color != FAINT for y in one.y), default=math.inf)
    limit = highest + 0.5 * (highest - min((y for one in curves for y in one.y), default=0.0))
    if any(max(one.y) > limit for one in curves):
        kept = [one for one in curves if max(one.y) <= limit]
        top = max(y for one in kept for y in (*one.y, *one.high, baseline or -math.inf) if y == y)
    return joint_figure(curves, ReferenceLines(first, levels, top=top, also=also), text, NLL)


def _by_position(result: EvaluationResult, analysis: Analysis) -> Figure:
    l0 = result.subject.trained_length
    longest = result.plan.lengths[-1]
    curves = []
    x = []
    cut = []
    for method, buckets in analysis.buckets.items():
        # Position p sees p + 1 tokens; a bucket is drawn at its geometric center in tokens seen.
        x = [math.sqrt((b.low + 1) * b.high) for b in buckets]
        curves.append(
            loss_curve(name_of(method), x, [b.nll for b in buckets], [b.gain for b in buckets])
        )
        cut = cut or [b.nll + b.gain.estimate for b in buckets]
    baseline = Curve(f"context truncated to {l0}", x, cut, width=1.1, dash=DASHED, order=2)
    text = FigureText(
        f"NLL by position in a window of {longest} tokens (factor for {longest})",
        f"{result.subject.name}: {analysis.n_targets:,} targets of {analysis.documents} documents; "
        f"different tokens at each position{dtype_note(result.settings)}",
        _note(result, analysis, curves),
    )
    marks = ReferenceLines(l0, ticks=[float(2**k) for k in range(longest.bit_length())])
    return joint_figure([*_styled(curves), baseline], marks, text, NLL, x="tokens seen (log scale)")


def _styled(curves: Sequence[Curve]) -> list[Curve]:
    """Black for the checkpoint as trained, the palette in order for the others; if there are too many, only
    the best at the longest length have colors and the rest are thin grey lines."""
    rest = [curve for curve in curves if curve.label != name_of(TRAINED)]
    if len(rest) > len(COLOURS):
        rest.sort(key=lambda curve: (-curve.x[-1], curve.y[-1]))
        rest = rest[: len(COLOURS) - 1]  # the last color is the grey of the remaining lines
    prominent = {curve.label for curve in rest}
    styles = zip(COLOURS, MARKERS, strict=True)
    out = []
    for curve in curves:
        if curve.label == name_of(TRAINED):
            color = INK
            marker = "o"
        elif curve.label in prominent:
            color, marker = next(styles)
        else:
            grey = {"color": FAINT, "width": 0.8, "marker": ".", "size": 3.5, "order": 2.5}
            out.append(replace(curve, low=(), high=(), **grey))
            continue
        out.append(replace(curve, color=color, marker=marker, width=1.7, order=4))
    return out
