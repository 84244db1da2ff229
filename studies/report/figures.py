"""The figures of a report, drawn from the results table, with their captions and alternative texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.reports.charts import SOFT, Curve, FigureText, Panel, save
from evaluation.reports.length_charts import ReferenceLines, length_chart
from evaluation.reports.text import plain
from studies.report import plots
from studies.report.document import ReportFigure, counted, listed, note, seed_counts, signed, slug
from studies.results.compare import StudyComparison
from studies.results.stored import CONFIDENCE, Group, StoredStudy
from studies.results.table import ResultsTable, StudyResult

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
        self.study = study
        self.folder = folder
        self.files: list[Path] = []
        self.styles = plots.styles_of([variant.name for variant in study.variants], study.baseline)
        self.first: tuple[str, Group] | None = None

    def by_length(self, table: StudyComparison) -> ReportFigure:
        """NLL against length, all variants in one chart."""
        every = [self._nll(table, name) for name in table.names]
        l0 = table.trained_length
        baseline = table.baseline
        unigram = table.losses.unigram
        truncated = table.value(baseline, "nll_as_trained", l0) if baseline else None
        levels = [] if truncated is None else [(f"{baseline} truncated to {l0:,}", truncated)]
        top = unigram if any(y > (unigram or math.inf) for one in every for y in one.y) else None
        levels += [] if top is None else [(f"unigram model  {top:.2f}", top)]
        series, notes = self._legible(table, every, top)
        text = FigureText(BY_LENGTH, _loss_subtitle(table), notes)
        seeds = [line for name in table.names for line in self._seeds(table, name)]
        marks = ReferenceLines(l0, levels, top=top)
        more = note("same_targets") + ("" if top is None else note("clipped"))
        return self._chart(
            table, "nll_by_length", series, marks, text, NLL, plain, more, seeds=seeds
        )

    def each_alone(self, table: StudyComparison) -> list[ReportFigure]:
        """The same with one panel per variant."""
        if len(table.names) < 3:
            return []
        top = table.losses.unigram
        series, notes = self._legible(table, [self._nll(table, name) for name in table.names], top)
        panels = []
        for one in series:
            others = [
                Curve("", s.x, s.y, plots.OTHERS, width=0.8, order=1.5) for s in series if s != one
            ]
            own = table.value(one.label, "nll_as_trained", table.trained_length) or 0.0
            curves = [*others, *self._seeds(table, one.label), replace(one, label="")]
            panels.append(Panel(curves, one.label, [("", own, SOFT)]))
        strips = [self._exposure(table, one.label) for one in series]
        below = f"{note('one_variant')}\n{notes}"
        text = FigureText(f"{BY_LENGTH}, one panel per variant", _loss_subtitle(table), below)
        marks = ReferenceLines(table.trained_length, top=top)
        figure = plots.small_multiples(panels, marks, text, NLL, strips)
        names = (one.label for one in series)
        more = note("strips") if any(strips) else ""
        return [self._add(table, "nll_by_length_each", figure, text, names, more)]

    def gain(self, table: StudyComparison) -> ReportFigure:
        """Net gain over truncation against length."""
        l0 = table.trained_length
        series = []
        for name in filter(table.beyond, table.names):
            # All lines begin at the trained length, where the gain as trained is 0.
            series.append(
                self._series(name, [row for row in table.select("gain", name) if row.at >= l0])
            )
        bars = f"\nBars: {100 * table.confidence:g}% intervals." if plots.barred(series) else ""
        axis = note("net_gain_axis", table) + bars
        marks = ReferenceLines(l0, [("truncated to the trained length", 0.0)], band=table.tolerance)
        text = FigureText("Net gain over truncation", _loss_subtitle(table), axis)
        more = note("net_gain", table)
        return self._chart(
            table, "net_gain", series, marks, text, "net gain, nats per token", signed, more
        )

    def differences(self, table: StudyComparison) -> ReportFigure:
        """Differences from the baseline with intervals, sorted, at up to three primary lengths."""
        panels = []
        l0 = table.trained_length
        chosen = table.primary
        if len(chosen) > 3:  # the table has all of them
            chosen = [
                n for n in dict.fromkeys((l0, chosen[len(chosen) // 2], chosen[-1])) if n in chosen
            ]
        for length in chosen:
            found = [row for row in table.select("difference") if row.length == length]
            dots = [self._dot(row.variant, row) for row in sorted(found, key=lambda row: row.value)]
            heading = f"at {length:,} tokens" + (", the trained length" if length == l0 else "")
            panels += [(heading, dots)] if dots else []
        title = f"Difference from {table.baseline}"
        text = FigureText(title, _loss_subtitle(table), note("difference_axis", table))
        x = f"NLL minus that of {table.baseline}, nats (negative is better)"
        figure = plots.dots_figure(panels, text, x, table.tolerance)
        values = (
            f"{at}: {', '.join(f'{d.label} {signed(d.value)}' for d in dots)}"
            for at, dots in panels
        )
        claimed = any(dot.low == dot.low for _, dots in panels for dot in dots)
        return self._add(
            table, "difference", figure, text, values, note("simultaneous", table) * claimed
        )

    def learned(self, table: StudyComparison) -> ReportFigure:
        """NLL at the trained length, seed by seed, and of the unigram model: whether training succeeded."""
        l0 = table.trained_length
        unigram = table.losses.unigram
        # the first of each
        schemes = {variant.scheme: variant.name for variant in reversed(table.variants)}
        dots = []
        for scheme, name in schemes.items():
            mean, *each = sorted(
                table.select("nll_as_trained", name, seed=None), key=lambda row: row.seed
            )
            dot = self._dot(name, replace(mean, interval=None))
            dots.append(replace(dot, label=scheme, each=[row.value for row in each]))
        dots.sort(key=lambda dot: dot.value)
        level = "" if unigram is None else note("unigram", unigram=unigram)
        below = f"Vertical strokes: single seeds.\n{level}".rstrip()
        text = FigureText("NLL at the trained length", _loss_subtitle(table), below)
        figure = plots.dots_figure([(f"as trained, at {l0:,} tokens", dots)], text, NLL)
        return self._add(
            table, "learned", figure, text, (f"{dot.label} {dot.value:.3f}" for dot in dots)
        )

    def accuracy(self, table: ResultsTable) -> ReportFigure:
        """Accuracy of a task against length."""
        chance = table.facts["chance"]
        task = str(table.facts.get("task", table.name))
        series = []
        for name in table.names:
            if rows := table.select("accuracy", name):
                one = self._series(name, rows)
                y = [100 * v for v in one.y]
                low = [100 * max(v, 0.0) for v in one.low]
                series.append(
                    replace(one, y=y, low=low, high=[100 * min(v, 1.0) for v in one.high])
                )
        family = next(row.interval.family for row in table.select("accuracy") if row.interval)
        bars = f"Bars: {100 * CONFIDENCE:g}% intervals, simultaneous over {family} cells."
        level = (f"chance  {100 * chance:.0f}", 100 * chance)
        marks = ReferenceLines(table.trained_length, [level], ceiling=100)
        below = bars if plots.barred(series) else ""
        text = FigureText(f"{task.capitalize()}: accuracy by length", _subtitle(table), below)
        return self._chart(
            table, "accuracy", series, marks, text, "accuracy, %", plain, note("accuracy")
        )

    def depths(self, table: ResultsTable) -> list[ReportFigure]:
        """Heat maps of a task's accuracy by length and depth of the answer."""
        maps = []
        for name in table.names:
            rows = table.select("accuracy_at_depth", name, where=None)
            cells = {(row.where[0], row.at): row.value for row in rows}
            maps += [(name, self.styles[name][0], cells)] if cells else []
        if not maps:
            return []
        text = FigureText("Accuracy by depth of the answer", _subtitle(table), note("depth"))
        ends = [(name, 100 * min(c.values()), 100 * max(c.values())) for name, _, c in maps]
        ranges = (f"{name} {low:.0f}% to {high:.0f}%" for name, low, high in ends)
        return [
            self._add(
                table, "depth", plots.heat_figure(maps, text), text, ranges, note("depth_ends")
            )
        ]

    def attention(self, table: ResultsTable) -> ReportFigure:
        """Measures of attention against length, one panel each."""
        panels = []
        for measure, heading in MEASURES.items():
            rows = {
                name: sorted(table.select(measure, name), key=lambda row: row.at)
                for name in table.names
            }
            series = [self._series(name, own) for name, own in rows.items() if own]
            panels += [Panel(series, heading)] if series else []
        text = FigureText("Attention by context length", _subtitle(table), note("attention"))
        figure = plots.small_multiples(panels, ReferenceLines(table.trained_length), text)
        return self._add(table, "attention", figure, text, (one.heading for one in panels))

    def by_position(self, table: ResultsTable) -> ReportFigure:
        """NLL by position within long windows."""
        longest = max(row.where[1] for row in table.select("nll_at_positions", where=None))
        series = []
        for name in table.names:
            rows = sorted(
                table.select("nll_at_positions", name, where=None), key=lambda row: row.where
            )
            # Position p sees p + 1 tokens; a bucket is drawn at its geometric mean of tokens seen.
            series.append(
                self._series(name, rows, [math.sqrt((r.where[0] + 1) * r.where[1]) for r in rows])
            )
        marks = ReferenceLines(
            table.trained_length, ticks=[float(2**k) for k in range(0, longest.bit_length(), 2)]
        )
        title = f"NLL by position in a window of {longest:,} tokens"
        text = FigureText(title, _subtitle(table), note("position_axis", longest=longest))
        how = {"more": note("position", longest=longest), "x": "tokens seen (log scale)"}
        return self._chart(table, "by_position", series, marks, text, NLL, plain, **how)

    def _series(
        self, name: str, rows: Sequence[StudyResult], x: Sequence[float] | None = None
    ) -> Curve:
        """Results of a variant as a line in its style, by default against length."""
        low, y, high = zip(*((row.low, row.value, row.high) for row in rows), strict=True)
        x = x or [float(row.at) for row in rows]
        (color, marker) = self.styles[name]
        return Curve(name, x, y, color, low, high, width=1.6, marker=marker, order=4)

    def _dot(self, name: str, row: StudyResult) -> plots.DotEstimate:
        return plots.DotEstimate(name, row.value, row.low, row.high, *self.styles[name])

    def _nll(self, table: StudyComparison, name: str) -> Curve:
        """NLL with the interval of the change around each level: most of the spread of levels is common to
        all variants."""
        rows = table.measured(name)
        halves = {row.at: row.half for row in table.beyond(name)}
        halves = [halves.get(row.at, math.nan) for row in rows]
        low, high = (
            [row.value + sign * half for row, half in zip(rows, halves, strict=True)]
            for sign in (-1, 1)
        )
        return replace(self._series(name, rows), low=low, high=high)

    def _seeds(self, table: StudyComparison, name: str) -> list[Curve]:
        """NLL of each seed as a thin line; none for a single seed."""
        rows = table.select("nll", name, seed=None)
        seeds = dict.fromkeys(row.seed for row in rows if row.seed and table.seed_count(name) > 1)
        lines = [self._series(name, [row for row in rows if row.seed == one]) for one in seeds]
        return [replace(line, label="", marker="", width=0.6, order=2.5) for line in lines]

    def _exposure(self, table: ResultsTable, name: str) -> plots.Exposure:
        """Exposure of a scheme in training, of positions and of distances: (tokens of context, share)."""
        (variant,) = [one for one in table.variants if one.name == name]
        for cell in self.study.of(variant, table.group):
            if exposure := (cell.record.get("training") or {}).get("exposure"):
                both = (exposure["positions"], exposure["distances"])
                return [(one["context"], one["share"]) for one in both if one["context"]]
        return []

    def _legible(
        self, table: StudyComparison, every: list[Curve], top: float | None
    ) -> tuple[list[Curve], str]:
        """The curves without intervals that are too wide to draw, and a note about bars and thin lines."""
        series = plots.informative(every, top)
        total = plots.barred(every)
        drawn = plots.barred(series)
        text = note("bars", table) if total else "Points without intervals."
        if any(table.seed_count(name) > 1 for name in table.names):
            text += " Thin: single seeds."
        return series, text + (
            note("too_wide", left=total - drawn, total=total) if total > drawn else ""
        )

    def _chart(
        self,
        table: ResultsTable,
        stem: str,
        series: list[Curve],
        marks: ReferenceLines,
        text: FigureText,
        y: str,
        number: Any,
        more: str = "",
        **how: Any,
    ) -> ReportFigure:
        """One chart of lines. `number`: prints a value with so many digits."""
        figure = length_chart(series, marks, text, y, width=plots.WIDTH, number=number, **how)
        digits, unit = (0, "%") if marks.ceiling else (3, "")
        values = [
            f"{one.label} {number(one.y[-1], digits)}{unit} at {one.x[-1]:,.0f}" for one in series
        ]
        values += [" ".join(label.split()) + unit for label, _ in marks.levels]
        return self._add(table, stem, figure, text, values, more)

    def _add(
        self,
        table: ResultsTable,
        stem: str,
        figure: Figure,
        text: FigureText,
        values: Iterable[str],
        more: str = "",
    ) -> ReportFigure:
        """Save a figure of an evaluation; figures of the first evaluation have no prefix. The caption is its
        title and note with `more`, the alternative text its title and `values`."""
        self.first = self.first or (table.name, table.group)
        if (table.name, table.group) != self.first:
            labels = "-".join([table.name, *(f"{axis}-{label}" for axis, label in table.group)])
            stem = f"{slug(labels).replace('-', '_')}_{stem}"
        png = save(figure, self.folder, stem)
        self.files += [png, png.with_suffix(".svg")]
        caption = " ".join(f"{text.title}. {text.note} {more}".split())
        svg = png.with_suffix(".svg").read_text(encoding="utf-8")
        return ReportFigure(stem, svg, caption, f"Chart of {text.title}: {listed(list(values))}.")


def _loss_subtitle(table: StudyComparison) -> str:
    losses = table.losses
    targets = int(losses.targets.sum())
    units = len(losses.units)
    seeds = seed_counts(table, "seed")
    return f"{table.title}: {targets:,} targets, {units} {losses.kind}s, {seeds} per scheme"


def _subtitle(table: ResultsTable) -> str:
    sizes = (("items", "item", " per length"), ("documents", "document", ""))
    parts = [
        counted(table.facts[key], noun) + per for key, noun, per in sizes if table.facts.get(key)
    ]
    return f"{table.title}: {', '.join(parts) or 'means over seeds'}"
