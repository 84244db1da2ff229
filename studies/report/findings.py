"""The findings of a loss evaluation as sentences: templates filled from the results table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evaluation.reports.text import plain
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.statistics.seeds import CLAIM_SEEDS
from studies.report.document import counted, listed, note, seed_counts, signed, with_ends
from studies.results.compare import INCONCLUSIVE, POINTS_ONLY, StudyComparison
from studies.results.table import StudyResult


def lead(table: StudyComparison) -> list[str]:
    """The findings of one evaluation, the most important first."""
    lines = [_verdicts(table), _undertrained(table), _truncation(table), *_against_baseline(table)]
    return [line for line in [*lines, _rounding(table), _few_seeds(table), _sample(table)] if line]


def _verdicts(table: StudyComparison) -> str:
    l0 = table.trained_length
    longest = table.losses.lengths[-1]
    if longest <= l0:
        return f"Only lengths up to the trained length of {l0:,} tokens were evaluated."
    setup = f"Trained at {l0:,} tokens, evaluated up to {longest:,} ({longest / l0:.3g}×)"
    claims = [name for name in table.names if table.claims(name)]
    if not claims:
        last = [row for row in table.select("delta") if row.length == longest]
        changes = listed([f"{row.variant} {signed(row.value)}" for row in last])
        points = f" Change at {longest:,} in nats: {changes}." if changes else ""
        return f"{setup}: no verdicts, too few training seeds or {table.losses.kind}s.{points}"
    outcomes: dict[tuple, list[str]] = {}
    for name in claims:
        if held := table.value(name, "held_to"):
            key = (0, -held, f"held to {held:,.0f}")
        elif broken := table.value(name, "break_point"):
            key = (1, broken, f"broken at {broken:,.0f}")
        else:
            key = (2, 0.0, "inconclusive at all longer lengths")
        outcomes.setdefault(key, []).append(name)
    return f"{setup}: {'; '.join(f'{listed(outcomes[key])} {key[2]}' for key in sorted(outcomes))}."


def _undertrained(table: StudyComparison) -> str:
    """A model that is no better than a unigram model cannot break: its verdicts are meaningless."""
    unigram = table.losses.unigram
    rows = table.select("nll_as_trained")
    names = [row.variant for row in rows if unigram is not None and row.value >= unigram]
    if unigram is None or not names:
        return ""
    return note("undertrained", names=listed(names), unigram=plain(unigram))


def _by_sign(rows: Sequence[StudyResult], positive: str, negative: str) -> str:
    """`positive for a (+0.1 [...]); negative for b (−0.2 [...]); not significant for c`."""
    ordered = sorted(rows, key=lambda row: -abs(row.value))
    groups = {
        positive: [f"{row.variant} ({with_ends(row)})" for row in ordered if row.low > 0],
        negative: [f"{row.variant} ({with_ends(row)})" for row in ordered if row.high < 0],
        "not significant": [row.variant for row in ordered if row.low <= 0 <= row.high],
    }
    return "; ".join(f"{label} for {listed(names)}" for label, names in groups.items() if names)


def _truncation(table: StudyComparison) -> str:
    """The net gain over truncation at the longest length."""
    longest = table.losses.lengths[-1]
    gains = [
        row for row in table.select("gain") if row.length == longest and table.claims(row.variant)
    ]
    if not gains or longest <= table.trained_length:
        return ""
    level = f"{100 * table.confidence:g}% individual intervals"
    none = "" if any(row.low > 0 for row in gains) else "positive for no scheme; "
    signs = _by_sign(gains, "positive", "negative")
    return f"Net gain over truncation at {longest:,} (nats, {level}): {none}{signs}."


def _against_baseline(table: StudyComparison) -> list[str]:
    """The differences from the baseline at the trained length and at the longest primary length."""
    lines = []
    l0 = table.trained_length
    claimed = [row for row in table.select("difference") if row.interval and row.interval.claimed]
    for length in dict.fromkeys((l0, max(table.primary, default=l0))):
        if found := [row for row in claimed if row.length == length]:
            at = f"{length:,}" + (", the trained length" if length == l0 else "")
            signs = _by_sign(found, "higher (worse)", "lower (better)")
            lines.append(
                f"NLL minus that of {table.baseline} at {at} (nats, simultaneous over "
                f"{table.difference_family} comparisons): {signs}."
            )
    return lines


def _rounding(table: StudyComparison) -> str:
    names = [name for name in table.names if not table.precise(name)]
    errors = listed([f"{name} ({table.losses.rounding[name]:.4f} nats)" for name in names])
    return errors and note("rounding", errors=errors, limit=table.tolerance / 10)


def _few_seeds(table: StudyComparison) -> str:
    few = [name for name in table.names if table.seed_count(name) < CLAIM_SEEDS]
    names = listed([f"{name} ({counted(table.seed_count(name), 'seed')})" for name in few])
    return names and note("few_seeds", least=CLAIM_SEEDS, names=names)


def _sample(table: StudyComparison) -> str:
    losses = table.losses
    documents = losses.facts.get("documents")
    units = len(losses.units)
    of = f" ({counted(documents, 'document')})" if losses.kind != "document" and documents else ""
    number = f"{counted(units, losses.kind)}{of}"
    text = note(
        "sample",
        seeds=seed_counts(table, "training seed"),
        units=number,
        targets=int(losses.targets.sum()),
    )
    if units < POINTS_ONLY_BELOW:
        return f"{text} Fewer than {POINTS_ONLY_BELOW} {losses.kind}s: point estimates only."
    if units < FEW_BELOW:
        text += f" Few {losses.kind}s: interpret intervals with care."
    if any(table.claims(name) for name in table.names):
        text += f" {note('scope', table)}"
    return text


def sentence(name: str, table: StudyComparison) -> str:
    """The findings about one variant."""
    l0 = table.trained_length
    beyond = table.beyond(name)
    failures = [row for row in table.select("failure", name) if row.at > l0]
    if not beyond:
        reasons = listed(sorted({row.note for row in failures}))
        return f"not evaluated beyond {l0:,}: {reasons or 'no longer length was requested'}."
    last = beyond[-1]
    held = table.value(name, "held_to")
    change = f"{with_ends(last)} nats"
    if last.verdict == POINTS_ONLY:
        parts = [f"{change} at {last.at:,} relative to {l0:,} (point estimate)"]
    elif held == last.length:
        uppers = [row.value for row in table.select("delta_upper", name) if row.at > l0]
        bound = max(math.ceil(max(uppers) * 1000) / 1000, 0.0)
        parts = [f"held to {last.at:,} (increase of at most {bound:.3f} nats at any length)"]
    else:
        first = table.value(name, "break_point")
        parts = [f"held to {held:,.0f}" if held else f"not shown to hold beyond {l0:,}"]
        broken = [row for row in beyond[:-1] if row.length == first]
        parts += [f"broken at {row.at:,} ({with_ends(row)} nats)" for row in broken]
        parts.append(f"{last.verdict} at {last.at:,} ({change})")
    gain = table.get(name, "gain", last.at)
    if gain is not None and not math.isnan(gain.low):
        parts.append(f"net gain over truncation {with_ends(gain)}")
    if missing := [row for row in failures if row.at > last.at]:
        parts.append(f"not evaluated from {missing[0].at:,} on: {missing[0].note}")
    return "; ".join(parts) + "."


def power(table: StudyComparison) -> str:
    """How many seeds or units would make inconclusive verdicts conclusive."""
    required = []
    for name in table.names:
        unclear = [row for row in table.beyond(name) if row.verdict == INCONCLUSIVE]
        unclear = [row for row in unclear if table.get(name, "seeds_needed", row.at)]
        if unclear:
            worst = max(unclear, key=lambda row: row.half)
            nouns = {"seeds_needed": "seeds", "units_needed": f"{table.losses.kind}s"}
            numbers = [
                (table.value(name, metric, worst.at), noun) for metric, noun in nouns.items()
            ]
            options = [
                f"{n:,.0f} {noun}" for n, noun in numbers if n is not None and not math.isnan(n)
            ]
            required.append(
                f"{name} at {worst.at:,}: {listed(options, 'or') or 'neither alone suffices'}"
            )
    return f"{note('power', table)}: {'; '.join(required)}." if required else ""
