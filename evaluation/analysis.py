"""From per-target NLL to the rows of a report: levels, differences, verdicts, net gains."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from evaluation.matrix import Result
from evaluation.reach import Reach, context_reach
from evaluation.rules import TRAINED, TRUNCATE
from evaluation.statistics import Interval, interval, max_t_alpha, unit_means
from evaluation.verdicts import (
    Bucket,
    RuleVerdicts,
    Verdict,
    bits_per_byte,
    by_position,
    judge,
    net_gain,
    perplexity,
    pooled,
)
from model import AnyPosition
from model.position.describe import describe_choice

_POSITION = TypeAdapter(AnyPosition)


@dataclass(frozen=True)
class Row:
    """One cell. Fields are None where they do not apply or the cell failed."""

    rule: str
    scheme: str  # as evaluated, with its factor
    length: int
    nll: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    level: Interval | None = None  # of the NLL itself: how much documents differ
    verdict: Verdict | None = None
    delta: Interval | None = None  # NLL - NLL(as trained, L0), of a length past L0
    gain: Interval | None = None
    precision: float | None = None  # mean bfloat16 - float32 on a sample, nats
    failure: str = ""
    exists: bool = True  # false: the scheme has no such positions, and `failure` says why


@dataclass(frozen=True)
class Part:
    """The rows of those units that the training text knows, or of those that it does not."""

    seen: bool
    units: int
    documents: int
    n_targets: int
    rows: list[Row]


@dataclass(frozen=True)
class Analysis:
    """Rows in the order of rules and lengths; verdicts of the judged rules; notes that belong beside them."""

    rows: list[Row]
    parts: list[Part]  # the unseen and the seen, where there are both
    verdicts: list[RuleVerdicts]
    reaches: list[Reach]
    buckets: dict[str, list[Bucket]]
    family: int
    units: int
    unit_kind: str
    documents: int
    n_targets: int
    unigram: float | None
    learned: float | None  # unigram NLL - NLL(as trained, L0) on the same targets
    notes: list[str]


def analyse(result: Result) -> Analysis:
    """All derived numbers of one evaluation."""
    settings, l0 = result.settings, result.subject.trained_length
    alpha = 1 - settings.confidence
    how = {"resamples": settings.resamples, "seed": settings.seed}
    judged, notes = _judged_rules(result)
    # The family: every rule that is judged at every length beyond L0, against one named reference.
    span = result.plan.span if result.screening.kept.all() else None  # else spans are not equally long
    beyond = [length for length in result.plan.lengths if length > l0]
    family = max(1, sum((label, n) not in result.absent for label in judged for n in beyond))
    verdicts, each = [], {"alpha": alpha, "family": family}
    if result.truncated is not None and result.plan.protocol != "by-position":
        if settings.simultaneous == "max-t":
            each = {"alpha": _max_t(result, judged, alpha, family, how), "family": 1}
        for label in judged:
            verdicts.append(
                judge(
                    label,
                    _of_rule(result, label),
                    result.truncated,
                    result.unit,
                    l0,
                    tolerance=settings.tolerance,
                    span=span,
                    document=result.document,
                    failed=[n for rule, n in result.failed if rule == label],
                    **each,
                    **how,
                )
            )
    unigram = None if result.unigram is None else pooled(result.unigram)
    base = None if result.truncated is None else pooled(result.truncated)
    return Analysis(
        rows=_rows(result, verdicts, alpha, how),
        parts=_parts(result, judged, each, alpha, how),
        verdicts=verdicts,
        reaches=_reaches(result, alpha, how),
        buckets=_buckets(result, alpha, how),
        family=family,
        units=len(np.unique(result.unit)),
        unit_kind=result.unit_kind,
        documents=len(np.unique(result.document)),
        n_targets=len(result.document),
        unigram=unigram,
        learned=None if unigram is None or base is None else unigram - base,
        notes=notes,
    )


def _of_rule(result: Result, label: str) -> dict[int, np.ndarray]:
    return {length: nll for (rule, length), nll in result.nll.items() if rule == label}


def _max_t(result: Result, judged: list[str], alpha: float, family: int, how: dict) -> float:
    """The alpha of each interval of the family; that of Bonferroni where a cell of it failed."""
    l0 = result.subject.trained_length
    found = [
        unit_means(nll - result.truncated, result.unit)
        for (label, length), nll in result.nll.items()
        if label in judged and length > l0
    ]
    return (
        max_t_alpha(np.stack(found, axis=1), alpha=alpha, **how) if len(found) == family else alpha / family
    )


def _rows(result: Result, verdicts: list[RuleVerdicts], alpha: float, how: dict) -> list[Row]:
    found = {(v.rule, one.length): one for v in verdicts for one in v.verdicts}
    rows = []
    for rule in result.rules:
        for length in result.plan.lengths:
            where = (rule.label, length)
            scheme = describe_scheme(result, rule.label, length)
            nll = result.nll.get(where)
            if where in result.absent:
                rows.append(Row(rule.label, scheme, length, failure=result.absent[where], exists=False))
            elif where in result.failed:
                rows.append(Row(rule.label, scheme, length, failure=result.failed[where]))
            elif nll is not None:
                verdict = found.get(where)
                rows.append(
                    Row(
                        rule.label,
                        scheme,
                        length,
                        pooled(nll),
                        perplexity(nll),
                        bits_per_byte(nll, result.n_bytes),
                        interval(unit_means(nll, result.unit), alpha=alpha, **how),
                        verdict,
                        verdict.delta if verdict else None,
                        _gain(result, nll, slice(None), alpha, how),
                        result.precision.get(where),
                    )
                )
    return rows


def _gain(result: Result, nll: np.ndarray, where, alpha: float, how: dict) -> Interval | None:
    if result.truncated is None:
        return None
    return net_gain(nll[where], result.truncated[where], result.unit[where], alpha=alpha, **how)


def _parts(result: Result, judged: list[str], each: dict, alpha: float, how: dict) -> list[Part]:
    """The units whose cluster (or document) is not in the training text, and those whose is: no verdicts,
    which are of all units.
    """
    seen = result.seen
    if seen is None or result.plan.protocol == "by-position" or seen.all() or not seen.any():
        return []
    parts, l0 = [], result.subject.trained_length
    for known in (False, True):
        where = seen == known
        unit, rows = result.unit[where], []
        for (label, length), nll in result.nll.items():
            delta = None
            if result.truncated is not None and label in judged and length > l0:
                delta = interval(unit_means((nll - result.truncated)[where], unit), **each, **how)
            rows.append(
                Row(
                    label,
                    describe_scheme(result, label, length),
                    length,
                    pooled(nll[where]),
                    perplexity(nll[where]),
                    level=interval(unit_means(nll[where], unit), alpha=alpha, **how),
                    delta=delta,
                    gain=_gain(result, nll, where, alpha, how),
                )
            )
        rows.sort(key=lambda row: [one.label for one in result.rules].index(row.rule))
        documents = len(np.unique(result.document[where]))
        parts.append(Part(known, len(np.unique(unit)), documents, int(where.sum()), rows))
    return parts


def _reaches(result: Result, alpha: float, how: dict) -> list[Reach]:
    """Context reach of every rule with two lengths. Not of non-overlapping windows, where a longer length
    also means fewer targets with little context, nor by position, where there is one length.
    """
    if result.plan.protocol not in ("fixed-targets", "sliding"):
        return []
    found = {rule.label: _of_rule(result, rule.label) for rule in result.rules if not rule.truncates}
    return [
        context_reach(
            label,
            nll,
            result.unit,
            tolerance=result.settings.tolerance,
            failed=[n for rule, n in result.failed if rule == label],
            alpha=alpha,
            **how,
        )
        for label, nll in found.items()
        if len(nll) > 1
    ]


def _judged_rules(result: Result) -> tuple[list[str], list[str]]:
    """Labels a verdict may be given for, and a note for each that may not."""
    allowed = result.settings.tolerance / 10
    labels = [rule.label for rule in result.rules if rule.label != TRUNCATE]

    def off(label: str) -> float:
        return max((abs(d) for (rule, _), d in result.precision.items() if rule == label), default=0.0)

    bad = {label: off(label) for label in labels if off(label) >= allowed}
    notes = [
        f"{label}: no verdict, bfloat16 is off by {value:.4f} nats on average from float32 (allowed: "
        f"{allowed:.4f}); "
        "use dtype=float32"
        for label, value in bad.items()
    ]
    if TRAINED in bad:  # every verdict is about a difference from it
        return [], notes
    return [label for label in labels if label not in bad], notes


def _buckets(result: Result, alpha: float, how: dict) -> dict[str, list[Bucket]]:
    if result.plan.protocol != "by-position" or result.truncated is None:
        return {}
    longest = result.plan.lengths[-1]
    position = result.plan.windows[longest].target_positions()[result.screening.kept]
    return {
        rule: by_position(nll, result.truncated, position, result.unit, alpha=alpha, **how)
        for (rule, _), nll in result.nll.items()
    }


def describe_scheme(result: Result, label: str, length: int) -> str:
    """The scheme as evaluated at this length: `rope, yarn s=4 (matched)`."""
    if label == TRUNCATE:
        length = result.subject.trained_length
    position: Any = _POSITION.validate_python(result.schemes[label])
    kinds = getattr(position, "kinds", None) or {"": position}
    parts = [describe_choice(one, length, result.subject.original_length) for one in kinds.values()]
    tail = f", context cut to {length}" if label == TRUNCATE else ""
    return " | ".join(parts) + tail
