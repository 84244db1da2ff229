"""What a study found, in sentences: which scheme held to which length, by how much, how sure."""

from __future__ import annotations

import math

from evaluation.seeds import CLAIM_SEEDS
from evaluation.statistics import FEW_BELOW, POINTS_ONLY_BELOW
from studies.compare import Comparison, Difference, Line, Reading, precise
from studies.document import counted, listed, plain, signed, with_ends
from studies.stored import Study


def lead(comparison: Comparison) -> list[str]:
    """The first lines of a report about one evaluation."""
    lines = [_headline(comparison), _learned_nothing(comparison)]
    lines += [_beats_truncation(comparison), *_against_baseline(comparison)]
    lines += [_rounding(comparison), _points(comparison), _basis(comparison)]
    return [line for line in lines if line]


def _headline(comparison: Comparison) -> str:
    losses = comparison.losses
    l0, longest = losses.trained_length, losses.lengths[-1]
    where = f"Trained at {l0:,} tokens and read up to {longest:,} ({_times(longest, l0)} as long)"
    claims = [line for line in comparison.lines if line.claims]
    if longest <= l0:
        return f"Only lengths up to the trained one, {l0:,} tokens, were measured."
    if not claims:
        found = [(line.at(longest), line.variant.name) for line in comparison.lines]
        told = [f"{name} {_change(one)}" for one, name in found if one is not None]
        points = f" At {longest:,} against its own {l0:,}: {listed(told)} nats." if told else ""
        why = f"for want of training seeds or of {losses.kind}s"
        return f"{where}: no verdicts, {why}; the numbers are points.{points}"
    parts = []
    whole = [line for line in claims if line.held_to == longest]
    if whole:
        parts.append(f"{_names(whole)} held to {longest:,}, the longest length measured")
    for length in sorted({line.held_to for line in claims if line.held_to} - {longest}, reverse=True):
        parts.append(f"{_names([line for line in claims if line.held_to == length])} held to {length:,}")
    rest = [line for line in claims if line.held_to is None]
    for length in sorted({line.break_point for line in rest if line.break_point}):
        parts.append(f"{_names([line for line in rest if line.break_point == length])} broke by {length:,}")
    open_ = [line for line in rest if line.break_point is None]
    if open_:
        parts.append(f"{_names(open_)} neither held nor broke beyond doubt at any longer length")
    return f"{where}: {'; '.join(parts)}."


def _learned_nothing(comparison: Comparison) -> str:
    """Who is no better than word counts cannot break, and its verdict says nothing."""
    unigram, l0 = comparison.losses.unigram, comparison.losses.trained_length
    if unigram is None:
        return ""
    level = float(unigram.mean())
    found = [line for line in comparison.lines if line.trained.estimate >= level]
    if not found:
        return ""
    return (
        f"Beware: {_names(found)}, as trained at {l0:,}, predicted no better than a unigram model "
        f"({plain(level)} nats): what has learned nothing has nothing to lose, and its verdicts say nothing."
    )


def sentence(line: Line, comparison: Comparison) -> str:
    """What became of one variant."""
    l0, longest = comparison.losses.trained_length, comparison.losses.lengths[-1]
    beyond = line.beyond
    if not beyond:
        why = {one.failure for one in line.readings if one.failure and one.length > l0}
        reasons = listed(sorted(why)) or "no longer length was asked for"
        return f"nothing beyond {l0:,} was measured ({reasons})."
    last = beyond[-1]
    if last.word == "points only":
        text = f"{signed(_estimate(last))} nats at {last.length:,} against its own {l0:,} (a point, no claim)"
    elif line.held_to == last.length:
        worst = max(one.upper for one in beyond)
        bound = f"at most {math.ceil(worst * 1000) / 1000:.3f} nats worse" if worst > 0 else "no worse"
        text = f"held to {last.length:,} (surely {bound} than as trained at {l0:,}, at any length)"
    else:
        text = f"held to {line.held_to:,}" if line.held_to else f"not shown to hold beyond {l0:,}"
        first = next((one for one in beyond if one.length == line.break_point), None)
        if first is None:
            text += f", nowhere shown broken, {last.word} at {last.length:,} ({_delta(last)} nats)"
        else:
            text += f", broken at {first.length:,} ({_delta(first)} nats)"
            if first.length != last.length:
                text += f"; {last.word} at {last.length:,} ({_delta(last)})"
    text = f"{text}.{_gain(last, l0)}"
    if last.length < longest:
        missing = next(one for one in line.readings if one.length > last.length)
        text += f" From {missing.length:,} on it was not measured: {missing.failure}."
    return text


