"""The findings of a loss evaluation as sentences, filled from the results table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evaluation.reports.sentences import UNDERTRAINED
from evaluation.reports.text import counted, listed, plain, signed
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.statistics.seeds import CLAIM_SEEDS
from studies.report.notes import note, seed_counts
from studies.results.loss_comparison import LossComparison
from studies.results.table import StudyResult


def lead(table: LossComparison) -> list[str]:
    """The findings of one evaluation, the most important first."""
    lines = [
        _verdicts(table),
        _undertrained(table),
        _truncation(table),
        *_against_baseline(table),
        _rounding(table),
        _few_seeds(table),
        _sample(table),
    ]
    return [line for line in lines if line]


def _verdicts(table: LossComparison) -> str:
    l0 = table.trained_length
    longest = table.losses.lengths[-1]
    if longest <= l0:
        return f"Only lengths up to the trained length of {l0:,} tokens were evaluated."
    setup = f"Trained at {l0:,} tokens, evaluated up to {longest:,} ({longest / l0:.3g}×)"
    claims = [name for name in table.names if table.claims(name)]
    if not claims:
        rows = [row for row in table.select("delta") if row.length == longest]
        changes = listed([f"{row.variant} {signed(row.value)}" for row in rows])
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
    parts = [f"{listed(outcomes[key])} {key[2]}" for key in sorted(outcomes)]
    return f"{setup}: {'; '.join(parts)}."


def _undertrained(table: LossComparison) -> str:
    """A model that is hardly better than a unigram model cannot break."""
    unigram = table.losses.unigram
    if unigram is None:
        return ""
    rows = table.select("nll_as_trained")
    names = [row.variant for row in rows if row.value > unigram - UNDERTRAINED]
    if not names:
        return ""
    return note("undertrained", names=listed(names), unigram=plain(unigram), least=UNDERTRAINED)


def _by_sign(rows: Sequence[StudyResult], positive: str, negative: str) -> str:
    """`positive for a; negative for b and c; not significant for d`."""
    ordered = sorted(rows, key=lambda row: -abs(row.value))
    groups = {
        positive: [row.variant for row in ordered if row.low > 0],
        negative: [row.variant for row in ordered if row.high < 0],
        "not significant": [row.variant for row in ordered if row.low <= 0 <= row.high],
    }
    return "; ".join(f"{label} for {listed(names)}" for label, names in groups.items() if names)


def _truncation(table: LossComparison) -> str:
    """The sign of the net gain over truncation at the longest length."""
    longest = table.losses.lengths[-1]
    rows = [row for row in table.select("gain") if row.length == longest]
    rows = [row for row in rows if table.claims(row.variant)]
    if not rows or longest <= table.trained_length:
        return ""
    none = "" if any(row.low > 0 for row in rows) else "positive for no scheme; "
    signs = _by_sign(rows, "positive", "negative")
    return f"Net gain over truncation at {longest:,}: {none}{signs}."


def _against_baseline(table: LossComparison) -> list[str]:
    """The signs of the differences at the trained and at the longest primary length."""
    lines = []
    l0 = table.trained_length
    for length in dict.fromkeys((l0, max(table.primary, default=l0))):
        rows = [row for row in table.select("difference") if row.length == length]
        rows = [row for row in rows if not math.isnan(row.low)]
        if rows:
            signs = _by_sign(rows, "higher (worse)", "lower (better)")
            lines.append(f"NLL at {length:,} minus that of {table.baseline}: {signs}.")
    return lines


def _rounding(table: LossComparison) -> str:
    rounding = table.losses.rounding
    names = [name for name in table.names if not table.is_precise(name)]
    errors = listed([f"{name} ({rounding[name]:.4f} nats)" for name in names])
    return note("rounding", errors=errors, limit=table.tolerance / 10) if names else ""


def _few_seeds(table: LossComparison) -> str:
    few = [name for name in table.names if table.seed_count(name) < CLAIM_SEEDS]
    names = listed([f"{name} ({counted(table.seed_count(name), 'seed')})" for name in few])
    return note("few_seeds", least=CLAIM_SEEDS, names=names) if few else ""


def _sample(table: LossComparison) -> str:
    losses = table.losses
    units = counted(len(losses.units), losses.kind)
    documents = losses.facts.get("documents")
    if losses.kind != "document" and documents:
        units += f" ({counted(documents, 'document')})"
    seeds = seed_counts(table, "training seed")
    text = note(
        "sample",
        seeds=seeds,
        units=units,
        targets=int(losses.targets.sum()),
    )
    if len(losses.units) < POINTS_ONLY_BELOW:
        return f"{text} Fewer than {POINTS_ONLY_BELOW} {losses.kind}s: point estimates only."
    if len(losses.units) < FEW_BELOW:
        text += f" Few {losses.kind}s: interpret intervals with care."
    if any(table.claims(name) for name in table.names):
        text += f" {note('scope', table)}"
    return text
