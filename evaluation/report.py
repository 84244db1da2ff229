"""What an evaluation says: words and tables."""

import math

from evaluation.analysis import Analysis, Part, Row
from evaluation.grid import headline
from evaluation.matrix import Result
from evaluation.numbers import ends, signed
from evaluation.reach import Reach
from evaluation.rules import TRAINED, TRUNCATE
from evaluation.statistics import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.verdicts import RuleVerdicts, Verdict, pooled

MANY = 10**7  # units: so many are no advice


def words(result: Result, analysis: Analysis, brief: bool = False) -> list[str]:
    """What happened, in sentences: which rule held to which length, by how much, how sure.

    `brief` puts one sentence in the place of one for each rule.
    """
    l0, longest = result.subject.trained_length, result.plan.lengths[-1]
    lines = [_rule_sentence(v, analysis, l0) for v in analysis.verdicts if v.verdicts]
    if brief and lines:
        lines = [headline(result, analysis)]
    if not brief:
        lines += [_reach_sentence(one, result.settings.tolerance) for one in analysis.reaches]
    if result.plan.protocol == "by-position":
        lines += [_position_sentence(rule, buckets, longest) for rule, buckets in analysis.buckets.items()]
    if not lines:
        lines.append(f"only the trained length {l0} was measured; give lengths=[...] beyond it for verdicts")
    lines.append(_level_sentence(result, analysis))
    lines.append(_basis_sentence(result, analysis))
    lines += [result.screening.sentence] if result.screening.sentence else []
    lines += [_part_sentence(part, result, analysis, brief) for part in analysis.parts]
    wide = [(v, rule.rule) for rule in analysis.verdicts for v in rule.verdicts if v.units_needed]
    if wide:
        lines.append(_power_sentence(wide, result, analysis))
    flagged = [row for row in analysis.rows if row.verdict and row.verdict.delta.disagrees]
    if flagged:
        names = ", ".join(f"{row.rule} at {row.length}" for row in flagged)
        if brief:
            names = f"{len(flagged)} of {sum(row.verdict is not None for row in analysis.rows)} cells"
        lines.append(
            f"The bootstrap disagrees with the t interval by more than 20% of its half-width: {names}."
        )
    for (rule, failure), lengths in _not_measured(analysis).items():
        lines.append(f"Not measured: {rule} at {', '.join(map(str, lengths))}: {failure}.")
    return lines + analysis.notes + result.notes


def _not_measured(analysis: Analysis) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for row in analysis.rows:
        if row.failure:
            found.setdefault((row.rule, row.failure), []).append(row.length)
    return found


def _rule_sentence(rule: RuleVerdicts, analysis: Analysis, l0: int) -> str:
    name = "as trained" if rule.rule == TRAINED else rule.rule
    last = rule.verdicts[-1]
    if last.word == "points only":
        text = f"{signed(last.delta.estimate)} nats at {last.length} against as trained at {l0}"
        text += " (a point: too few units)"
    elif rule.held_to == last.length:
        worst = max(v.upper for v in rule.verdicts)
        # Rounded up: a bound must not be printed smaller than it is.
        bound = f"at most {math.ceil(worst * 1000) / 1000:.3f} nats worse" if worst > 0 else "no worse"
        text = f"held to {last.length}, the longest length measured (surely {bound} than as trained at {l0})"
    else:
        text = f"held to {rule.held_to}" if rule.held_to else f"not shown to hold beyond {l0}"
        broken = next((v for v in rule.verdicts if v.length == rule.break_point), None)
        if broken is None:
            text += f", nowhere shown broken, {last.word} at {last.length} ({_delta(last)})"
        else:
            text += f", broken at {broken.length} ({_delta(broken)})"
            if broken.length != last.length:
                text += f"; {last.word} at {last.length} ({_delta(last)})"
    row = next((r for r in analysis.rows if r.rule == rule.rule and r.length == last.length), None)
    return f"{name}: {text}.{_gain_words(row, l0)}"


