"""Sections of a report about what was measured beside the loss by length."""

from __future__ import annotations

import math

from studies.document import Bullets, Cell, Picture, Section, Table, counted, listed
from studies.drawings import Draughtsman
from studies.figures import Marks, Series, joint_figure
from studies.maps import heat_figure, measures_figure
from studies.others import ATTENTION, BY_POSITION, GENERATION, TASKS, Other
from studies.stored import CONFIDENCE

SHOWN = {  # measures of attention that are drawn, and their headings
    "entropy_relative": "entropy / ln(visible keys)",
    "first_token": "mass on the first token",
    "mass_beyond": "mass past trained length",
    "logit_std": "spread of logits (sd)",
    "logit_max": "largest logit",
    "reach_90": "90% of mass within, tokens",
}
WITHOUT_CLAIMS = "Means over seeds, without intervals and without claims."


def section(found: Other, draw: Draughtsman) -> Section:
    """Everything about one evaluation."""
    where = "".join(f", {axis} {label}" for axis, label in found.group)
    titles = {
        TASKS: f"Task: {found.facts.get('task', found.name)}",
        ATTENTION: "Attention beyond the trained length",
        GENERATION: "Text generated past the trained length",
        BY_POSITION: "NLL by position",
    }
    out = Section(f"{titles[found.protocol]} ({found.name}{where})")
    if found.protocol == TASKS and found.accuracy:
        out.blocks += [Bullets(_task_words(found)), _accuracy(found, draw), _accuracies(found)]
        out.blocks += _maps(found, draw)
    elif found.protocol == ATTENTION and found.means:
        out.blocks += [WITHOUT_CLAIMS, _measures(found, draw), _attention(found)]
    elif found.protocol == GENERATION and found.means:
        out.blocks += [WITHOUT_CLAIMS, _generated(found)]
    elif found.protocol == BY_POSITION and found.means:
        out.blocks += [WITHOUT_CLAIMS, _by_position(found, draw)]
    return out


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _ends(low: float, high: float) -> str:
    return "" if math.isnan(low) else f" [{_percent(max(low, 0.0))}, {_percent(min(high, 1.0))}]"


def _task_words(found: Other) -> list[tuple[str, str]]:
    """One sentence a variant: where it is right, and up to where that is surely more than chance."""
    chance, out = found.facts["chance"], []
    for variant in found.variants:
        rows = [found.accuracy[variant, n] for n in found.lengths if (variant, n) in found.accuracy]
        if not rows:
            continue
        told = [
            f"{_percent(one.share.estimate)}{_ends(one.share.low, one.share.high)} at {one.length:,}"
            for one in dict.fromkeys((rows[0], rows[-1]))
        ]
        text = f"right in {listed(told)}"
        if all(math.isnan(one.share.low) for one in rows):
            text += " (points, no claim)"
        else:
            above = []
            for one in rows:
                if one.word(chance) != "above chance":
                    break
                above.append(one.length)
            text += f"; surely above chance up to {above[-1]:,}" if above else "; nowhere shown above chance"
        out.append((variant, text + "."))
    return out


def _accuracy(found: Other, draw: Draughtsman) -> Picture:
    chance, l0 = found.facts["chance"], found.trained_length
    series = []
    for variant in found.variants:
        rows = [found.accuracy[variant, n] for n in found.lengths if (variant, n) in found.accuracy]
        if rows:
            series.append(
                Series(
                    variant,
                    [float(one.length) for one in rows],
                    [100 * one.share.estimate for one in rows],
                    [
                        100 * max(one.share.low, 0.0) if one.share.low == one.share.low else math.nan
                        for one in rows
                    ],
                    [
                        100 * min(one.share.high, 1.0) if one.share.low == one.share.low else math.nan
                        for one in rows
                    ],
                    *draw.look[variant],
                )
            )
    title = f"{str(found.facts.get('task', found.name)).capitalize()}: right answers by length"
    figure = joint_figure(
        series,
        Marks(l0, [(f"chance  {100 * chance:.0f}", 100 * chance)], ceiling=100),
        title,
        _subtitle(found),
        "right answers, %",
        f"Bars: {100 * CONFIDENCE:g}% intervals, simultaneous over {found.family} cells.",
    )
    ends = "; ".join(f"{one.label} {one.y[-1]:.0f}% at {one.x[-1]:,.0f}" for one in series)
    caption = (
        "Share of items whose right answer is the likeliest candidate, mean over seeds. Bars are over "
        "seeds and "
        f"{found.facts.get('unit', 'unit')}s and hold at once for all {found.family} cells."
    )
    alt = (
        f"Line chart of right answers against length. Ends of the lines: {ends}. Chance is "
        f"{_percent(chance)}."
    )
    return draw.keep(found.name, found.group, "accuracy", figure, caption, alt)


def _subtitle(found: Other) -> str:
    parts = []
    if found.facts.get("items"):
        parts.append(counted(found.facts["items"], "item") + " a length")
    if found.facts.get("documents"):
        parts.append(counted(found.facts["documents"], "document"))
    where = "".join(f", {axis} {label}" for axis, label in found.group)
    return f"{found.name}{where}: {', '.join(parts) or 'means over seeds'}"


