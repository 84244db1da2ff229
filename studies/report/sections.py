"""Sections of a report about evaluations other than loss by length."""

from __future__ import annotations

import math

from evaluation.statistics.seeds import SeedInterval
from studies.report.document import (
    BulletList,
    Cell,
    ReportFigure,
    ReportSection,
    ReportTable,
    TableCell,
    counted,
    listed,
)
from studies.report.figure_builder import FigureBuilder
from studies.report.figures import ReferenceLines, SeedSeries, barred, joint_figure
from studies.report.heat_maps import heat_figure, measures_figure
from studies.report.tables import NONE, matrix
from studies.results.others import ATTENTION, BY_POSITION, GENERATION, TASKS, AccuracyMeasure, OtherMeasure
from studies.results.stored import CONFIDENCE

SHOWN = {  # measures of attention in the figure and the table, and their headings
    "entropy_relative": "entropy / ln(visible keys)",
    "first_token": "mass on the first token",
    "mass_beyond": "mass beyond training length",
    "logit_std": "standard deviation of logits",
    "logit_max": "largest logit",
    "reach_90": "90% of mass within, tokens",
}
NO_INTERVALS = "Means over seeds, without intervals."


def section(found: OtherMeasure, draw: FigureBuilder) -> ReportSection:
    """The section about one evaluation; without blocks if it has no numbers."""
    where = "".join(f", {axis} {label}" for axis, label in found.group)
    title, blocks = {
        TASKS: (f"Task: {found.facts.get('task', found.name)}", _task),
        ATTENTION: ("Attention beyond the training length", _attention),
        GENERATION: ("Generated text beyond the training length", _generation),
        BY_POSITION: ("NLL by position", _by_position),
    }[found.protocol]
    measured = found.accuracy or found.means
    return ReportSection(f"{title} ({found.name}{where})", blocks(found, draw) if measured else [])


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _share(share: SeedInterval) -> str:
    """`90% [80%, 97%]`; the interval is clipped to 0–100%."""
    estimate = _percent(share.estimate)
    if math.isnan(share.low):
        return estimate
    return f"{estimate} [{_percent(max(share.low, 0.0))}, {_percent(min(share.high, 1.0))}]"


def _subtitle(found: OtherMeasure) -> str:
    sizes = (("items", "item", " per length"), ("documents", "document", ""))
    parts = [counted(found.facts[key], noun) + per for key, noun, per in sizes if found.facts.get(key)]
    where = "".join(f", {axis} {label}" for axis, label in found.group)
    return f"{found.name}{where}: {', '.join(parts) or 'means over seeds'}"


def _task(found: OtherMeasure, draw: FigureBuilder) -> list:
    rows = {
        name: [found.accuracy[name, n] for n in found.lengths if (name, n) in found.accuracy]
        for name in found.variants
    }
    rows = {name: own for name, own in rows.items() if own}
    findings = BulletList([(name, _task_finding(own, found.facts["chance"])) for name, own in rows.items()])
    return [findings, _accuracy_figure(found, rows, draw), accuracy_table(found), *_depth_figure(found, draw)]


def _task_finding(rows: list[AccuracyMeasure], chance: float) -> str:
    """Accuracy at the first and last length, and up to which length it is significantly above chance."""
    ends = dict.fromkeys((rows[0], rows[-1]))
    text = f"accuracy {listed([f'{_share(one.share)} at {one.length:,}' for one in ends])}"
    if all(math.isnan(one.share.low) for one in rows):
        return f"{text} (point estimates)."
    reached = ""
    for one in rows:
        if one.verdict(chance) != "above chance":
            break
        reached = f"above chance up to {one.length:,}"
    return f"{text}; {reached or 'not shown to be above chance'}."


def _accuracy_figure(
    found: OtherMeasure, rows: dict[str, list[AccuracyMeasure]], draw: FigureBuilder
) -> ReportFigure:
    chance, task = found.facts["chance"], str(found.facts.get("task", found.name))

    def ends(one: AccuracyMeasure) -> tuple[float, float]:
        low, high = one.share.low, one.share.high
        return (low, high) if math.isnan(low) else (100 * max(low, 0.0), 100 * min(high, 1.0))

    series = [
        SeedSeries(
            name,
            [float(one.length) for one in own],
            [100 * one.share.estimate for one in own],
            [ends(one)[0] for one in own],
            [ends(one)[1] for one in own],
            *draw.styles[name],
        )
        for name, own in rows.items()
    ]
    bars = f"Bars: {100 * CONFIDENCE:g}% intervals, simultaneous over {found.family} cells."
    figure = joint_figure(
        series,
        ReferenceLines(found.trained_length, [(f"chance  {100 * chance:.0f}", 100 * chance)], ceiling=100),
        f"{task.capitalize()}: accuracy by length",
        _subtitle(found),
        "accuracy, %",
        bars if barred(series) else "",
    )
    last = "; ".join(f"{one.label} {one.y[-1]:.0f}% at {one.x[-1]:,.0f}" for one in series)
    caption = "Share of items whose correct answer is the most likely candidate, mean over seeds."
    caption += f" {bars}" if barred(series) else ""
    alt = f"Line chart of accuracy against length. Last points: {last}. Chance: {_percent(chance)}."
    return draw.add(found.name, found.group, "accuracy", figure, caption, alt)


