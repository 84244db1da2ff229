"""Which figures a report has, and the words around them."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.figures import save
from studies.compare import Comparison, Line
from studies.document import Picture, listed, signed
from studies.figures import Dot, Marks, Series, dots_figure, joint_figure, look, panels_figure
from studies.html import slug
from studies.stored import Group, Study


class Draughtsman:
    """Draws into a folder and keeps the list of files. A scheme has one colour and marker in all figures."""

    def __init__(self, study: Study, folder: Path):
        self.study, self.folder = study, folder
        self.files: list[Path] = []
        self.look = look([variant.name for variant in study.variants], study.baseline)
        self.first: tuple[str, Group] | None = None

    def by_length(self, comparison: Comparison) -> list[Picture]:
        """NLL against length, all variants in one picture."""
        series = [self._series(line, comparison.losses.group) for line in comparison.lines]
        l0, name = comparison.losses.trained_length, comparison.baseline
        base = comparison.line(name) if name else None
        levels = [(f"{name} cut to {l0:,}", base.trained.estimate)] if base else []
        top = None
        if comparison.losses.unigram is not None:
            unigram = float(comparison.losses.unigram.mean())
            if any(y > unigram for one in series for y in one.y):
                top = unigram
                levels.append((f"unigram model  {unigram:.2f}", unigram))
        figure = joint_figure(
            series,
            Marks(l0, levels, top=top),
            "NLL against context length",
            self._subtitle(comparison),
            "NLL, nats per token",
            self._bars(comparison),
        )
        caption = (
            "NLL of the same targets with more and more context, one line a scheme. "
            f"{self._bars(comparison)} Dashed: "
            f"{name} with its context cut to the trained length."
        )
        if top is not None:
            caption += (
                " The axis ends at the unigram model: a line that leaves it is told by the number at its end."
            )
        ends = [f"{one.label} {one.y[-1]:.2f} at {one.x[-1]:,.0f}" for one in series]
        alt = f"Line chart of NLL against context length. Ends of the lines: {'; '.join(ends)}."
        return [self._keep(comparison, "nll_by_length", figure, caption, alt)]

    def each_alone(self, comparison: Comparison) -> list[Picture]:
        """The same, each variant before all others in grey."""
        if len(comparison.lines) < 3:
            return []
        series = [self._series(line, comparison.losses.group) for line in comparison.lines]
        top = None if comparison.losses.unigram is None else float(comparison.losses.unigram.mean())
        figure = panels_figure(
            series,
            Marks(comparison.losses.trained_length, top=top),
            "Each scheme against all others",
            self._subtitle(comparison),
            "NLL, nats per token",
            "Dashed: its own context cut to the trained length (dotted line). Grey: the other schemes.",
        )
        caption = (
            "Each scheme in colour before the others in grey, all on one scale. Dashed: its own "
            "truncation baseline."
        )
        if any(one.shown for one in series):
            caption += (
                " The strips below are what training has shown: positions in the upper row, distances "
                "to a visible "
                "key in the lower; darker is oftener (log scale), empty is never."
            )
        alt = f"Small line charts of NLL against context length for {listed([one.label for one in series])}."
        return [self._keep(comparison, "nll_by_length_each", figure, caption, alt)]

    def gain(self, comparison: Comparison) -> list[Picture]:
        """Net gain over truncation against length."""
        l0 = comparison.losses.trained_length
        series = []
        for line in comparison.lines:
            readings = [one for one in line.beyond if one.gain is not None]
            if not readings:
                continue
            colour, marker = self.look[line.variant.name]
            gains = [one.gain for one in readings if one.gain is not None]
            series.append(
                Series(
                    line.variant.name,
                    [float(l0), *(float(one.length) for one in readings)],
                    [0.0 if line.variant.rule == "trained" else math.nan, *(g.estimate for g in gains)],
                    [math.nan, *(g.low for g in gains)],
                    [math.nan, *(g.high for g in gains)],
                    colour,
                    marker,
                )
            )
        tolerance = comparison.tolerance
        marks = Marks(l0, [("cut to the trained length", 0.0)], band=tolerance, linear=tolerance)
        figure = joint_figure(
            series,
            marks,
            "Net gain over truncation",
            self._subtitle(comparison),
            "nats gained (up) or lost (down)",
            f"Grey band: ±{tolerance:g} nats; the axis is linear there and logarithmic outside. Bars: "
            f"{100 * comparison.confidence:g}% intervals.",
        )
        caption = (
            f"NLL with the context cut to {l0:,} less NLL with the whole context, each scheme against "
            "itself. Above zero "
            "the far context helps, below it harms."
        )
        ends = [f"{one.label} {signed(one.y[-1])}" for one in series]
        alt = (
            "Line chart of the net gain over truncation against context length. At the ends: "
            f"{'; '.join(ends)}."
        )
        return [self._keep(comparison, "net_gain", figure, caption, alt)]

    def differences(self, comparison: Comparison) -> list[Picture]:
        """Dots and intervals of the difference from the baseline, sorted, at the primary lengths."""
        panels = []
        l0 = comparison.losses.trained_length
        chosen = comparison.primary
        if len(chosen) > 3:  # the figure stays readable; the table has all
            chosen = [n for n in dict.fromkeys((l0, chosen[len(chosen) // 2], chosen[-1])) if n in chosen]
        for length in chosen:
            found = sorted(
                (one for one in comparison.differences if one.length == length),
                key=lambda one: one.interval.estimate,
            )
            dots = [
                Dot(
                    one.variant,
                    one.interval.estimate,
                    one.interval.low,
                    one.interval.high,
                    *self.look[one.variant],
                )
                for one in found
            ]
            heading = f"at {length:,} tokens" + (", the trained length" if length == l0 else "")
            panels += [(heading, dots)] if dots else []
        figure = dots_figure(
            panels,
            f"Difference from {comparison.baseline}",
            self._subtitle(comparison),
            f"NLL less that of {comparison.baseline}, nats: better to the left, worse to the right",
            f"Hollow: a point without a claim. Grey band: ±{comparison.tolerance:g} nats, where the "
            "axis is linear.",
            zero="0",
            band=comparison.tolerance,
            linear=comparison.tolerance,
        )
        caption = (
            f"NLL less that of {comparison.baseline} on the same targets, best first, with intervals "
            "over seeds and "
            f"{comparison.losses.kind}s that hold at once for all {comparison.difference_family} comparisons."
        )
        ends = [
            f"{heading}: " + ", ".join(f"{d.label} {signed(d.value)}" for d in dots)
            for heading, dots in panels
        ]
        alt = f"Dot plot of differences from {comparison.baseline} in nats. {'; '.join(ends)}."
        return [self._keep(comparison, "difference", figure, caption, alt)]

    def learned(self, comparison: Comparison) -> list[Picture]:
        """NLL at the trained length, seed by seed, beside the unigram model: whether the training worked."""
        dots, done = [], set()
        for line in comparison.lines:
            if line.variant.scheme in done:
                continue
            done.add(line.variant.scheme)
            colour, marker = self.look[line.variant.name]
            values = list(line.trained_seeds.values())
            at = line.trained.estimate
            dots.append(Dot(line.variant.scheme, at, math.nan, math.nan, colour, marker, values))
        dots.sort(key=lambda dot: dot.value)
        l0, unigram = comparison.losses.trained_length, comparison.losses.unigram
        beside = "" if unigram is None else f"A unigram model has {unigram.mean():.3f} on the same tokens."
        figure = dots_figure(
            [(f"as trained, at {l0:,} tokens", dots)],
            "Did every scheme learn?",
            self._subtitle(comparison),
            "NLL, nats per token",
            f"Strokes: single seeds. {beside}".strip(),
        )
        caption = f"NLL at the trained length: the mean, and as strokes each training seed. {beside}".strip()
        if beside:
            caption += " It knows only how often each token occurs: a scheme near it has learned nothing."
        told = [f"{dot.label} {dot.value:.3f}" for dot in dots]
        alt = f"Dot plot of NLL at the trained length. {'; '.join(told)}. {beside}".strip()
        return [self._keep(comparison, "learned", figure, caption, alt)]

    def _shown(self, scheme: str, group: Group) -> list[tuple[list[float], list[float]]]:
        """Positions and distances that training has shown to a scheme: (tokens of context, share) of each."""
        for cell in self.study.cells:
            exposure = (cell.record.get("training") or {}).get("exposure")
            if exposure and (cell.scheme, cell.group) == (scheme, group):
                both = (exposure["positions"], exposure["distances"])
                return [(one["context"], one["share"]) for one in both if one["context"]]
        return []

    def _series(self, line: Line, group: Group) -> Series:
        """The change's own interval around each level: levels of two schemes share most of their spread."""
        colour, marker = self.look[line.variant.name]
        readings = line.measured
        low, high = [], []
        for one in readings:
            half = one.delta.half if one.delta is not None and one.word else math.nan
            level = one.nll.estimate if one.nll is not None else math.nan
            low.append(level - half)
            high.append(level + half)
        return Series(
            line.variant.name,
            [float(one.length) for one in readings],
            [one.nll.estimate for one in readings if one.nll is not None],
            low,
            high,
            colour,
            marker,
            line.trained.estimate,
            self._shown(line.variant.scheme, group),
        )

    def _subtitle(self, comparison: Comparison) -> str:
        losses = comparison.losses
        where = "".join(f", {axis} {label}" for axis, label in losses.group)
        seeds = sorted({line.trained.seeds[0] for line in comparison.lines})
        several = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        return (
            f"{losses.name}{where}: {int(losses.targets.sum()):,} targets, {len(losses.units)} "
            f"{losses.kind}s, "
            f"{several} seed{'' if seeds[-1] == 1 else 's'} a scheme"
        )

    def _bars(self, comparison: Comparison) -> str:
        if not any(line.claims for line in comparison.lines):
            return "Points without intervals."
        return (
            f"Bars: {100 * comparison.confidence:g}% simultaneous intervals of the change against "
            "the trained length."
        )

    def _keep(self, comparison: Comparison, name: str, figure: Figure, caption: str, alt: str) -> Picture:
        return self.keep(comparison.losses.name, comparison.losses.group, name, figure, caption, alt)

    def keep(self, name: str, group: Group, stem: str, figure: Figure, caption: str, alt: str) -> Picture:
        """Save a figure of an evaluation; those of the first one have plain names."""
        self.first = self.first or (name, group)
        if (name, group) != self.first:
            stem = slug("-".join([name, *(f"{a}-{b}" for a, b in group)])).replace("-", "_") + f"_{stem}"
        png = save(figure, self.folder, stem)
        svg = png.with_suffix(".svg")
        self.files += [png, svg]
        return Picture(stem, svg.read_text(encoding="utf-8"), caption, alt)
