"""The figures of a report, drawn from the results table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.reports.charts import Curve, FigureText, Panel, save
from evaluation.reports.document import ReportFigure, slug
from evaluation.reports.length_charts import TOKENS, ReferenceLines, length_chart
from evaluation.reports.measure_charts import MeasureAxes, measures_figure
from evaluation.reports.text import counted, plain, signed
from studies.report.notes import note, seed_counts
from studies.report.plots import (
    WIDTH,
    DotEstimate,
    dots_figure,
    has_bars,
    styles_of,
)
from studies.results.loss_comparison import LossComparison
from studies.results.stored import CONFIDENCE, Group, StoredStudy
from studies.results.table import ResultsTable, StudyResult

NLL = "NLL, nats per token"
BY_LENGTH = "NLL by context length"
ATTENTION_MEASURES = {  # and their headings
    "entropy_relative": "entropy / ln(visible keys)",
    "first_token": "mass on the first token",
    "mass_beyond": "mass beyond trained length",
    "logit_std": "standard deviation of logits",
    "logit_max": "largest logit",
    "reach_90": "90% of mass within, tokens",
}


class StudyFigures:
    """Draws figures into a directory and lists their files. A variant has the same color and marker
    in all figures."""

    def __init__(self, study: StoredStudy, folder: Path):
        self.folder = folder
        self.files: list[Path] = []
        self.styles = styles_of([variant.name for variant in study.variants], study.baseline)
        self.first: tuple[str, Group] | None = None

    def by_length(self, table: LossComparison) -> ReportFigure:
        """NLL against length, all variants in one chart."""
        l0 = table.trained_length
        curves = self._levels(table)
        unigram = table.losses.unigram
        levels = []
        top = None
        text = note("same_targets")
        if table.baseline is not None:
            truncated = table.value(table.baseline, "nll_as_trained", l0) or 0.0
            levels.append((f"{table.baseline} truncated to {l0:,}", truncated))
        if unigram is not None and any(max(curve.y) > unigram for curve in curves):
            top = unigram
            levels.append((f"unigram model  {unigram:.2f}", unigram))
            text += note("clipped")
        return self._chart(
            table,
            "nll_by_length",
            curves,
            ReferenceLines(l0, levels, top=top),
            FigureText(BY_LENGTH, _loss_subtitle(table), self._thin(table)),
            NLL,
            text,
            seeds=[line for name in table.names for line in self._seeds(table, name)],
        )

    def gain(self, table: LossComparison) -> ReportFigure:
        """Net gain over truncation against length."""
        l0 = table.trained_length
        curves = []
        for name in filter(table.beyond, table.names):
            # All lines begin at the trained length, where the gain as trained is 0.
            rows = [row for row in table.select("gain", name) if row.length >= l0]
            curves.append(self._curve(name, rows))
        below = note("net_gain_axis", table)
        if has_bars(curves):
            below += f"\nBars: {100 * table.confidence:g}% intervals."
        return self._chart(
            table,
            "net_gain",
            curves,
            ReferenceLines(l0, [("truncated to the trained length", 0.0)], band=table.tolerance),
            FigureText("Net gain over truncation", _loss_subtitle(table), below),
            "net gain, nats per token",
            note("net_gain", table),
            number=signed,
        )

    def differences(self, table: LossComparison) -> ReportFigure:
        """Differences from the baseline with intervals, sorted, at up to three primary lengths."""
        l0 = table.trained_length
        lengths = table.primary
        if len(lengths) > 3:  # the table has all of them
            kept = {l0, lengths[len(lengths) // 2], lengths[-1]}
            lengths = [n for n in lengths if n in kept]
        panels = {}
        for length in lengths:
            rows = [row for row in table.select("difference") if row.length == length]
            rows.sort(key=lambda row: row.value)
            heading = f"at {length:,} tokens" + (", the trained length" if length == l0 else "")
            if rows:
                panels[heading] = [self._dot(row.variant, row) for row in rows]
        title = f"Difference from {table.baseline}"
        text = FigureText(
            title,
            _loss_subtitle(table),
            note("difference_axis", table),
        )
        x = f"NLL minus that of {table.baseline}, nats (negative is better)"
        figure = dots_figure(panels, text, x, table.tolerance)
        is_interval = any(dot.has_interval for dots in panels.values() for dot in dots)
        more = note("simultaneous", table) if is_interval else ""
        return self._add(table, "difference", figure, text, more)

    def accuracy(self, table: ResultsTable) -> ReportFigure:
        """Accuracy of a task against length."""
        chance = 100 * table.facts["chance"]
        task = str(table.facts.get("task", table.name))
        curves = []
        for name in table.names:
            if rows := table.select("accuracy", name):
                curve = self._curve(name, rows)
                y = [100 * share for share in curve.y]
                low = [100 * max(share, 0.0) for share in curve.low]
                high = [100 * min(share, 1.0) for share in curve.high]
                curves.append(replace(curve, y=y, low=low, high=high))
        below = ""
        if has_bars(curves):
            family = table.select("accuracy")[0].interval.family
            below = f"Bars: {100 * CONFIDENCE:g}% intervals, simultaneous over {family} cells."
        return self._chart(
            table,
            "accuracy",
            curves,
            ReferenceLines(table.trained_length, [(f"chance  {chance:.0f}", chance)], ceiling=100),
            FigureText(f"{task.capitalize()}: accuracy by length", _subtitle(table), below),
            "accuracy, %",
            note("accuracy"),
        )

    def attention(self, table: ResultsTable) -> ReportFigure:
        """Measures of attention against length, one panel each."""
        panels = []
        for measure, heading in ATTENTION_MEASURES.items():
            curves = []
            for name in table.names:
                if rows := table.select(measure, name):
                    curves.append(self._curve(name, rows))
            if curves:
                panels.append(Panel(curves, heading))
        lengths = sorted({row.length for row in table.rows.values()})
        text = FigureText(
            "Attention by context length",
            _subtitle(table),
            note("attention"),
        )
        figure = measures_figure(
            panels,
            text,
            MeasureAxes(TOKENS, table.trained_length, lengths),
        )
        return self._add(table, "attention", figure, text)

    def by_position(self, table: ResultsTable) -> ReportFigure:
        """NLL by position within long windows."""
        curves = []
        for name in table.names:
            rows = table.select("nll_at_positions", name, where=None)
            rows.sort(key=lambda row: row.where)
            # Position p sees p + 1 tokens; a bucket is drawn at its geometric mean of tokens seen.
            seen = [math.sqrt((row.where[0] + 1) * row.where[1]) for row in rows]
            curves.append(self._curve(name, rows, seen))
        longest = max(row.where[1] for row in table.select("nll_at_positions", where=None))
        ticks = [float(2**k) for k in range(0, longest.bit_length(), 2)]
        title = f"NLL by position in a window of {longest:,} tokens"
        return self._chart(
            table,
            "by_position",
            curves,
            ReferenceLines(table.trained_length, ticks=ticks),
            FigureText(title, _subtitle(table), note("position_axis", longest=longest)),
            NLL,
            note("position", longest=longest),
            x="tokens seen (log scale)",
        )

    def _curve(
        self, name: str, rows: Sequence[StudyResult], x: Sequence[float] | None = None
    ) -> Curve:
        """Results of a variant as a line in its style, by default against length."""
        color, marker = self.styles[name]
        return Curve(
            name,
            x=x or [float(row.length) for row in rows],
            y=[row.value for row in rows],
            low=[row.low for row in rows],
            high=[row.high for row in rows],
            color=color,
            width=1.6,
            marker=marker,
            order=4,
        )

    def _levels(self, table: LossComparison) -> list[Curve]:
        """NLL of all variants, without intervals: most of the spread is common to all of them."""
        curves = [self._curve(name, table.measured(name)) for name in table.names]
        return [replace(curve, low=(), high=()) for curve in curves if len(curve.x)]

    def _seeds(self, table: LossComparison, name: str) -> list[Curve]:
        """NLL of each seed as a thin line; none for a single seed."""
        if table.seed_count(name) < 2:
            return []
        by_seed = {}
        for row in table.select("nll", name, seed=None):
            by_seed.setdefault(row.seed, []).append(row)
        by_seed.pop("", None)
        curves = [self._curve(name, rows) for rows in by_seed.values()]
        return [replace(curve, label="", marker="", width=0.6, order=2.5) for curve in curves]

    def _thin(self, table: LossComparison) -> str:
        has_seeds = any(table.seed_count(name) > 1 for name in table.names)
        return "Thin: single seeds." if has_seeds else ""

    def _dot(self, name: str, row: StudyResult) -> DotEstimate:
        color, marker = self.styles[name]
        return DotEstimate(name, row.value, row.low, row.high, color, marker)

    def _chart(
        self,
        table: ResultsTable,
        stem: str,
        curves: list[Curve],
        marks: ReferenceLines,
        text: FigureText,
        y: str,
        more: str = "",
        x: str = TOKENS,
        seeds: Sequence[Curve] = (),
        number: Callable[[float, int], str] = plain,
    ) -> ReportFigure:
        """One chart of lines. `number`: prints a value with so many digits."""
        figure = length_chart(
            curves,
            marks,
            text,
            y,
            seeds=seeds,
            x=x,
            width=WIDTH,
            number=number,
        )
        return self._add(table, stem, figure, text, more)

    def _add(
        self, table: ResultsTable, stem: str, figure: Figure, text: FigureText, more: str = ""
    ) -> ReportFigure:
        """Save a figure; those of the first evaluation have no prefix. The caption is its title and
        note with `more`."""
        self.first = self.first or (table.name, table.group)
        if (table.name, table.group) != self.first:
            labels = "-".join([table.name, *(f"{axis}-{label}" for axis, label in table.group)])
            stem = f"{slug(labels).replace('-', '_')}_{stem}"
        png = save(figure, self.folder, stem)
        self.files += [png, png.with_suffix(".svg")]
        caption = " ".join(f"{text.title}. {text.note} {more}".split())
        alt = f"Chart of {text.title}, {text.subtitle}. results.csv has its numbers."
        return ReportFigure(png, caption, alt)


def _loss_subtitle(table: LossComparison) -> str:
    losses = table.losses
    targets = int(losses.targets.sum())
    units = counted(len(losses.units), losses.kind)
    return f"{table.title}: {targets:,} targets, {units}, {seed_counts(table, 'seed')} per scheme"


def _subtitle(table: ResultsTable) -> str:
    if items := table.facts.get("items"):
        return f"{table.title}: {counted(items, 'item')} per length"
    if documents := table.facts.get("documents"):
        return f"{table.title}: {counted(documents, 'document')}"
    return f"{table.title}: means over seeds"
