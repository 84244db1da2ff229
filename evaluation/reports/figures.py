"""Figures of loss: NLL against length, and by position; and the style that all figures share. PNG and SVG,
legible at column width and without colour."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from data.files import atomic
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.analysis import Analysis

# Okabe and Ito 2008, without its yellow, which is too light for a line on white. Markers differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#5B5B5B")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
INK, SOFT, FAINT, GRID = "#222222", "#6E6E6E", "#767676", "#E6E6E6"
DOTTED = (0, (1, 2))
SIZE = (6.4, 4.2)  # inches; higher for many labels
LED_FROM = 0.85  # share of the width beyond which a line ends at the right edge
LABEL_GAP = 12.0  # points between the middles of two labels
AXES = (0.098, 0.185, 0.64)  # left, bottom, height, as shares of a figure of that size
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.formatter.useoffset": False,  # an offset at the end of an axis is easily missed
    "text.parse_math": False,  # names of runs and methods may contain `$`; formulas set parse_math
    "svg.fonttype": "none",
    "svg.hashsalt": "sextant",
}


@dataclass
class LengthCurve:
    """One method: points (x, y) and the half-width of each interval (NaN for none)."""

    label: str
    x: list[float]
    y: list[float]
    half: list[float] = field(default_factory=list)


def draw_figures(
    result: EvaluationResult,
    analysis: Analysis,
    folder: Path,
    below: Callable[[Figure, Axes], object] | None = None,
) -> list[Path]:
    """Write the figures of one evaluation into `folder`; returns the PNG files. `below` adds a strip
    under the axes of each."""
    folder.mkdir(parents=True, exist_ok=True)
    name, draw = ("nll_by_position", _by_position) if analysis.buckets else ("nll_by_length", _by_length)
    figure = draw(result, analysis)
    if below is not None:
        below(figure, figure.axes[0])
    return [save(figure, folder, name)]


def _by_length(result: EvaluationResult, analysis: Analysis) -> Figure:
    l0 = result.subject.trained_length
    lines = []
    for method in result.methods:
        rows = [row for row in analysis.rows if row.method == method.label and row.nll is not None]
        if method.label == TRUNCATE or not rows:
            continue
        name = "as trained" if method.label == TRAINED else method.label
        half = [row.gain.half if row.gain and row.length > l0 else math.nan for row in rows]
        lines.append(LengthCurve(name, [float(r.length) for r in rows], [r.nll or 0.0 for r in rows], half))
    baseline = None
    if result.truncated is not None:
        baseline = float(result.truncated.sum() / len(result.truncated))
    return length_figure(
        lines,
        baseline,
        l0,
        title="Loss beyond the trained length",
        subtitle=_subtitle(result, analysis),
        note=_note(result, analysis, lines),
    )


def _subtitle(result: EvaluationResult, analysis: Analysis) -> str:
    same = "the same " if result.plan.protocol == "fixed-targets" else ""
    where = f"{analysis.n_targets:,} targets of {analysis.documents} documents"
    return (
        f"{result.subject.name}: {same}{where}{' at every length' if same else ''} ({result.plan.protocol})"
    )


def _note(result: EvaluationResult, analysis: Analysis, lines: list[LengthCurve]) -> str:
    if not any(half > 0 for line in lines for half in line.half):
        return ""
    level = 100 * result.settings.confidence
    units = f"{analysis.unit_kind}s"
    return f"Bars: {level:g}% intervals over {units} of the paired difference from the dashed line."


def length_figure(
    lines: list[LengthCurve],
    baseline: float | None,
    trained_length: int | Sequence[int],
    *,
    title: str,
    subtitle: str,
    note: str = "",
) -> Figure:
    """NLL against length, log2 axis: a line per method, trained lengths and the truncation baseline
    marked."""
    trained = [trained_length] if isinstance(trained_length, int) else trained_length
    with rc_context(STYLE):
        limits = _limits(lines, baseline)
        cut = [] if baseline is None else [f"context truncated to {trained[0]}"]
        figure, axes = _canvas(title, subtitle, note, [*(line.label for line in lines), *cut], limits)
        xs = sorted({x for line in lines for x in line.x} | set(map(float, trained)))
        low, high = xs[0] / 2**0.25, xs[-1] * 2**0.12
        _draw_lines(axes, lines)
        _axes(axes, xs, (low, high), "context length, tokens (log scale)", "NLL, nats per token")
        labels = _ends(lines)
        if baseline is not None:
            axes.axhline(baseline, color=INK, lw=1.1, ls=(0, (5, 3)), zorder=2)
            labels.append((*cut, xs[-1] * 2**0.12, baseline, INK))
        for length in trained:
            mark_trained(axes, length)
        _label(figure, axes, labels)
        return figure


def _by_position(result: EvaluationResult, analysis: Analysis) -> Figure:
    l0, longest = result.subject.trained_length, result.plan.lengths[-1]
    lines = []
    for method, buckets in analysis.buckets.items():
        # Position p sees p + 1 tokens; a bucket is drawn at its geometric centre in tokens seen.
        x = [math.sqrt((b.low + 1) * b.high) for b in buckets]
        name = "as trained" if method == TRAINED else method
        lines.append(LengthCurve(name, x, [b.nll for b in buckets], [b.gain.half for b in buckets]))
    first = next(iter(analysis.buckets.values()))
    x = [math.sqrt((b.low + 1) * b.high) for b in first]
    cut = LengthCurve(f"context truncated to {l0}", x, [b.nll + b.gain.estimate for b in first])
    with rc_context(STYLE):
        figure, axes = _canvas(
            f"NLL by position in a window of {longest} tokens (factor for {longest})",
            f"{result.subject.name}: {analysis.n_targets:,} targets of {analysis.documents} documents; "
            "different tokens at each position",
            _note(result, analysis, lines),
            [line.label for line in [*lines, cut]],
            _limits([*lines, cut], None),
        )
        _draw_lines(axes, lines)
        axes.plot(cut.x, cut.y, color=INK, lw=1.1, ls=(0, (5, 3)), zorder=2)
        mark_trained(axes, l0, "right")
        ticks = [float(2**k) for k in range(longest.bit_length()) if 2**k <= longest]
        _axes(axes, ticks, (0.85, longest * 1.1), "tokens seen (log scale)", "NLL, nats per token")
        _label(figure, axes, [*_ends(lines), (cut.label, cut.x[-1], cut.y[-1], INK)])
        return figure


def _canvas(
    title: str, subtitle: str, note: str, names: list[str], limits: tuple[float, float]
) -> tuple[Figure, Axes]:
    """A figure with title, subtitle and note; axes with these y limits and room for labels on the right."""
    figure = Figure(figsize=SIZE, dpi=200)
    FigureCanvasAgg(figure)
    names = [f"{name}  {0:.{decimals(*limits)}f}" for name in names]
    wanted = (len(names) + 1) * LABEL_GAP / 72  # inches
    higher = max(0.0, wanted - AXES[2] * SIZE[1])
    width, height = SIZE[0], SIZE[1] + higher
    figure.set_size_inches(width, height)

    def up(share: float) -> float:
        """The same distance from the upper edge as in a figure of the usual size."""
        return 1 - (1 - share) * SIZE[1] / height

    # Room for the longest direct label at 9 points, about 0.072 inch per letter.
    right = 1 - (0.42 + 0.072 * max(map(len, names), default=0)) / SIZE[0]
    left, bottom = AXES[0], AXES[1] * SIZE[1] / height
    axes = figure.add_axes((left, bottom, max(0.4, right) - left, up(AXES[1] + AXES[2]) - bottom))
    axes.set_ylim(*limits)
    figure.text(0.02, up(0.965), title, fontsize=11.5, fontweight="bold", color=INK, va="top")
    figure.text(0.02, up(0.905), subtitle, fontsize=8.5, color=SOFT, va="top")
    figure.text(0.02, 0.02 * SIZE[1] / height, note, fontsize=8, color=SOFT, va="bottom")
    return figure, axes


def _draw_lines(axes: Axes, lines: list[LengthCurve]) -> None:
    for line, colour, marker in zip(lines, _colours(lines), _markers(lines), strict=True):
        if colour == FAINT:
            axes.plot(line.x, line.y, color=colour, lw=0.8, marker=".", ms=3.5, zorder=2.5)
            continue
        axes.plot(line.x, line.y, color=colour, lw=1.7, marker=marker, ms=4.6, mec="white", mew=0.6, zorder=4)
        bars = [(x, y, h) for x, y, h in zip(line.x, line.y, line.half, strict=False) if h == h and h > 0]
        if bars:
            x, y, h = zip(*bars, strict=True)
            axes.errorbar(
                x, y, yerr=h, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.2, alpha=0.75, zorder=3
            )


def _prominent(lines: list[LengthCurve]) -> set[str]:
    """Labels of the lines in colour: all, or the best at the longest length if there are too many."""
    rest = [line for line in lines if line.label != "as trained"]
    if len(rest) > len(COLOURS):
        rest.sort(key=lambda line: (-line.x[-1], line.y[-1]))
        rest = rest[: len(COLOURS) - 1]  # the last colour is the grey of the remaining lines
    return {line.label for line in rest}


def _colours(lines: list[LengthCurve]) -> list[str]:
    """Black for the checkpoint as trained, the palette in order for the prominent ones, grey for the rest."""
    rest, prominent = iter(COLOURS), _prominent(lines)
    return [
        INK if line.label == "as trained" else next(rest) if line.label in prominent else FAINT
        for line in lines
    ]


def _markers(lines: list[LengthCurve]) -> list[str]:
    rest, prominent = iter(MARKERS), _prominent(lines)
    return ["o" if line.label not in prominent else next(rest) for line in lines]


def _ends(lines: list[LengthCurve]) -> list[tuple[str, float, float, str]]:
    return [
        (line.label, line.x[-1], line.y[-1], colour)
        for line, colour in zip(lines, _colours(lines), strict=True)
    ]


def _axes(axes: Axes, ticks: list[float], limits: tuple[float, float], x: str, y: str) -> None:
    while len(ticks) > 9:
        ticks = ticks[::-2][::-1]
    token_axis(axes, ticks, x)
    axes.set_xlim(*limits)
    axes.set_ylabel(y, color=INK)
    grid(axes)


def token_axis(axes: Axes, ticks: Sequence[float], label: str) -> None:
    """A log2 axis of tokens with these ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(label, color=INK)