def _gain(reading: Reading, l0: int) -> str:
    gain = reading.gain
    if gain is None or math.isnan(gain.low):
        return ""
    if gain.low > 0:
        return (
            f" At {reading.length:,} better than its context cut to {l0:,}, by {plain(gain.estimate)} nats "
            f"[{plain(gain.low)}, {plain(gain.high)}]."
        )
    if gain.high < 0:
        return (
            f" At {reading.length:,} worse than its context cut to {l0:,}, by {plain(-gain.estimate)} nats "
            f"[{plain(-gain.high)}, {plain(-gain.low)}]."
        )
    return (
        f" At {reading.length:,} not told apart from its context cut to {l0:,}: gain {with_ends(gain)} nats."
    )


def _beats_truncation(comparison: Comparison) -> str:
    """Whether anyone made use of context beyond the trained length."""
    losses = comparison.losses
    longest, l0 = losses.lengths[-1], losses.trained_length
    found = [(line, line.at(longest)) for line in comparison.lines if line.claims and longest > l0]
    gains = [(line, one.gain) for line, one in found if one is not None and one.gain is not None]
    if not gains:
        return ""
    better = sorted((-gain.estimate, line.variant.name, gain) for line, gain in gains if gain.low > 0)
    worse = [line.variant.name for line, gain in gains if gain.high < 0]
    unsure = [line.variant.name for line, gain in gains if gain.low <= 0 <= gain.high]
    if better:
        told = listed([f"{name} ({with_ends(gain)} nats)" for _, name, gain in better])
        text = f"Context beyond {l0:,} helped at {longest:,}, compared with cutting it off: {told}"
    else:
        text = (
            f"At {longest:,} no scheme is shown to gain from context beyond {l0:,}, compared with "
            "cutting it off"
        )
    if worse:
        text += f"; it harmed {listed(worse)}"
    if unsure:
        text += f"; not told apart: {listed(unsure)}"
    level = f"{100 * comparison.confidence:g}%"
    return f"{text}. (Intervals of {level} for each by itself.)"


def _against_baseline(comparison: Comparison) -> list[str]:
    """One sentence for each primary length among the trained and the longest."""
    lines = []
    l0, primary = comparison.losses.trained_length, comparison.primary
    for length in dict.fromkeys([n for n in (l0, max(primary, default=l0)) if n in primary]):
        found = [one for one in comparison.differences if one.length == length and one.interval.claimed]
        if found:
            lines.append(_one_length(comparison, length, found))
    return lines


def _one_length(comparison: Comparison, length: int, found: list[Difference]) -> str:
    ordered = sorted(found, key=lambda one: one.interval.estimate)
    better = [one for one in ordered if one.interval.high < 0]
    worse = [one for one in reversed(ordered) if one.interval.low > 0]
    unsure = [one for one in ordered if one.interval.low <= 0 <= one.interval.high]

    def told(group: list[Difference]) -> str:
        return listed([f"{one.variant} by {_size(one)}" for one in group])

    parts = []
    if better:
        parts.append(f"better are {told(better)}")
    if worse:
        parts.append(f"worse are {told(worse)}")
    if unsure:
        parts.append(f"not told apart are {listed([one.variant for one in unsure])}")
    trained = ", the trained length" if length == comparison.losses.trained_length else ""
    return (
        f"Against {comparison.baseline} at {length:,}{trained}: {'; '.join(parts)} (nats; simultaneous over "
        f"{comparison.difference_family} comparisons)."
    )


def _size(one: Difference) -> str:
    low, high = sorted((abs(one.interval.low), abs(one.interval.high)))
    return f"{plain(abs(one.interval.estimate))} [{plain(low)}, {plain(high)}]"


def _points(comparison: Comparison) -> str:
    few = [line for line in comparison.lines if line.trained.seeds[0] < CLAIM_SEEDS]
    if not few:
        return ""
    told = listed([f"{line.variant.name} ({counted(line.trained.seeds[0], 'seed')})" for line in few])
    return (
        f"Points without claims, for fewer than {CLAIM_SEEDS} training seeds: {told}. Their numbers "
        "speak of these "
        "checkpoints and not of the schemes."
    )


