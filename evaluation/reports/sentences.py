"""The summary of an evaluation of loss, in sentences."""

import math

from evaluation.reports.base import ends, estimate, signed
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.analysis import Analysis, AnalysisRow, SubsetAnalysis
from evaluation.statistics.context_reach import ContextReach
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW, MeanInterval
from evaluation.statistics.verdicts import MethodVerdicts, Verdict, pooled

MANY = 10**7  # units: a larger number is not useful advice
PARTS = {True: "in the training text", False: "not in the training text"}


def name_of(method: str) -> str:
    """A method's label in sentences and figures."""
    return "as trained" if method == TRAINED else method


def sentences(result: EvaluationResult, analysis: Analysis, brief: bool = False) -> list[str]:
    """Which method held to which length, by how much, and with what confidence.

    `brief` replaces the sentences for each method by one for all.
    """
    l0, longest = result.subject.trained_length, result.plan.lengths[-1]
    lines = [_method_sentence(v, analysis, l0) for v in analysis.verdicts if v.verdicts]
    if brief and lines:
        lines = [headline(result, analysis)]
    if not brief:
        lines += [_reach_sentence(one, result.settings.tolerance) for one in analysis.reaches]
    if result.plan.protocol == "by-position":
        lines += [
            _position_sentence(method, buckets, longest) for method, buckets in analysis.buckets.items()
        ]
    if not lines:
        lines.append(f"only the trained length {l0} was measured; set lengths=[...] beyond it for verdicts")
    lines.append(_level_sentence(result, analysis))
    lines.append(_basis_sentence(result, analysis))
    lines += [result.screening.sentence] if result.screening.sentence else []
    lines += [_part_sentence(part, result, analysis, brief) for part in analysis.parts]
    wide = [(v, method.method) for method in analysis.verdicts for v in method.verdicts if v.units_needed]
    if wide:
        lines.append(_power_sentence(wide, result, analysis))
    flagged = [row for row in analysis.rows if row.verdict and row.verdict.delta.disagrees]
    if flagged:
        names = ", ".join(f"{row.method} at {row.length}" for row in flagged)
        if brief:
            names = f"{len(flagged)} of {sum(row.verdict is not None for row in analysis.rows)} cells"
        lines.append(
            f"The bootstrap disagrees with the t interval by more than 20% of its half-width: {names}."
        )
    failures: dict[tuple[str, str], list[int]] = {}
    for row in analysis.rows:
        if row.failure:
            failures.setdefault((row.method, row.failure), []).append(row.length)
    for (method, failure), lengths in failures.items():
        lines.append(f"Not measured: {method} at {', '.join(map(str, lengths))}: {failure}.")
    return lines + analysis.notes + result.notes


def _method_sentence(method: MethodVerdicts, analysis: Analysis, l0: int) -> str:
    name = name_of(method.method)
    last = method.verdicts[-1]
    if last.word == "points only":
        text = f"{signed(last.delta.estimate)} nats at {last.length} compared with as trained at {l0}"
        text += " (point estimate: too few units)"
    elif method.held_to == last.length:
        worst = max(v.upper for v in method.verdicts)
        # Rounded up: a bound must not be printed smaller than it is.
        bound = f"at most {math.ceil(worst * 1000) / 1000:.3f} nats worse" if worst > 0 else "no worse"
        text = f"held to {last.length}, the longest length measured ({bound} than as trained at {l0})"
    else:
        text = f"held to {method.held_to}" if method.held_to else f"not shown to hold beyond {l0}"
        broken = next((v for v in method.verdicts if v.length == method.break_point), None)
        if broken is None:
            text += f", broken at no length, {last.word} at {last.length} ({_nats(last.delta)})"
        else:
            text += f", broken at {broken.length} ({_nats(broken.delta)})"
            if broken.length != last.length:
                text += f"; {last.word} at {last.length} ({_nats(last.delta)})"
    row = next((r for r in analysis.rows if r.method == method.method and r.length == last.length), None)
    return f"{name}: {text}.{_gain_words(row, l0)}"


def _gain_words(row: AnalysisRow | None, l0: int) -> str:
    if row is None or row.gain is None or math.isnan(row.gain.low):
        return ""
    gain, cut = row.gain, f"truncating the context to {l0}"
    if gain.low > 0:
        text = f"better than {cut} by {gain.estimate:.3f} nats {ends(gain)}."
    elif gain.high < 0:
        text = f"worse than {cut} by {-gain.estimate:.3f} nats [{-gain.high:.3f}, {-gain.low:.3f}]"
    else:
        text = f"no significant difference from {cut}: gain {signed(gain.estimate)} nats {ends(gain)}."
    return f" At {row.length} {text.rstrip('.')}."


def _position_sentence(method: str, buckets: list, longest: int) -> str:
    last = buckets[-1]
    return (
        f"{method}, factor for {longest}: NLL {last.nll:.3f} at positions {last.low} to {last.high - 1}; "
        f"gain over the truncated context there {_nats(last.gain)}."
    )


def _level_sentence(result: EvaluationResult, analysis: Analysis) -> str:
    l0 = result.subject.trained_length
    base = next((r for r in analysis.rows if r.method == TRAINED and r.length == l0), None)
    if base is not None and base.nll is not None:
        text = f"As trained at {l0}: NLL {base.nll:.4f}, perplexity {base.perplexity:.2f}"
        if base.bits_per_byte is not None:
            text += f", {base.bits_per_byte:.3f} bits per byte"
    elif result.truncated is not None:
        text = f"As trained with the context truncated to {l0}: NLL {pooled(result.truncated):.4f}"
    else:
        return f"As trained at {l0} was not measured, so there is no reference to compare with."
    if analysis.learned is not None:
        text += f"; a unigram model has {analysis.unigram:.4f} on the same tokens"
        text += f", {abs(analysis.learned):.3f} nats {'worse' if analysis.learned >= 0 else 'better'}"
    return text + "."