def _gain_words(row: Row | None, l0: int) -> str:
    if row is None or row.gain is None or math.isnan(row.gain.low):
        return ""
    gain = row.gain
    if gain.low > 0:
        text = f"better than cutting the context to {l0} by {gain.estimate:.3f} nats"
    elif gain.high < 0:
        both = f"[{-gain.high:.3f}, {-gain.low:.3f}]"
        return f" At {row.length} worse than cutting the context to {l0} by {-gain.estimate:.3f} nats {both}."
    else:
        text = f"not told apart from cutting the context to {l0}: gain {signed(gain.estimate)} nats"
    return f" At {row.length} {text} {ends(gain)}."


def _position_sentence(rule: str, buckets: list, longest: int) -> str:
    last = buckets[-1]
    return (
        f"{rule}, factor for {longest}: NLL {last.nll:.3f} at positions {last.low} to {last.high - 1}; "
        "gain over the "
        f"truncated context there {signed(last.gain.estimate)} nats {ends(last.gain)}."
    )


def _level_sentence(result: Result, analysis: Analysis) -> str:
    l0 = result.subject.trained_length
    base = next((r for r in analysis.rows if r.rule == TRAINED and r.length == l0), None)
    if base is not None and base.nll is not None:
        text = f"As trained at {l0}: NLL {base.nll:.4f}, perplexity {base.perplexity:.2f}"
        if base.bits_per_byte is not None:
            text += f", {base.bits_per_byte:.3f} bits per byte"
    elif result.truncated is not None:
        text = f"As trained with the context cut to {l0}: NLL {pooled(result.truncated):.4f}"
    else:
        return f"As trained at {l0} was not measured: there is nothing to compare with."
    if analysis.learned is not None:
        text += f"; a unigram model has {analysis.unigram:.4f} on the same tokens"
        text += f", {abs(analysis.learned):.3f} nats {'worse' if analysis.learned >= 0 else 'better'}"
    return text + "."


def _basis_sentence(result: Result, analysis: Analysis) -> str:
    unit = analysis.unit_kind + ("s" if analysis.units != 1 else "")
    text = f"{analysis.n_targets} targets in {analysis.documents} documents"
    if analysis.unit_kind != "document":
        text += f", {analysis.units} {unit}"
    if analysis.units < POINTS_ONLY_BELOW:
        return text + f": fewer than {POINTS_ONLY_BELOW} units, hence points without intervals."
    few = " (few documents)" if analysis.units < FEW_BELOW else ""
    level = round(100 * result.settings.confidence, 2)
    how = " (max-t)" if result.settings.simultaneous == "max-t" else ""
    family = (
        f"; for verdicts simultaneous over {analysis.family} comparisons{how}" if analysis.verdicts else ""
    )
    return (
        f"{text}{few}. Intervals: {level:g}% over {unit}{family}. "
        "They speak of this checkpoint on such documents, not of the scheme."
    )


def _power_sentence(wide: list[tuple[Verdict, str]], result: Result, analysis: Analysis) -> str:
    worst, rule = max(wide, key=lambda one: one[0].delta.half)
    undecided = sum(v.word == "undecided" for v, _ in wide)
    units = worst.units_needed or 0
    count = f"about {units:,}" if units < MANY else f"more than {MANY:,}"
    text = (
        f"Wider than the tolerance of {result.settings.tolerance:g} nats: {len(wide)} "
        f"interval{'s' if len(wide) > 1 else ''}, {undecided or 'none'} of them undecided "
        f"(at worst ±{worst.delta.half:.3f}, {rule} at {worst.length}): "
        f"{count} {analysis.unit_kind}s would do"
    )
    if worst.spans_needed:
        text += f", or {worst.spans_needed:,} spans in each document of these"
    elif result.plan.span and result.settings.spans_per_document > 1 and result.screening.kept.all():
        text += "; more spans in the documents there are would not"
    return text + "."


def _reach_sentence(reach: Reach, tolerance: float) -> str:
    name = "as trained" if reach.rule == TRAINED else reach.rule
    if reach.points:
        text = "a point: too few units"
    elif reach.reach is None:
        text = f"not shown to saturate by {reach.longest}"
    else:
        shortest = reach.reach == reach.doublings[0].shorter
        text = f"at most {reach.reach}, the shortest length measured" if shortest else f"{reach.reach}"
        text += f"; up to {reach.longest} no longer context gains {tolerance:g} nats over it"
    gains = ", ".join(
        f"{one.shorter} to {one.longer} {signed(one.gain.estimate)} {ends(one.gain)}".rstrip()
        for one in reach.doublings
    )
    return f"Context reach, {name}: {text}. Gain per doubling, nats: {gains}."


