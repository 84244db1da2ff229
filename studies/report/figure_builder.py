"""The figures of a report with their captions and alternative texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.reports.figures import save
from studies.report.document import ReportFigure, listed, signed
from studies.report.figures import (
    DotEstimate,
    ReferenceLines,
    SeedSeries,
    barred,
    dots_figure,
    informative,
    joint_figure,
    panels_figure,
    styles_of,
)
from studies.report.render import slug
from studies.results.compare import StudyComparison, VariantSummary
from studies.results.stored import Group, StoredStudy


class FigureBuilder:
    """Draws figures into a directory and lists their files. A variant has the same colour and marker in all
    figures."""

    def __init__(self, study: StoredStudy, folder: Path):
        self.study, self.folder = study, folder
        self.files: list[Path] = []
        self.styles = styles_of([variant.name for variant in study.variants], study.baseline)
        self.first: tuple[str, Group] | None = None

    def by_length(self, comparison: StudyComparison) -> list[ReportFigure]:
        """NLL against length, all variants in one chart."""
        every = [self._series(line, comparison) for line in comparison.lines]
        l0, name = comparison.losses.trained_length, comparison.baseline
        base = comparison.line(name) if name else None
        levels = [(f"{name} truncated to {l0:,}", base.trained.estimate)] if base else []
        top, unigram = None, comparison.losses.unigram
        if unigram is not None and any(y > unigram.mean() for one in every for y in one.y):
            top = float(unigram.mean())
            levels.append((f"unigram model  {top:.2f}", top))
        series, notes = _legible(comparison, every, top)
        figure = joint_figure(
            series,
            ReferenceLines(l0, levels, top=top),
            "NLL by context length",
            self._subtitle(comparison),
            "NLL, nats per token",
            "\n".join(notes),
        )
        caption = ["NLL of the same targets with increasing context.", *notes]
        caption += [f"Dashed: {name} with its context truncated to the training length."] if base else []
        caption += (
            ["The axis ends at the unigram model; labels of clipped lines have their values."] if top else []
        )
        alt = _alt(
            "NLL against context length", (f"{s.label} {s.y[-1]:.2f} at {s.x[-1]:,.0f}" for s in series)
        )
        return self._add(comparison, "nll_by_length", figure, " ".join(caption), alt)

    def each_alone(self, comparison: StudyComparison) -> list[ReportFigure]:
        """The same with one panel per variant."""
        if len(comparison.lines) < 3:
            return []
        every = [self._series(line, comparison) for line in comparison.lines]
        top = None if comparison.losses.unigram is None else float(comparison.losses.unigram.mean())
        series, notes = _legible(comparison, every, top)
        dashed = "Dashed: the variant with its context truncated to the training length (dotted)."
        figure = panels_figure(
            series,
            ReferenceLines(comparison.losses.trained_length, top=top),
            "NLL by context length, one panel per variant",
            self._subtitle(comparison),
            "NLL, nats per token",
            "\n".join([f"{dashed} Grey: the others.", *notes[:1]]),
        )
        caption = [f"Each variant in colour on top of the others in grey. {dashed}", *notes]
        if any(one.shown for one in series):
            caption.append(
                "Strips: exposure in training of positions (upper row) and of distances to a "
                "visible key (lower "
                "row); darker is more (log scale), empty is none."
            )
        alt = _alt("NLL against context length, one panel each", (one.label for one in series))
        return self._add(comparison, "nll_by_length_each", figure, " ".join(caption), alt)

    def gain(self, comparison: StudyComparison) -> list[ReportFigure]:
        """Net gain over truncation against length."""
        l0, tolerance = comparison.losses.trained_length, comparison.tolerance
        series = []
        for line in comparison.lines:
            # All lines begin at the training length, where the gain as trained is 0.
            gains = [(one.length, one.gain) for one in line.measured if one.gain and one.length >= l0]
            if line.beyond:
                series.append(
                    SeedSeries(
                        line.variant.name,
                        [float(length) for length, _ in gains],
                        [gain.estimate for _, gain in gains],
                        [gain.low for _, gain in gains],
                        [gain.high for _, gain in gains],
                        *self.styles[line.variant.name],
                    )
                )
        levels = [("truncated to the training length", 0.0)]
        bars = f"\nBars: {100 * comparison.confidence:g}% intervals." if barred(series) else ""
        figure = joint_figure(
            series,
            ReferenceLines(l0, levels, band=tolerance, linear=tolerance),
            "Net gain over truncation",
            self._subtitle(comparison),
            "net gain, nats per token",
            f"Grey band: ±{tolerance:g} nats; the axis is linear inside and logarithmic outside.{bars}",
        )
        caption = (
            f"NLL with the context truncated to {l0:,} minus NLL with the full context, of the same variant. "
            "Positive: distant context helps."
        )
        alt = _alt("net gain against context length", (f"{one.label} {signed(one.y[-1])}" for one in series))
        return self._add(comparison, "net_gain", figure, caption, alt)

    def differences(self, comparison: StudyComparison) -> list[ReportFigure]:
        """Differences from the baseline with intervals, sorted, at up to three primary lengths."""
        panels, l0, chosen = [], comparison.losses.trained_length, comparison.primary
        if len(chosen) > 3:  # the table has all of them
            chosen = [n for n in dict.fromkeys((l0, chosen[len(chosen) // 2], chosen[-1])) if n in chosen]
        for length in chosen:
            found = [(one.variant, one.interval) for one in comparison.differences if one.length == length]
            dots = [
                DotEstimate(name, one.estimate, one.low, one.high, *self.styles[name])
                for name, one in sorted(found, key=lambda item: item[1].estimate)
            ]
            heading = f"at {length:,} tokens" + (", the training length" if length == l0 else "")
            panels += [(heading, dots)] if dots else []
        title = f"Difference from {comparison.baseline}"
        figure = dots_figure(
            panels,
            title,
            self._subtitle(comparison),
            f"NLL minus that of {comparison.baseline}, nats (negative is better)",
            f"Hollow: point estimate. Grey band: ±{comparison.tolerance:g} nats, where the axis is linear.",
            zero="0",
            band=comparison.tolerance,
            linear=comparison.tolerance,
        )
        caption = f"NLL minus that of {comparison.baseline} on the same targets, in ascending order"
        if any(dot.low == dot.low for _, dots in panels for dot in dots):
            caption += (
                f", with intervals over seeds and {comparison.losses.kind}s, simultaneous over "
                f"{comparison.difference_family} comparisons"
            )
        values = (
            f"{heading}: {', '.join(f'{d.label} {signed(d.value)}' for d in dots)}"
            for heading, dots in panels
        )
        return self._add(comparison, "difference", figure, f"{caption}.", _alt(f"{title}, nats", values))

    def learned(self, comparison: StudyComparison) -> list[ReportFigure]:
        """NLL at the training length, seed by seed, and of the unigram model: whether training succeeded."""
        first: dict[str, VariantSummary] = {}
        for line in comparison.lines:
            first.setdefault(line.variant.scheme, line)
        dots = [
            DotEstimate(
                scheme, line.trained.estimate, math.nan, math.nan, *style, list(line.trained_seeds.values())
            )
            for scheme, line in first.items()
            for style in [self.styles[line.variant.name]]
        ]
        dots.sort(key=lambda dot: dot.value)
        l0, unigram = comparison.losses.trained_length, comparison.losses.unigram
        level = "" if unigram is None else f"Unigram model on the same tokens: {unigram.mean():.3f}."
        figure = dots_figure(
            [(f"as trained, at {l0:,} tokens", dots)],
            "NLL at the training length",
            self._subtitle(comparison),
            "NLL, nats per token",
            f"Vertical strokes: single seeds. {level}".strip(),
        )
        caption = f"NLL at the training length: mean, and single seeds as strokes. {level}".strip()
        caption += " A scheme near the unigram model is undertrained." if level else ""
        alt = _alt("NLL at the training length", (f"{dot.label} {dot.value:.3f}" for dot in dots))
        return self._add(comparison, "learned", figure, caption, f"{alt} {level}".strip())

    def _exposure(self, scheme: str, group: Group) -> list[tuple[list[float], list[float]]]:
        """Exposure of a scheme in training, of positions and of distances: (tokens of context, share)."""
        for cell in self.study.cells:
            exposure = (cell.record.get("training") or {}).get("exposure")
            if exposure and (cell.scheme, cell.group) == (scheme, group):
                both = (exposure["positions"], exposure["distances"])
                return [(one["context"], one["share"]) for one in both if one["context"]]
        return []

    def _series(self, line: VariantSummary, comparison: StudyComparison) -> SeedSeries:
        """NLL with the interval of the change around each level: most of the spread of levels is common to
        all variants."""
        losses = comparison.losses
        levels, low, high = [], [], []
        for one in line.measured:
            half = one.delta.half if one.delta is not None and one.verdict else math.nan
            level = one.nll.estimate if one.nll is not None else math.nan
            levels.append(level)
            low.append(level - half)
            high.append(level + half)
        each = [
            [
                float(losses.nll[line.variant.name, one.length][seed].mean())
                if seed in one.seeds
                else math.nan
                for one in line.measured
            ]
            for seed in line.trained_seeds
        ]
        return SeedSeries(
            line.variant.name,
            [float(one.length) for one in line.measured],
            levels,
            low,
            high,
            *self.styles[line.variant.name],
            line.trained.estimate,
            each,
            self._exposure(line.variant.scheme, losses.group),
        )

    def _subtitle(self, comparison: StudyComparison) -> str:
        losses = comparison.losses
        where = "".join(f", {axis} {label}" for axis, label in losses.group)
        seeds = sorted({line.trained.seeds[0] for line in comparison.lines})
        several = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        return (
            f"{losses.name}{where}: {int(losses.targets.sum()):,} targets, "
            f"{len(losses.units)} {losses.kind}s, "
            f"{several} seed{'' if seeds[-1] == 1 else 's'} per scheme"
        )

    def _add(
        self, comparison: StudyComparison, stem: str, figure: Figure, caption: str, alt: str
    ) -> list[ReportFigure]:
        return [self.add(comparison.losses.name, comparison.losses.group, stem, figure, caption, alt)]

    def add(self, name: str, group: Group, stem: str, figure: Figure, caption: str, alt: str) -> ReportFigure:
        """Save a figure of an evaluation; figures of the first evaluation have no prefix."""
        self.first = self.first or (name, group)
        if (name, group) != self.first:
            stem = slug("-".join([name, *(f"{a}-{b}" for a, b in group)])).replace("-", "_") + f"_{stem}"
        png = save(figure, self.folder, stem)
        svg = png.with_suffix(".svg")
        self.files += [png, svg]
        return ReportFigure(stem, svg.read_text(encoding="utf-8"), caption, alt)


def _alt(subject: str, values: Iterable[str]) -> str:
    return f"Chart of {subject}: {listed(list(values))}."


def _legible(
    comparison: StudyComparison, every: list[SeedSeries], top: float | None
) -> tuple[list[SeedSeries], list[str]]:
    """The series without intervals that are too wide to draw, and notes about bars and thin lines."""
    series = informative(every, top)
    total, drawn = barred(every), barred(series)
    notes = ["Points without intervals."]
    if total:
        level = f"{100 * comparison.confidence:g}%"
        notes = [f"Bars: {level} simultaneous intervals of the change from the training length."]
    if any(len(one.each) > 1 for one in every):
        notes[0] += " Thin: single seeds."
    if total > drawn:
        notes.append(f"{total - drawn} of {total} bars are not drawn: wider than the range of the points.")
    return series, notes