def grid(axes: Axes) -> None:
    """Horizontal grid lines, and no frame above and on the right."""
    axes.grid(axis="y", color=GRID, lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def mark_trained(axes: Axes, length: int, side: str = "left") -> None:
    """A dotted vertical line at the trained length, labelled at the top; `side`: alignment of the label."""
    axes.axvline(length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
    axes.annotate(
        f"trained length {length}",
        (length, 1),
        (4 if side == "left" else -4, -3),
        ("data", "axes fraction"),
        "offset points",
        va="top",
        ha=side,
        color=SOFT,
        fontsize=8.5,
    )


def _limits(lines: list[LengthCurve], baseline: float | None) -> tuple[float, float]:
    """Room for every point and bar, and a tenth above for the label of the trained length.

    Grey lines far above all others leave the axes; their labels state their values.
    """
    values = [] if baseline is None else [baseline]
    shown = [line for line, colour in zip(lines, _colours(lines), strict=True) if colour != FAINT]
    top = max((y for line in shown for y in line.y), default=math.inf)
    least = min((y for line in lines for y in line.y), default=0.0)
    lines = [line for line in lines if line in shown or max(line.y) <= top + 0.5 * (top - least)]
    for line in lines:
        half = line.half or [0.0] * len(line.y)
        values += [y + s * (h if h == h else 0.0) for y, h in zip(line.y, half, strict=True) for s in (-1, 1)]
    low, high = min(values), max(values)
    room = max(high - low, 0.05)
    return low - 0.07 * room, high + 0.13 * room


def decimals(low: float, high: float) -> int:
    """Decimals that resolve a twentieth of an axis from `low` to `high`."""
    return min(5, max(2, math.ceil(1.3 - math.log10(high - low))))


def power_of_ten(value: float) -> str:
    """`10⁻⁴`, without mathtext."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def fit_left(figure: Figure, axes: Axes) -> None:
    """Move the left edge of the axes inwards until the y label and tick labels fit into the figure."""
    renderer = cast(FigureCanvasAgg, figure.canvas).get_renderer()
    box, place = axes.yaxis.get_tightbbox(renderer), axes.get_position()
    cut = 0.0 if box is None else 0.01 - box.x0 / figure.bbox.width
    if cut > 0:
        axes.set_position((place.x0 + cut, place.y0, place.width - cut, place.height))


def _label(figure: Figure, axes: Axes, labels: list[tuple[str, float, float, str]]) -> None:
    low, high = axes.get_ylim()
    digits = decimals(low, high)
    ends = [
        (f"{text}  {y:.{digits}f}" + (" ↑" if y > high else ""), x, y, colour)
        for text, x, y, colour in labels
    ]
    fit_left(figure, axes)
    label_ends(figure, axes, ends)


def label_ends(figure: Figure, axes: Axes, labels: list[tuple[str, float, float, str]]) -> None:
    """Direct labels (text, x, y, colour) right of the axes at the height of the line's end, moved apart where
    they would overlap. Limits and scales of the axes must be final. The leader of a line that ends above the
    axes points to their top; a line that ends early has no leader, which would look like data."""
    height = axes.get_position().height * figure.get_figheight() * 72  # points
    gap, top = LABEL_GAP / height, axes.get_ylim()[1]
    to_axes = axes.transData - axes.transAxes
    wanted = sorted(
        (float(to_axes.transform((x, y))[1]), text, x, y, colour) for text, x, y, colour in labels
    )
    placed = within(spread([one[0] for one in wanted], gap), gap)
    for at, (_, text, x, y, colour) in zip(placed, wanted, strict=True):
        axes.annotate(
            text,
            xy=(x, min(y, top)),
            xycoords="data",
            xytext=(1.045, at),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.6 if to_axes.transform((x, y))[0] > LED_FROM else 0.0,
                "alpha": 0.6,
                "shrinkA": 2,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def spread(wanted: list[float], gap: float) -> list[float]:
    """Heights as near as possible to `wanted` (ascending) with at least `gap` between neighbours.

    Neighbours that collide form a block around their mean, which may collide with the next (pool adjacent
    violators).
    """
    blocks: list[tuple[float, int]] = []  # (mean of wanted - rank·gap, members)
    for rank, value in enumerate(wanted):
        blocks.append((value - rank * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2], blocks.pop()
            blocks[-1] = ((a * m + b * n) / (m + n), m + n)
    levels = [level for level, members in blocks for _ in range(members)]
    return [level + rank * gap for rank, level in enumerate(levels)]


def within(placed: list[float], gap: float) -> list[float]:
    """The same heights, moved into 0 to 1 if there is room, with the same gaps."""
    last = len(placed) - 1
    if last * gap > 1:
        return placed
    lifted = [max(at, rank * gap) for rank, at in enumerate(placed)]
    return [min(at, 1 - (last - rank) * gap) for rank, at in enumerate(lifted)]


def save(figure: Figure, folder: Path, name: str, dpi: int = 200) -> Path:
    """Write `name`.png and `name`.svg with reproducible bytes; returns the first."""
    with rc_context(STYLE):
        with atomic(folder / f"{name}.png") as file:
            figure.savefig(file, format="png", dpi=dpi, facecolor="white")
        with atomic(folder / f"{name}.svg") as file:
            figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    return folder / f"{name}.png"