def _accuracies(found: Other) -> Table:
    chance, rows = found.facts["chance"], []
    for variant in found.variants:
        row: list[Cell | str] = [variant]
        for length in found.lengths:
            one = found.accuracy.get((variant, length))
            if one is None:
                row.append(Cell("—", "faint"))
                continue
            text = f"{_percent(one.share.estimate)}{_ends(one.share.low, one.share.high)}"
            row.append(Cell(text, "held" if one.word(chance) == "above chance" else ""))
        rows.append(row)
    exact = [
        f"{variant} {_percent(found.accuracy[variant, found.lengths[0]].exact)}"
        for variant in found.variants
        if (variant, found.lengths[0]) in found.accuracy
    ]
    return Table(
        "Right answers by length",
        ["scheme", *(f"{n:,}" for n in found.lengths)],
        rows,
        f"Chance is {_percent(chance)}; shaded: surely above it. Written exactly at {found.lengths[0]:,}: "
        f"{', '.join(exact)}.",
    )


def _maps(found: Other, draw: Draughtsman) -> list[Picture]:
    if not found.depth:
        return []
    maps = [
        (name, draw.look[name][0], {(d, n): v for (of, n, d), v in found.depth.items() if of == name})
        for name in found.variants
    ]
    maps = [one for one in maps if one[2]]
    figure = heat_figure(
        maps,
        "Where the answer stood",
        _subtitle(found),
        "Percent of right answers by length (across) and depth of the answer (down), means over seeds.",
    )
    caption = (
        "Percent of right answers by length and by how deep in the text the answer stood: 0 is its "
        "beginning, 1 "
        "its end, next to the question."
    )
    worst = [
        f"{name} {_percent(min(cells.values()))} to {_percent(max(cells.values()))}"
        for name, _, cells in maps
    ]
    alt = f"Heat maps of right answers by length and depth. From worst to best cell: {'; '.join(worst)}."
    return [draw.keep(found.name, found.group, "depth", figure, caption, alt)]


def _measures(found: Other, draw: Draughtsman) -> Picture:
    panels = []
    for measure, heading in SHOWN.items():
        series = []
        for variant in found.variants:
            points = [
                (n, found.means[variant, n, measure])
                for n in found.lengths
                if (variant, n, measure) in found.means
            ]
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(variant, [float(n) for n in x], y, (), (), *draw.look[variant]))
        panels += [(heading, series)] if series else []
    figure = measures_figure(
        panels,
        found.trained_length,
        "What attention does beyond the trained length",
        _subtitle(found),
        "Means over layers, heads, queries and seeds. Dotted: the trained length.",
    )
    caption = f"Attention against context length, means over layers, heads and seeds. {WITHOUT_CLAIMS}"
    alt = f"Small line charts against context length: {listed([heading for heading, _ in panels])}."
    return draw.keep(found.name, found.group, "attention", figure, caption, alt)


def _attention(found: Other) -> Table:
    l0, longest = found.trained_length, found.lengths[-1]
    rows = []
    for variant in found.variants:
        row: list[Cell | str] = [variant]
        for measure in SHOWN:
            ends = [found.means.get((variant, n, measure)) for n in (l0, longest)]
            row.append(" → ".join("—" if v is None else f"{v:.3g}" for v in ends))
        rows.append(row)
    return Table(
        f"Attention at {l0:,} → {longest:,} tokens", ["scheme", *SHOWN.values()], rows, WITHOUT_CLAIMS
    )


def _generated(found: Other) -> Table:
    rows = []
    for variant in found.variants:
        places = [key[1] for key in found.means if key[0] == variant and key[2] == "nll"]
        for source in dict.fromkeys(place[0] for place in places):
            own = sorted(place for place in places if place[0] == source)
            row: list[Cell | str] = [variant, source]
            for measure in ("repeated_4", "nll"):
                ends = [found.means.get((variant, place, measure)) for place in (own[0], own[-1])]
                write = _percent if measure == "repeated_4" else "{:.2f}".format
                row.append(" → ".join("—" if v is None else write(v) for v in ends))
            row.append(f"{own[0][1]:,}–{own[0][2]:,} → {own[-1][1]:,}–{own[-1][2]:,}")
            rows.append(row)
    columns = ["scheme", "text", "4-grams repeated", "NLL under the model", "positions"]
    note = f"First stretch of positions → last. Real text: what its documents go on with. {WITHOUT_CLAIMS}"
    return Table("Repetition and self-NLL by position", columns, rows, note, numbers=2)


def _by_position(found: Other, draw: Draughtsman) -> Picture:
    longest = max(key[1][1] for key in found.means)
    series = []
    for variant in found.variants:
        own = sorted(
            (key[1], value) for key, value in found.means.items() if key[0] == variant and key[2] == "nll"
        )
        # Position p sees p + 1 tokens; a bucket is drawn at its geometric centre in tokens seen.
        x = [math.sqrt((low + 1) * high) for (low, high), _ in own]
        series.append(Series(variant, x, [value for _, value in own], (), (), *draw.look[variant]))
    figure = joint_figure(
        series,
        Marks(found.trained_length, ticks=[float(2**k) for k in range(0, longest.bit_length(), 2)]),
        f"NLL by position in a window of {longest:,} tokens",
        _subtitle(found),
        "NLL, nats per token",
        f"Factors for {longest:,}; other tokens at each position. Means over seeds.",
        x="tokens seen (log scale)",
    )
    caption = (
        f"NLL by position in windows of {longest:,} tokens. Each position scores other tokens, and "
        "rules that follow "
        f"the length take {longest:,}: not to be read beside the curves of fixed targets. {WITHOUT_CLAIMS}"
    )
    ends = "; ".join(f"{one.label} {one.y[-1]:.2f}" for one in series)
    alt = f"Line chart of NLL by position. At the last positions: {ends}."
    return draw.keep(found.name, found.group, "by_position", figure, caption, alt)
