"""Many rules at many lengths in one table: a row for each rule, a column for each length."""

import math

from evaluation.analysis import Analysis, Row
from evaluation.matrix import Result
from evaluation.numbers import ends, signed
from evaluation.rules import TRAINED, TRUNCATE
from evaluation.verdicts import RuleVerdicts


def grid(result: Result, analysis: Analysis) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns, rows for a terminal: NLL by rule and length, the verdict, and what context gains.

    As trained and cut to L0 come first, then the rules by their NLL at the longest length, the best first.
    """
    lengths, verdicts = result.plan.lengths, {v.rule: v for v in analysis.verdicts}
    cells = {(row.rule, row.length): row for row in analysis.rows}
    title = (
        f"{result.plan.protocol}: NLL in nats, {analysis.n_targets} targets, {analysis.units} "
        f"{analysis.unit_kind}s"
    )
    columns = ["rule", *(f"{length:,}" for length in lengths), "verdict", f"gain at {lengths[-1]:,}"]
    rows = []
    for label in _order(result, cells):
        found = [cells.get((label, length)) for length in lengths]
        last = found[-1]
        if label == TRUNCATE:
            tail = ["flat by construction", ""]
        else:
            tail = [_verdict(verdicts.get(label)), _gain(last) if len(lengths) > 1 else ""]
        rows.append([label, *map(_nll, found), *tail])
    return title, columns, rows


def footnotes(result: Result, verbose: bool) -> list[str]:
    """What the signs of the table mean, which cells cannot exist, and which rules do not apply."""
    lines = [
        f"gain: NLL with the context cut to {result.subject.trained_length} minus NLL of the rule, with its "
        f"{100 * result.settings.confidence:g}% interval; above zero, the far context helps"
    ]
    reasons: dict[str, dict[str, list[int]]] = {}
    for (rule, length), reason in result.absent.items():
        reasons.setdefault(reason, {}).setdefault(rule, []).append(length)
    for reason, where in reasons.items():
        cells = "; ".join(f"{rule} at {', '.join(map(str, lengths))}" for rule, lengths in where.items())
        lines.append(f"— does not exist, {reason}: {cells}")
    left_out = result.left_out
    if left_out:
        count = f"{len(left_out)} built-in rule{'s do' if len(left_out) > 1 else ' does'} not apply here"
        lines.append(f"{count}: {', '.join(left_out)}" + ("" if verbose else " (--verbose: why)"))
        lines += [f"  {label}: {reason}" for label, reason in left_out.items()] if verbose else []
    return lines


def headline(result: Result, analysis: Analysis) -> str:
    """All rules in one sentence: how many held how far, which is best at the longest length."""
    longest = result.plan.lengths[-1]
    rules = [v for v in analysis.verdicts if v.rule != TRAINED]
    held = [v.rule for v in rules if v.held_to == longest]
    rows = [row for row in analysis.rows if row.length == longest and row.nll is not None]
    rows = [row for row in rows if row.rule not in (TRAINED, TRUNCATE)]
    text = f"Of {len(rules)} rules beside as trained, {len(held) or 'none'} held to {longest}"
    text += f" ({', '.join(held)})" if held else ""
    if rows:
        best = min(rows, key=lambda row: row.nll or 0.0)
        text += f"; best there is {best.rule} with NLL {best.nll:.3f}"
    better = [row.rule for row in rows if row.gain and row.gain.low > 0]
    if any(row.gain and not math.isnan(row.gain.low) for row in rows):
        cut = f"cutting the context to {result.subject.trained_length}"
        text += f"; better than {cut}: {', '.join(better) or 'none'}"
    return text + "."


def _order(result: Result, cells: dict[tuple[str, int], Row]) -> list[str]:
    first = [rule.label for rule in result.rules if rule.label in (TRAINED, TRUNCATE)]

    def last_nll(label: str) -> tuple[float, ...]:
        found = [cells.get((label, length)) for length in reversed(result.plan.lengths)]
        return tuple(math.inf if row is None or row.nll is None else row.nll for row in found)

    rest = [rule.label for rule in result.rules if rule.label not in first]
    return first + sorted(rest, key=last_nll)


def _nll(row: Row | None) -> str:
    if row is None or not row.exists:
        return "—"
    return "failed" if row.nll is None else f"{row.nll:.3f}"


def _verdict(rule: RuleVerdicts | None) -> str:
    if rule is None or not rule.verdicts:
        return ""
    if rule.verdicts[-1].word == "points only":
        return "points only"
    words = []
    if rule.held_to:
        words.append(f"held to {rule.held_to:,}")
    if rule.break_point:
        words.append(f"broken at {rule.break_point:,}")
    return ", ".join(words) or "undecided"


def _gain(row: Row | None) -> str:
    if row is None or row.gain is None:
        return ""
    return f"{signed(row.gain.estimate)} {ends(row.gain)}".rstrip()
