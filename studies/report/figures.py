"""The figures of a report, drawn from the results table, with their captions and alternative texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.reports.figures import SOFT, Curve, FigureText, Panel, save
from evaluation.reports.length_figures import ReferenceLines, joint_figure
from studies.report.document import ReportFigure, counted, listed, note, signed, slug
from studies.report.plots import (
    OTHERS,
    WIDTH,
    DotEstimate,
    Exposure,
    barred,
    dots_figure,
    heat_figure,
    informative,
    small_multiples,
    styles_of,
)
from studies.results.compare import StudyComparison
from studies.results.stored import CONFIDENCE, Group, StoredStudy
from studies.results.table import ResultsTable

NLL = "NLL, nats per token"
BY_LENGTH = "NLL by context length"
MEASURES = {  # measures of attention in the figure and the table, and their headings
    "entropy_relative": "entropy / ln(visible keys)",
    "first_token": "mass on the first token",
    "mass_beyond": "mass beyond trained length",
    "logit_std": "standard deviation of logits",
    "logit_max": "largest logit",
    "reach_90": "90% of mass within, tokens",
}


class FigureBuilder:
    """Draws figures into a directory and lists their files. A variant has the same color and marker in all
    figures."""

    def __init__(self, study: StoredStudy, folder: Path):
        self.study, self.folder = study, folder
        self.files: list[Path] = []
        self.styles = styles_of([variant.name for variant in study.variants], study.baseline)
        self.first: tuple[str, Group] | None = None

    def by_length(self, table: StudyComparison) -> ReportFigure:
        """NLL against length, all variants in one chart."""
        every = [self._nll(table, name) for name in table.names]
        l0, baseline, unigram = table.trained_length, table.baseline, table.losses.unigram
        truncated = table.value(baseline, "nll_as_trained", l0) if baseline else None
        levels = [] if truncated is None else [(f"{baseline} truncated to {l0:,}", truncated)]
        top = unigram if any(y > (unigram or math.inf) for one in every for y in one.y) else None
        levels += [] if top is None else [(f"unigram model  {top:.2f}", top)]
        series, notes = self._legible(table, every, top)
        text = FigureText(BY_LENGTH, _loss_subtitle(table), "\n".join(notes))
        seeds = [line for name in table.names for line in self._seeds(table, name)]
        figure = joint_figure(series, ReferenceLines(l0, levels, top=top), text, NLL, seeds, width=WIDTH)
        caption = ["NLL of the same targets with increasing context.", *notes]
        if truncated is not None:
            caption.append(f"Dashed: {baseline} with its context truncated to the trained length.")
        if top is not None:
            caption.append("The axis ends at the unigram model; labels of clipped lines have their values.")
        alt = _alt(
            "NLL against context length", (f"{s.label} {s.y[-1]:.2f} at {s.x[-1]:,.0f}" for s in series)
        )
        return self._add(table, "nll_by_length", figure, " ".join(caption), alt)

    def each_alone(self, table: StudyComparison) -> list[ReportFigure]:
        """The same with one panel per variant."""
        if len(table.names) < 3:
            return []
        top = table.losses.unigram
        series, notes = self._legible(table, [self._nll(table, name) for name in table.names], top)
        dashed = note("one_variant")
        panels = []
        for one in series:
            others = [
                Curve("", other.x, other.y, OTHERS, width=0.8, order=1.5) for other in series if other != one
            ]
            own = table.value(one.label, "nll_as_trained", table.trained_length) or 0.0
            curves = [*others, *self._seeds(table, one.label), replace(one, label="")]
            panels.append(Panel(curves, one.label, [("", own, SOFT)]))
        strips = [self._exposure(table, one.label) for one in series]
        below = f"{dashed} Grey: the others.\n{notes[0]}"
        text = FigureText(f"{BY_LENGTH}, one panel per variant", _loss_subtitle(table), below)
        figure = small_multiples(panels, ReferenceLines(table.trained_length, top=top), text, NLL, strips)
        caption = [f"Each variant in color on top of the others in grey. {dashed}", *notes]
        if any(strips):
            caption.append(note("strips"))
        alt = _alt("NLL against context length, one panel each", (one.label for one in series))
        return [self._add(table, "nll_by_length_each", figure, " ".join(caption), alt)]

    def gain(self, table: StudyComparison) -> ReportFigure:
        """Net gain over truncation against length."""
        l0, tolerance = table.trained_length, table.tolerance
        series = []
        for name in filter(table.beyond, table.names):
            # All lines begin at the trained length, where the gain as trained is 0.
            rows = [row for row in table.select("gain", name) if row.at >= l0]
            series.append(self._series(name, [(row.at, row.value, row.low, row.high) for row in rows]))
        bars = f"\nBars: {100 * table.confidence:g}% intervals." if barred(series) else ""
        axis = note("net_gain_axis", table) + bars
        marks = ReferenceLines(l0, [("truncated to the trained length", 0.0)], band=tolerance)
        text = FigureText("Net gain over truncation", _loss_subtitle(table), axis)
        figure = joint_figure(series, marks, text, "net gain, nats per token", number=signed, width=WIDTH)
        caption = note("net_gain", table)
        alt = _alt("net gain against context length", (f"{one.label} {signed(one.y[-1])}" for one in series))
        return self._add(table, "net_gain", figure, caption, alt)

    def differences(self, table: StudyComparison) -> ReportFigure:
        """Differences from the baseline with intervals, sorted, at up to three primary lengths."""
        panels, l0, chosen = [], table.trained_length, table.primary
        if len(chosen) > 3:  # the table has all of them
            chosen = [n for n in dict.fromkeys((l0, chosen[len(chosen) // 2], chosen[-1])) if n in chosen]
        for length in chosen:
            found = [row for row in table.select("difference") if row.length == length]
            dots = [
                DotEstimate(row.variant, row.value, row.low, row.high, *self.styles[row.variant])
                for row in sorted(found, key=lambda row: row.value)
            ]
            heading = f"at {length:,} tokens" + (", the trained length" if length == l0 else "")
            panels += [(heading, dots)] if dots else []
        title = f"Difference from {table.baseline}"
        text = FigureText(title, _loss_subtitle(table), note("difference_axis", table))
        x = f"NLL minus that of {table.baseline}, nats (negative is better)"
        figure = dots_figure(panels, text, x, table.tolerance)
        caption = f"NLL minus that of {table.baseline} on the same targets, in ascending order"
        if any(dot.low == dot.low for _, dots in panels for dot in dots):
            caption += (
                f", with intervals over seeds and {table.losses.kind}s, simultaneous over "
                f"{table.difference_family} comparisons"
            )
        values = (f"{at}: {', '.join(f'{d.label} {signed(d.value)}' for d in dots)}" for at, dots in panels)
        return self._add(table, "difference", figure, f"{caption}.", _alt(f"{title}, nats", values))

    def learned(self, table: StudyComparison) -> ReportFigure:
        """NLL at the trained length, seed by seed, and of the unigram model: whether training succeeded."""
        l0, unigram = table.trained_length, table.losses.unigram
        schemes = {variant.scheme: variant.name for variant in reversed(table.variants)}  # the first of each
        dots = []
        for scheme, name in schemes.items():
            rows = table.select("nll_as_trained", name, seed=None)
            mean, each = (row.value for row in rows if not row.seed), [row.value for row in rows if row.seed]
            dots.append(DotEstimate(scheme, next(mean), math.nan, math.nan, *self.styles[name], each))
        dots.sort(key=lambda dot: dot.value)
        level = "" if unigram is None else f"Unigram model on the same tokens: {unigram:.3f}."
        strokes = f"Vertical strokes: single seeds. {level}".strip()
        text = FigureText("NLL at the trained length", _loss_subtitle(table), strokes)
        figure = dots_figure([(f"as trained, at {l0:,} tokens", dots)], text, NLL)
        caption = f"NLL at the trained length: mean, and single seeds as strokes. {level}".strip()
        caption += " A scheme near the unigram model is undertrained." if level else ""
        alt = _alt("NLL at the trained length", (f"{dot.label} {dot.value:.3f}" for dot in dots))
        return self._add(table, "learned", figure, caption, f"{alt} {level}".strip())

    def accuracy(self, table: ResultsTable) -> ReportFigure:
        """Accuracy of a task against length."""
        chance, task = table.facts["chance"], str(table.facts.get("task", table.name))
        series = []
        for name in table.names:
            points = [
                (row.at, 100 * row.value, 100 * max(row.low, 0.0), 100 * min(row.high, 1.0))
                for row in table.select("accuracy", name)
            ]
            series += [self._series(name, points)] if points else []
        family = next(row.interval.family for row in table.select("accuracy") if row.interval)
        bars = f"Bars: {100 * CONFIDENCE:g}% intervals, simultaneous over {family} cells."
        bars = bars if barred(series) else ""
        level = (f"chance  {100 * chance:.0f}", 100 * chance)
        marks = ReferenceLines(table.trained_length, [level], ceiling=100)
        text = FigureText(f"{task.capitalize()}: accuracy by length", _subtitle(table), bars)
        figure = joint_figure(series, marks, text, "accuracy, %", width=WIDTH)
        last = "; ".join(f"{one.label} {one.y[-1]:.0f}% at {one.x[-1]:,.0f}" for one in series)
        caption = note("accuracy")
        alt = f"Line chart of accuracy against length. Last points: {last}. Chance: {100 * chance:.0f}%."
        return self._add(table, "accuracy", figure, f"{caption} {bars}".strip(), alt)

    def depths(self, table: ResultsTable) -> list[ReportFigure]:
        """Heat maps of a task's accuracy by length and depth of the answer."""
        maps = []
        for name in table.names:
            rows = table.select("accuracy_at_depth", name, where=None)
            cells = {(row.where[0], row.at): row.value for row in rows}
            maps += [(name, self.styles[name][0], cells)] if cells else []
        if not maps:
            return []
        text = note("depth")
        figure = heat_figure(maps, FigureText("Accuracy by depth of the answer", _subtitle(table), text))
        caption = f"{text} {note('depth_ends')}"
        ends = [(name, 100 * min(c.values()), 100 * max(c.values())) for name, _, c in maps]
        ranges = "; ".join(f"{name} {low:.0f}% to {high:.0f}%" for name, low, high in ends)
        alt = f"Heat maps of accuracy by length and depth. Ranges: {ranges}."
        return [self._add(table, "depth", figure, caption, alt)]

    def attention(self, table: ResultsTable) -> ReportFigure:
        """Measures of attention against length, one panel each."""
        panels = []
        for measure, heading in MEASURES.items():
            rows = {name: sorted(table.select(measure, name), key=lambda row: row.at) for name in table.names}
            series = [
                self._series(name, [(row.at, row.value) for row in own]) for name, own in rows.items() if own
            ]
            panels += [Panel(series, heading)] if series else []
        means = note("attention")
        text = FigureText(
            "Attention by context length", _subtitle(table), f"{means} Dotted: the trained length."
        )
        figure = small_multiples(panels, ReferenceLines(table.trained_length), text)
        alt = f"Small line charts against context length: {listed([one.heading for one in panels])}."
        return self._add(table, "attention", figure, f"Attention against context length. {means}", alt)

    def by_position(self, table: ResultsTable) -> ReportFigure:
        """NLL by position within long windows."""
        longest = max(row.where[1] for row in table.select("nll_at_positions", where=None))
        series = []
        for name in table.names:
            rows = sorted(table.select("nll_at_positions", name, where=None), key=lambda row: row.where)
            # Position p sees p + 1 tokens; a bucket is drawn at its geometric mean of tokens seen.
            points = [(math.sqrt((row.where[0] + 1) * row.where[1]), row.value) for row in rows]
            series.append(self._series(name, points))
        ticks = [float(2**k) for k in range(0, longest.bit_length(), 2)]
        title = f"NLL by position in a window of {longest:,} tokens"
        marks = ReferenceLines(table.trained_length, ticks=ticks)
        text = FigureText(title, _subtitle(table), note("position_axis", longest=longest))
        figure = joint_figure(series, marks, text, NLL, x="tokens seen (log scale)", width=WIDTH)
        caption = note("position", longest=longest)
        last = "; ".join(f"{one.label} {one.y[-1]:.2f}" for one in series)
        alt = f"Line chart of NLL by position. Last positions: {last}."
        return self._add(table, "by_position", figure, caption, alt)

    def _series(self, name: str, points: Sequence[Sequence[float]]) -> Curve:
        """A line through (x, y) or (x, y, low, high) in the style of a variant."""
        padded = [(*map(float, point), math.nan, math.nan) for point in points]
        x, y, low, high = ([point[part] for point in padded] for part in range(4))
        color, marker = self.styles[name]
        return Curve(name, x, y, color, low, high, width=1.6, marker=marker, order=4)

    def _nll(self, table: StudyComparison, name: str) -> Curve:
        """NLL with the interval of the change around each level: most of the spread of levels is common to
        all variants."""
        points = []
        for row in table.measured(name):
            delta = table.get(name, "delta", row.at)
            half = delta.half if delta is not None and delta.verdict else math.nan
            points.append((row.at, row.value, row.value - half, row.value + half))
        return self._series(name, points)

    def _seeds(self, table: StudyComparison, name: str) -> list[Curve]:
        """NLL of each seed as a thin line; none for a single seed."""
        rows = table.select("nll", name, seed=None)
        seeds = dict.fromkeys(row.seed for row in rows if row.seed and table.seed_count(name) > 1)
        lines = [
            self._series(name, [(row.at, row.value) for row in rows if row.seed == one]) for one in seeds
        ]
        return [replace(line, label="", marker="", width=0.6, order=2.5) for line in lines]

    def _exposure(self, table: ResultsTable, name: str) -> Exposure:
        """Exposure of a scheme in training, of positions and of distances: (tokens of context, share)."""
        (variant,) = [one for one in table.variants if one.name == name]
        for cell in self.study.of(variant, table.group):
            if exposure := (cell.record.get("training") or {}).get("exposure"):
                both = (exposure["positions"], exposure["distances"])
                return [(one["context"], one["share"]) for one in both if one["context"]]
        return []

    def _legible(
        self, table: StudyComparison, every: list[Curve], top: float | None
    ) -> tuple[list[Curve], list[str]]:
        """The curves without intervals that are too wide to draw, and notes about bars and thin lines."""
        series = informative(every, top)
        total, drawn = barred(every), barred(series)
        notes = ["Points without intervals."]
        if total:
            level = f"{100 * table.confidence:g}%"
            notes = [f"Bars: {level} simultaneous intervals of the change from the trained length."]
        if any(table.seed_count(name) > 1 for name in table.names):
            notes[0] += " Thin: single seeds."
        if total > drawn:
            notes.append(
                f"{total - drawn} of {total} bars are not drawn: wider than the range of the points."
            )
        return series, notes

    def _add(self, table: ResultsTable, stem: str, figure: Figure, caption: str, alt: str) -> ReportFigure:
        """Save a figure of an evaluation; figures of the first evaluation have no prefix."""
        self.first = self.first or (table.name, table.group)
        if (table.name, table.group) != self.first:
            labels = "-".join([table.name, *(f"{axis}-{label}" for axis, label in table.group)])
            stem = f"{slug(labels).replace('-', '_')}_{stem}"
        png = save(figure, self.folder, stem)
        self.files += [png, png.with_suffix(".svg")]
        return ReportFigure(stem, png.with_suffix(".svg").read_text(encoding="utf-8"), caption, alt)


def _alt(subject: str, values: Iterable[str]) -> str:
    return f"Chart of {subject}: {listed(list(values))}."


def _loss_subtitle(table: StudyComparison) -> str:
    losses, seeds = table.losses, sorted({table.seed_count(name) for name in table.names})
    several = (f"{seeds[0]} to " if len(seeds) > 1 else "") + counted(seeds[-1], "seed")
    targets, units = int(losses.targets.sum()), len(losses.units)
    return f"{table.title}: {targets:,} targets, {units} {losses.kind}s, {several} per scheme"


def _subtitle(table: ResultsTable) -> str:
    sizes = (("items", "item", " per length"), ("documents", "document", ""))
    parts = [counted(table.facts[key], noun) + per for key, noun, per in sizes if table.facts.get(key)]
    return f"{table.title}: {', '.join(parts) or 'means over seeds'}"