def _rounding(comparison: Comparison) -> str:
    """Which variants have no verdict because of their arithmetic."""
    losses, tolerance = comparison.losses, comparison.tolerance
    names = [line.variant.name for line in comparison.lines]
    told = [
        f"{name} ({losses.rounding[name]:.4f} nats)" for name in names if not precise(losses, name, tolerance)
    ]
    if not told:
        return ""
    return (
        f"No verdicts for {listed(told)}: so far is bfloat16 off from float32 on average, and "
        f"{tolerance / 10:.4f} is allowed; evaluate with dtype=float32."
    )


def _basis(comparison: Comparison) -> str:
    losses = comparison.losses
    seeds = sorted({line.trained.seeds[0] for line in comparison.lines})
    several = counted(seeds[-1], "training seed")
    if len(seeds) > 1:
        several = f"{seeds[0]} to {several}"
    documents = losses.facts.get("documents")
    of = f" ({counted(documents, 'document')})" if losses.kind != "document" and documents else ""
    text = (
        f"Rests on {several} a scheme, {counted(len(losses.units), losses.kind)}{of} and "
        f"{int(losses.targets.sum()):,} target tokens, the same at every length and for every scheme."
    )
    if len(losses.units) < POINTS_ONLY_BELOW:
        return f"{text} Fewer than {POINTS_ONLY_BELOW} {losses.kind}s: points without intervals."
    if len(losses.units) < FEW_BELOW:
        text += f" (Few {losses.kind}s.)"
    if any(line.claims for line in comparison.lines):
        text += (
            f" Intervals take seeds and {losses.kind}s as samples: they speak of a scheme trained like "
            "this, on "
            "text like this, and of no other size or training."
        )
    return text


def power(comparison: Comparison) -> str:
    """How many seeds or units would settle what is undecided."""
    undecided = [
        (line, one)
        for line in comparison.lines
        for one in line.beyond
        if one.word == "undecided" and one.needed
    ]
    if not undecided:
        return ""
    told = []
    for line in comparison.lines:
        own = [one for of, one in undecided if of is line]
        if own:
            worst = max(own, key=lambda one: one.delta.half if one.delta else 0.0)
            told.append(
                f"{line.variant.name} at {worst.length:,}: {_would_do(worst, comparison.losses.kind)}"
            )
    return (
        f"Undecided where an interval is wider than the tolerance of {comparison.tolerance:g} nats. "
        "What would do, "
        f"the other being as it is: {'; '.join(told)}."
    )


def _would_do(reading: Reading, kind: str) -> str:
    seeds, units = reading.needed or (None, None)
    parts = []
    if seeds is not None:
        parts.append(f"{seeds:,} seeds")
    if units is not None:
        parts.append(f"{units:,} {kind}s")
    return listed(parts, "or") or f"no number of seeds or {kind}s alone"


def _times(length: int, l0: int) -> str:
    return f"{length / l0:.3g} times"


def _names(lines: list[Line]) -> str:
    return listed([line.variant.name for line in lines])


def _change(reading: Reading) -> str:
    return signed(_estimate(reading))


def _estimate(reading: Reading) -> float:
    return reading.delta.estimate if reading.delta else math.nan


def _delta(reading: Reading) -> str:
    return with_ends(reading.delta) if reading.delta else ""


def commands(study: Study) -> list[str]:
    """The words each cell was trained and evaluated with, as its settings say."""
    settings = study.record.get("study") or {}
    lines = []
    grid = settings.get("grid") or {}
    if grid:
        lines.append(f"python train.py {' '.join(settings.get('base') or [])} ...".replace("  ", " "))
    for axis, labels in grid.items():
        for label, told in labels.items():
            lines.append(f"    {axis}={label}: {' '.join(told) or 'nothing more'}")
    for name, entry in (settings.get("evaluations") or {}).items():
        lines.append(
            f"python evaluate.py RUN {' '.join(entry.get('words') or [])} folder={name}".replace("  ", " ")
        )
        if entry.get("data"):
            lines.append(f"    text of its own: {' '.join(entry['data'])}")
    return lines