def _part_sentence(part: Part, result: Result, analysis: Analysis, brief: bool) -> str:
    kind = analysis.unit_kind + ("s" if part.units != 1 else "")
    text = f"{part.units} {kind} ({part.documents} documents) {_part_name(part.seen)}"
    if part.units < POINTS_ONLY_BELOW:
        text += ", points only"
    l0, longest = result.subject.trained_length, result.plan.lengths[-1]
    rows = {(row.rule, row.length): row for row in part.rows}
    base, found = rows.get((TRAINED, l0)), []
    if base is not None:
        found.append(f"as trained NLL {base.nll:.4f} at {l0}")
    for row in part.rows:
        if row.delta is not None and row.length == longest and (row.rule == TRAINED or not brief):
            name = "as trained" if row.rule == TRAINED else row.rule
            delta = f"{signed(row.delta.estimate)} {ends(row.delta)}".rstrip()
            found.append(f"{name} {delta} at {longest}")
    return f"{text}: {', '.join(found)}."


def _part_name(seen: bool) -> str:
    return "in the training text" if seen else "not in the training text"


def parts_table(result: Result, analysis: Analysis) -> tuple[str, list[str], list[list[str]]]:
    """The cells once over the units that the training text does not know, and once over those it does."""
    l0 = result.subject.trained_length
    columns = ["rule", "length"]
    for part in analysis.parts:
        of = f"{part.units} {_part_name(part.seen)}"
        columns += [f"NLL: {of}", f"difference from {l0}"]
    rows: dict[tuple[str, int], list[str]] = {}
    for part in analysis.parts:
        for row in part.rows:
            if row.rule == TRUNCATE and row.length != l0:
                continue
            delta = f"{signed(row.delta.estimate)} {ends(row.delta)}".rstrip() if row.delta else ""
            rows.setdefault((row.rule, row.length), []).extend([f"{row.nll:.4f}", delta])
    title = f"{analysis.unit_kind}s apart, by whether the training text has them"
    lines = [
        [rule, "all" if rule == TRUNCATE else str(length), *cells] for (rule, length), cells in rows.items()
    ]
    return title, columns, lines


def table(result: Result, analysis: Analysis) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns, rows for a terminal: NLL by rule and length; verdict and net gain at every length
    past L0.
    """
    l0 = result.subject.trained_length
    if analysis.buckets:
        columns = ["rule", "positions", "targets", "NLL", "gain over truncation"]
        rows = [
            [
                rule,
                f"{b.low}-{b.high - 1}" if b.high - b.low > 1 else str(b.low),
                str(b.count),
                f"{b.nll:.3f}",
                f"{signed(b.gain.estimate)} {ends(b.gain)}",
            ]
            for rule, buckets in analysis.buckets.items()
            for b in buckets
        ]
        return f"NLL by position, factor for {result.plan.lengths[-1]}", columns, rows
    columns = [
        "rule",
        "length",
        "NLL",
        "perplexity",
        f"difference from {l0}, as trained",
        "verdict",
        "net gain",
    ]
    return (
        f"{result.plan.protocol}: NLL in nats, {analysis.n_targets} targets, {analysis.units} "
        f"{analysis.unit_kind}s",
        columns,
        [_table_row(row, l0) for row in analysis.rows if row.rule != TRUNCATE or row.length == l0],
    )


def _table_row(row: Row, l0: int) -> list[str]:
    if row.nll is None:
        return [row.rule, str(row.length), "failed" if row.exists else "—", "", "", row.failure, ""]
    delta = f"{signed(row.delta.estimate)} {ends(row.delta)}" if row.delta else ""
    word = row.verdict.word if row.verdict else ""
    if row.rule == TRUNCATE:
        return [row.rule, "all", f"{row.nll:.4f}", f"{row.perplexity:.2f}", "", "flat by construction", ""]
    gain = f"{signed(row.gain.estimate)} {ends(row.gain)}" if row.gain and row.length > l0 else ""
    return [row.rule, str(row.length), f"{row.nll:.4f}", f"{row.perplexity:.2f}", delta, word, gain]


def _delta(verdict: Verdict) -> str:
    return f"{signed(verdict.delta.estimate)} nats {ends(verdict.delta)}".rstrip()