def _basis_sentence(result: EvaluationResult, analysis: Analysis) -> str:
    unit = analysis.unit_kind + ("s" if analysis.units != 1 else "")
    text = f"{analysis.n_targets} targets in {analysis.documents} documents"
    text += f", {analysis.units} {unit}" if analysis.unit_kind != "document" else ""
    if analysis.units < POINTS_ONLY_BELOW:
        return text + f": fewer than {POINTS_ONLY_BELOW} units, so only point estimates are reported."
    text += " (few documents)" if analysis.units < FEW_BELOW else ""
    text += f". Intervals: {round(100 * result.settings.confidence, 2):g}% over {unit}"
    if analysis.verdicts:
        how = " (max-t)" if result.settings.simultaneous == "max-t" else ""
        text += f"; for verdicts simultaneous over {analysis.family} comparisons{how}"
    return text + ". They describe this checkpoint on such documents, not the positional scheme."


def _power_sentence(wide: list[tuple[Verdict, str]], result: EvaluationResult, analysis: Analysis) -> str:
    worst, method = max(wide, key=lambda one: one[0].delta.half)
    inconclusive = sum(v.word == "inconclusive" for v, _ in wide)
    units = worst.units_needed or 0
    count = f"about {units:,}" if units < MANY else f"more than {MANY:,}"
    text = (
        f"Wider than the tolerance of {result.settings.tolerance:g} nats: {len(wide)} "
        f"interval{'s' if len(wide) > 1 else ''}, {inconclusive or 'none'} of them inconclusive "
        f"(at worst ±{worst.delta.half:.3f}, {method} at {worst.length}): "
        f"{count} {analysis.unit_kind}s would be enough"
    )
    if worst.spans_needed:
        text += f", or {worst.spans_needed:,} spans in each of these documents"
    elif result.plan.span and result.settings.spans_per_document > 1 and result.screening.kept.all():
        text += "; more spans in the same documents would not"
    return text + "."


def _reach_sentence(reach: ContextReach, tolerance: float) -> str:
    name = name_of(reach.method)
    if reach.points:
        text = "point estimate: too few units"
    elif reach.reach is None:
        text = f"not shown to saturate by {reach.longest}"
    else:
        shortest = reach.reach == reach.doublings[0].shorter
        text = f"at most {reach.reach}, the shortest length measured" if shortest else f"{reach.reach}"
        text += f"; no longer context up to {reach.longest} gains {tolerance:g} nats over it"
    gains = ", ".join(f"{one.shorter} to {one.longer} {estimate(one.gain)}" for one in reach.doublings)
    return f"Context reach, {name}: {text}. Gain per doubling, nats: {gains}."


def _part_sentence(part: SubsetAnalysis, result: EvaluationResult, analysis: Analysis, brief: bool) -> str:
    kind = analysis.unit_kind + ("s" if part.units != 1 else "")
    text = f"{part.units} {kind} ({part.documents} documents) {PARTS[part.seen]}"
    if part.units < POINTS_ONLY_BELOW:
        text += ", point estimates only"
    l0, longest = result.subject.trained_length, result.plan.lengths[-1]
    rows = {(row.method, row.length): row for row in part.rows}
    base, found = rows.get((TRAINED, l0)), []
    if base is not None:
        found.append(f"as trained NLL {base.nll:.4f} at {l0}")
    for row in part.rows:
        if row.delta is not None and row.length == longest and (row.method == TRAINED or not brief):
            found.append(f"{name_of(row.method)} {estimate(row.delta)} at {longest}")
    return f"{text}: {', '.join(found)}."


def headline(result: EvaluationResult, analysis: Analysis) -> str:
    """All methods in one sentence: how many held to the longest length, and which is best there."""
    longest = result.plan.lengths[-1]
    methods = [v for v in analysis.verdicts if v.method != TRAINED]
    held = [v.method for v in methods if v.held_to == longest]
    rows = [row for row in analysis.rows if row.length == longest and row.nll is not None]
    rows = [row for row in rows if row.method not in (TRAINED, TRUNCATE)]
    judged = [v for v in methods if v.verdicts and v.verdicts[-1].word != "points only"]
    if judged:
        text = f"Of {len(judged)} methods tested in addition to as trained, "
        text += f"{len(held) or 'none'} held to {longest}"
        text += f" ({', '.join(held)})" if held else ""
    else:
        text = f"None of the {len(methods)} methods in addition to as trained has a verdict at {longest}"
    if rows:
        best = min(rows, key=lambda row: row.nll or 0.0)
        text += f"; best there is {best.method} with NLL {best.nll:.3f}"
    better = [row.method for row in rows if row.gain and row.gain.low > 0]
    if any(row.gain and not math.isnan(row.gain.low) for row in rows):
        cut = f"truncating the context to {result.subject.trained_length}"
        text += f"; better than {cut}: {', '.join(better) or 'none'}"
    return text + "."


def _nats(interval: MeanInterval) -> str:
    return f"{signed(interval.estimate)} nats {ends(interval)}".rstrip()
