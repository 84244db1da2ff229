"""The findings of a study as sentences: templates filled with the derived numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.statistics.seeds import CLAIM_SEEDS, SeedInterval
from studies.report.document import counted, listed, plain, signed, with_ends
from studies.results.compare import StudyComparison, VariantSummary, precise
from studies.results.stored import StoredStudy


def lead(comparison: StudyComparison) -> list[str]:
    """The findings of one evaluation, the most important first."""
    lines = [_verdicts(comparison), _undertrained(comparison), _truncation(comparison)]
    lines += [*_against_baseline(comparison), _rounding(comparison), _few_seeds(comparison)]
    return [line for line in [*lines, _sample(comparison)] if line]


def _verdicts(comparison: StudyComparison) -> str:
    losses = comparison.losses
    l0, longest = losses.trained_length, losses.lengths[-1]
    if longest <= l0:
        return f"Only lengths up to the training length of {l0:,} tokens were evaluated."
    setup = f"Trained at {l0:,} tokens, evaluated up to {longest:,} ({longest / l0:.3g}×)"
    claims = [line for line in comparison.lines if line.claims]
    if not claims:
        last = [(line.variant.name, line.at(longest)) for line in comparison.lines]
        changes = [f"{name} {signed(one.delta.estimate)}" for name, one in last if one and one.delta]
        points = f" Change at {longest:,} in nats: {listed(changes)}." if changes else ""
        return f"{setup}: no verdicts, too few training seeds or {losses.kind}s.{points}"
    outcomes: dict[tuple, list[str]] = {}
    for line in claims:
        if line.held_to:
            key = (0, -line.held_to, f"held to {line.held_to:,}")
        elif line.break_point:
            key = (1, line.break_point, f"broken at {line.break_point:,}")
        else:
            key = (2, 0, "inconclusive at all longer lengths")
        outcomes.setdefault(key, []).append(line.variant.name)
    return f"{setup}: {'; '.join(f'{listed(outcomes[key])} {key[2]}' for key in sorted(outcomes))}."


def _undertrained(comparison: StudyComparison) -> str:
    """A model that is no better than a unigram model cannot break: its verdicts are meaningless."""
    unigram = comparison.losses.unigram
    if unigram is None:
        return ""
    level = float(unigram.mean())
    names = [line.variant.name for line in comparison.lines if line.trained.estimate >= level]
    if not names:
        return ""
    return (
        f"Warning: undertrained: {listed(names)}. At the training length they are no better than a unigram "
        f"model ({plain(level)} nats), so their verdicts are meaningless."
    )


def _by_sign(items: Sequence[tuple[str, SeedInterval]], positive: str, negative: str) -> str:
    """`positive for a (+0.1 [...]); negative for b (−0.2 [...]); not significant for c`."""
    ordered = sorted(items, key=lambda item: -abs(item[1].estimate))
    groups = {
        positive: [f"{name} ({with_ends(one)})" for name, one in ordered if one.low > 0],
        negative: [f"{name} ({with_ends(one)})" for name, one in ordered if one.high < 0],
        "not significant": [name for name, one in ordered if one.low <= 0 <= one.high],
    }
    return "; ".join(f"{label} for {listed(names)}" for label, names in groups.items() if names)


def _truncation(comparison: StudyComparison) -> str:
    """The net gain over truncation at the longest length."""
    longest, l0 = comparison.losses.lengths[-1], comparison.losses.trained_length
    found = [(line.variant.name, line.at(longest)) for line in comparison.lines if line.claims]
    gains = [(name, one.gain) for name, one in found if one is not None and one.gain is not None]
    if not gains or longest <= l0:
        return ""
    level = f"{100 * comparison.confidence:g}% individual intervals"
    none = "" if any(gain.low > 0 for _, gain in gains) else "positive for no scheme; "
    return (
        f"Net gain over truncation at {longest:,} (nats, {level}): "
        f"{none}{_by_sign(gains, 'positive', 'negative')}."
    )


def _against_baseline(comparison: StudyComparison) -> list[str]:
    """The differences from the baseline at the training length and at the longest primary length."""
    lines, l0, primary = [], comparison.losses.trained_length, comparison.primary
    for length in dict.fromkeys(n for n in (l0, max(primary, default=l0)) if n in primary):
        found = [d for d in comparison.differences if d.length == length and d.interval.claimed]
        if found:
            at = f"{length:,}" + (", the training length" if length == l0 else "")
            signs = _by_sign([(d.variant, d.interval) for d in found], "higher (worse)", "lower (better)")
            lines.append(
                f"NLL minus that of {comparison.baseline} at {at} (nats, simultaneous over "
                f"{comparison.difference_family} comparisons): {signs}."
            )
    return lines


def _rounding(comparison: StudyComparison) -> str:
    losses, tolerance = comparison.losses, comparison.tolerance
    names = [
        line.variant.name for line in comparison.lines if not precise(losses, line.variant.name, tolerance)
    ]
    if not names:
        return ""
    errors = listed([f"{name} ({losses.rounding[name]:.4f} nats)" for name in names])
    return (
        f"No verdicts because of bfloat16 rounding error: {errors}; the limit is "
        f"{tolerance / 10:.4f}. Evaluate "
        "with dtype=float32."
    )


def _few_seeds(comparison: StudyComparison) -> str:
    few = [line for line in comparison.lines if line.trained.seeds[0] < CLAIM_SEEDS]
    if not few:
        return ""
    names = listed([f"{line.variant.name} ({counted(line.trained.seeds[0], 'seed')})" for line in few])
    return (
        f"Point estimates only, with fewer than {CLAIM_SEEDS} training seeds: {names}. They describe these "
        "checkpoints, not the schemes."
    )


def _sample(comparison: StudyComparison) -> str:
    losses = comparison.losses
    seeds = sorted({line.trained.seeds[0] for line in comparison.lines})
    several = counted(seeds[-1], "training seed")
    if len(seeds) > 1:
        several = f"{seeds[0]} to {several}"
    documents, units = losses.facts.get("documents"), len(losses.units)
    of = f" ({counted(documents, 'document')})" if losses.kind != "document" and documents else ""
    text = (
        f"Sample: {several} per scheme, {counted(units, losses.kind)}{of} and "
        f"{int(losses.targets.sum()):,} target tokens, the same at every length and for every scheme."
    )
    if units < POINTS_ONLY_BELOW:
        return f"{text} Fewer than {POINTS_ONLY_BELOW} {losses.kind}s: point estimates only."
    if units < FEW_BELOW:
        text += f" Few {losses.kind}s: interpret intervals with care."
    if any(line.claims for line in comparison.lines):
        text += (
            f" Intervals treat seeds and {losses.kind}s as random samples; they do not extend to other model "
            "sizes or training budgets."
        )
    return text


def sentence(line: VariantSummary, comparison: StudyComparison) -> str:
    """The findings about one variant."""
    l0, longest = comparison.losses.trained_length, comparison.losses.lengths[-1]
    beyond = line.beyond
    if not beyond:
        reasons = sorted({one.failure for one in line.readings if one.failure and one.length > l0})
        return f"not evaluated beyond {l0:,}: {listed(reasons) or 'no longer length was requested'}."
    last = beyond[-1]
    change = f"{with_ends(last.delta) if last.delta else ''} nats"
    if last.verdict == "points only":
        parts = [f"{change} at {last.length:,} relative to {l0:,} (point estimate)"]
    elif line.held_to == last.length:
        bound = math.ceil(max(one.upper for one in beyond) * 1000) / 1000
        parts = [f"held to {last.length:,} (increase of at most {max(bound, 0.0):.3f} nats at any length)"]
    else:
        parts = [f"held to {line.held_to:,}" if line.held_to else f"not shown to hold beyond {l0:,}"]
        broken = [one for one in beyond if one.length == line.break_point and one is not last]
        parts += [f"broken at {one.length:,} ({with_ends(one.delta)} nats)" for one in broken if one.delta]
        parts.append(f"{last.verdict} at {last.length:,} ({change})")
    if last.gain is not None and not math.isnan(last.gain.low):
        parts.append(f"net gain over truncation {with_ends(last.gain)}")
    if last.length < longest:
        missing = next(one for one in line.readings if one.length > last.length)
        parts.append(f"not evaluated from {missing.length:,} on: {missing.failure}")
    return "; ".join(parts) + "."


def power(comparison: StudyComparison) -> str:
    """How many seeds or units would make inconclusive verdicts conclusive."""
    needed, kind = [], comparison.losses.kind
    for line in comparison.lines:
        open_ = [one for one in line.beyond if one.verdict == "inconclusive" and one.needed]
        if open_:
            worst = max(open_, key=lambda one: one.delta.half if one.delta else 0.0)
            numbers = zip(worst.needed or (), ("seeds", f"{kind}s"), strict=False)
            options = listed([f"{n:,} {noun}" for n, noun in numbers if n is not None], "or")
            needed.append(f"{line.variant.name} at {worst.length:,}: {options or 'neither alone suffices'}")
    if not needed:
        return ""
    return (
        "Inconclusive where the interval is wider than the tolerance of "
        f"{comparison.tolerance:g} nats. Required "
        f"sample, changing one of the two: {'; '.join(needed)}."
    )


def commands(study: StoredStudy) -> list[str]:
    """The commands with which cells were trained and evaluated."""
    settings = study.record.get("study") or {}
    lines = (
        [" ".join(["python train.py", *(settings.get("base") or []), "..."])] if settings.get("grid") else []
    )
    for axis, labels in (settings.get("grid") or {}).items():
        lines += [f"    {axis}={label}: {' '.join(own) or '(none)'}" for label, own in labels.items()]
    for name, entry in (settings.get("evaluations") or {}).items():
        lines.append(" ".join(["python evaluate.py RUN", *(entry.get("overrides") or []), f"folder={name}"]))
        if entry.get("data"):
            lines.append(f"    data: {' '.join(entry['data'])}")
    return lines
