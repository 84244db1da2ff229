"""Analyse per-target NLL: levels, differences, verdicts, net gains."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from evaluation.errors import EvaluationError
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.context_reach import ContextReach, context_reach
from evaluation.statistics.intervals import Interval, interval, max_t_alpha, unit_means
from evaluation.statistics.verdicts import (
    MethodVerdicts,
    PositionBucket,
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
class AnalysisRow:
    """One cell. Fields are None if they do not apply or the cell failed."""

    method: str
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
class SubsetAnalysis:
    """The rows of the units whose cluster is in the training text, or of the others."""

    seen: bool
    units: int
    documents: int
    n_targets: int
    rows: list[AnalysisRow]


@dataclass(frozen=True)
class Analysis:
    """Rows in the order of methods and lengths, verdicts of the judged methods, and notes about them."""

    rows: list[AnalysisRow]
    parts: list[SubsetAnalysis]  # the unseen and the seen, where there are both
    verdicts: list[MethodVerdicts]
    reaches: list[ContextReach]
    buckets: dict[str, list[PositionBucket]]
    family: int
    units: int
    unit_kind: str
    documents: int
    n_targets: int
    unigram: float | None
    learned: float | None  # unigram NLL - NLL(as trained, L0) on the same targets
    notes: list[str]


def analyse(result: EvaluationResult) -> Analysis:
    """Derive all numbers of one evaluation. Raises EvaluationError if no cell has a finite mean."""
    if result.failed and not result.nll:
        raise EvaluationError(
            f"{result.subject.name}: no cell of step {result.subject.step} could be measured, under any "
            f"method at any length ({next(iter(result.failed.values()))}); evaluate another checkpoint"
        )
    settings, l0 = result.settings, result.subject.trained_length
    alpha = 1 - settings.confidence
    how = {"resamples": settings.resamples, "seed": settings.seed}
    judged, notes = _judged_methods(result)
    # The family: every method that is judged at every length beyond L0, against one named reference.
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
                    _of_method(result, label),
                    result.truncated,
                    result.unit,
                    l0,
                    tolerance=settings.tolerance,
                    span=span,
                    document=result.document,
                    failed=[n for method, n in result.failed if method == label],
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


def _of_method(result: EvaluationResult, label: str) -> dict[int, np.ndarray]:
    return {length: nll for (method, length), nll in result.nll.items() if method == label}


def _max_t(result: EvaluationResult, judged: list[str], alpha: float, family: int, how: dict) -> float:
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


def _rows(
    result: EvaluationResult, verdicts: list[MethodVerdicts], alpha: float, how: dict
) -> list[AnalysisRow]:
    found = {(v.method, one.length): one for v in verdicts for one in v.verdicts}
    rows = []
    for method in result.methods:
        for length in result.plan.lengths:
            where = (method.label, length)
            scheme = describe_scheme(result, method.label, length)
            nll = result.nll.get(where)
            if where in result.absent:
                rows.append(
                    AnalysisRow(method.label, scheme, length, failure=result.absent[where], exists=False)
                )
            elif where in result.failed:
                rows.append(AnalysisRow(method.label, scheme, length, failure=result.failed[where]))
            elif nll is not None:
                verdict = found.get(where)
                rows.append(
                    AnalysisRow(
                        method.label,
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


def _gain(result: EvaluationResult, nll: np.ndarray, where, alpha: float, how: dict) -> Interval | None:
    if result.truncated is None:
        return None
    return net_gain(nll[where], result.truncated[where], result.unit[where], alpha=alpha, **how)


def _parts(
    result: EvaluationResult, judged: list[str], each: dict, alpha: float, how: dict
) -> list[SubsetAnalysis]:
    """The units whose cluster (or document) is not in the training text, and the others, without verdicts."""
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
                AnalysisRow(
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
        rows.sort(key=lambda row: [one.label for one in result.methods].index(row.method))
        documents = len(np.unique(result.document[where]))
        parts.append(SubsetAnalysis(known, len(np.unique(unit)), documents, int(where.sum()), rows))
    return parts


def _reaches(result: EvaluationResult, alpha: float, how: dict) -> list[ContextReach]:
    """Context reach of every method with two lengths. Not for non-overlapping windows, where a longer length
    also means fewer targets with little context, nor by position, which has one length.
    """
    if result.plan.protocol not in ("fixed-targets", "sliding"):
        return []
    found = {
        method.label: _of_method(result, method.label) for method in result.methods if not method.truncates
    }
    return [
        context_reach(
            label,
            nll,
            result.unit,
            tolerance=result.settings.tolerance,
            failed=[n for method, n in result.failed if method == label],
            alpha=alpha,
            **how,
        )
        for label, nll in found.items()
        if len(nll) > 1
    ]


def _judged_methods(result: EvaluationResult) -> tuple[list[str], list[str]]:
    """Labels that get a verdict, and a note for each that does not."""
    allowed = result.settings.tolerance / 10
    labels = [method.label for method in result.methods if method.label != TRUNCATE]

    def off(label: str) -> float:
        return max((abs(d) for (method, _), d in result.precision.items() if method == label), default=0.0)

    bad = {label: off(label) for label in labels if off(label) >= allowed}
    notes = [
        f"{label}: no verdict: bfloat16 differs by {value:.4f} nats on average from float32 (allowed: "
        f"{allowed:.4f}); "
        "use dtype=float32"
        for label, value in bad.items()
    ]
    if TRAINED in bad:  # every verdict is about a difference from it
        return [], notes
    return [label for label in labels if label not in bad], notes


def _buckets(result: EvaluationResult, alpha: float, how: dict) -> dict[str, list[PositionBucket]]:
    if result.plan.protocol != "by-position" or result.truncated is None:
        return {}
    longest = result.plan.lengths[-1]
    position = result.plan.windows[longest].target_positions()[result.screening.kept]
    return {
        method: by_position(nll, result.truncated, position, result.unit, alpha=alpha, **how)
        for (method, _), nll in result.nll.items()
    }


def describe_scheme(result: EvaluationResult, label: str, length: int) -> str:
    """The scheme as evaluated at this length: `rope, yarn s=4 (matched)`."""
    if label == TRUNCATE:
        length = result.subject.trained_length
    position: Any = _POSITION.validate_python(result.schemes[label])
    kinds = getattr(position, "kinds", None) or {"": position}
    parts = [describe_choice(one, length, result.subject.original_length) for one in kinds.values()]
    tail = f", context truncated to {length}" if label == TRUNCATE else ""
    return " | ".join(parts) + tail