def accuracy_table(found: OtherMeasure) -> ReportTable:
    chance, shortest = found.facts["chance"], found.lengths[0]

    def cell(name: str, length: int) -> Cell:
        one = found.accuracy.get((name, length))
        if one is None:
            return NONE
        return TableCell(_share(one.share), "held" if one.verdict(chance) == "above chance" else "")

    exact = [f"{name} {_percent(one.exact)}" for (name, n), one in found.accuracy.items() if n == shortest]
    note = f"Chance: {_percent(chance)}; shaded: significantly above. Generated exactly at {shortest:,}: "
    return matrix("Accuracy by length", found.variants, found.lengths, cell, f"{note}{', '.join(exact)}.")


def _depth_figure(found: OtherMeasure, draw: FigureBuilder) -> list[ReportFigure]:
    maps = [
        (name, draw.styles[name][0], {(d, n): v for (of, n, d), v in found.depth.items() if of == name})
        for name in found.variants
    ]
    maps = [one for one in maps if one[2]]
    if not maps:
        return []
    note = "Accuracy in percent by length (columns) and depth of the answer (rows), mean over seeds."
    figure = heat_figure(maps, "Accuracy by depth of the answer", _subtitle(found), note)
    caption = f"{note} Depth 0 is the beginning of the text, 1 its end, next to the question."
    ranges = [f"{name} {_percent(min(c.values()))} to {_percent(max(c.values()))}" for name, _, c in maps]
    alt = f"Heat maps of accuracy by length and depth. Ranges: {'; '.join(ranges)}."
    return [draw.add(found.name, found.group, "depth", figure, caption, alt)]


def _attention(found: OtherMeasure, draw: FigureBuilder) -> list:
    panels = []
    for measure, heading in SHOWN.items():
        series = []
        for name in found.variants:
            points = {
                float(n): v for n in found.lengths if (v := found.means.get((name, n, measure))) is not None
            }
            if points:
                series.append(
                    SeedSeries(name, list(points), list(points.values()), (), (), *draw.styles[name])
                )
        panels += [(heading, series)] if series else []
    note = "Means over layers, heads, queries and seeds."
    figure = measures_figure(
        panels,
        found.trained_length,
        "Attention by context length",
        _subtitle(found),
        f"{note} Dotted: the training length.",
    )
    alt = f"Small line charts against context length: {listed([heading for heading, _ in panels])}."
    caption = f"Attention against context length. {note}"
    picture = draw.add(found.name, found.group, "attention", figure, caption, alt)
    return [NO_INTERVALS, picture, attention_table(found)]


def _change(values: list[float | None], write) -> str:
    """`2.00 → 4.00`, a dash for a missing number."""
    return " → ".join("—" if value is None else write(value) for value in values)


def attention_table(found: OtherMeasure) -> ReportTable:
    ends = (found.trained_length, found.lengths[-1])
    rows = [
        [name, *(_change([found.means.get((name, n, m)) for n in ends], "{:.3g}".format) for m in SHOWN)]
        for name in found.variants
    ]
    title = f"Attention at {ends[0]:,} → {ends[1]:,} tokens"
    return ReportTable(title, ["scheme", *SHOWN.values()], rows, NO_INTERVALS)


def _generation(found: OtherMeasure, draw: FigureBuilder) -> list:
    rows = []
    for name in found.variants:
        places = sorted(key[1] for key in found.means if key[0] == name and key[2] == "nll")
        for source in dict.fromkeys(key[1][0] for key in found.means if key[0] == name):
            own = [place for place in places if place[0] == source]
            ends = own[0], own[-1]
            repeated, nll = ([found.means.get((name, at, m)) for at in ends] for m in ("repeated_4", "nll"))
            positions = " → ".join(f"{start:,}–{stop:,}" for _, start, stop in ends)
            rows.append([name, source, _change(repeated, _percent), _change(nll, "{:.2f}".format), positions])
    columns = ["scheme", "text", "repeated 4-grams", "NLL under the model", "positions"]
    note = f"First → last range of positions. Text `real`: the documents' own continuation. {NO_INTERVALS}"
    title = "Repetition and NLL of generated text by position"
    return [NO_INTERVALS, ReportTable(title, columns, rows, note, numbers=2)]


def _by_position(found: OtherMeasure, draw: FigureBuilder) -> list:
    longest = max(key[1][1] for key in found.means)
    series = []
    for name in found.variants:
        own = sorted((key[1], nll) for key, nll in found.means.items() if (key[0], key[2]) == (name, "nll"))
        # Position p sees p + 1 tokens; a bucket is drawn at its geometric mean of tokens seen.
        x = [math.sqrt((low + 1) * high) for (low, high), _ in own]
        series.append(SeedSeries(name, x, [nll for _, nll in own], (), (), *draw.styles[name]))
    figure = joint_figure(
        series,
        ReferenceLines(found.trained_length, ticks=[float(2**k) for k in range(0, longest.bit_length(), 2)]),
        f"NLL by position in a window of {longest:,} tokens",
        _subtitle(found),
        "NLL, nats per token",
        f"Scaling factors for {longest:,}; different targets at each position. Means over seeds.",
        x="tokens seen (log scale)",
    )
    caption = (
        f"NLL by position in windows of {longest:,} tokens. Each position scores different "
        "targets, and methods "
        f"that depend on the length use {longest:,}: not comparable with curves of fixed targets."
    )
    last = "; ".join(f"{one.label} {one.y[-1]:.2f}" for one in series)
    alt = f"Line chart of NLL by position. Last positions: {last}."
    return [NO_INTERVALS, draw.add(found.name, found.group, "by_position", figure, caption, alt)]
