"""Analyze per-target NLL: levels, differences, verdicts, net gains."""

from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from errors import EvaluationError
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.context_reach import ContextReach, context_reach
from evaluation.statistics.intervals import Interval, interval, unit_means
from evaluation.statistics.read_gain import ReadGain, read_gains
from evaluation.statistics.verdicts import (
    MethodVerdicts,
    PositionBucket,
    Verdict,
    bits_per_byte,
    by_position,
    judge,
    perplexity,
    pooled,
)
from model import AnyPosition

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
    """Rows in the order of methods and lengths, verdicts of the judged methods, and notes about
    them."""

    rows: list[AnalysisRow]
    parts: list[SubsetAnalysis]  # the unseen and the seen, where there are both
    verdicts: list[MethodVerdicts]
    reaches: list[ContextReach]
    buckets: dict[str, list[PositionBucket]]
    read_gains: list[ReadGain]  # of repeated text
    family: int
    units: int
    unit_kind: str
    documents: int
    n_targets: int
    unigram: float | None
    learned: float | None  # unigram NLL - NLL(as trained, L0) on the same targets
    notes: list[str]


def analyze(result: EvaluationResult) -> Analysis:
    """Derive all numbers of one evaluation. Raises EvaluationError if no cell has a finite mean."""
    if result.failed and not result.nll:
        raise EvaluationError(
            f"{result.subject.name}: no cell of step {result.subject.step} could be measured, "
            f"under any method at any length ({next(iter(result.failed.values()))}); evaluate "
            "another checkpoint"
        )
    judged, notes = _judged_methods(result)
    cells = [(method.label, n) for method in result.methods for n in result.plan.lengths]
    trained_length = result.subject.trained_length
    beyond = {cell for cell in cells if cell[0] in judged and cell[1] > trained_length}
    family = max(1, len(beyond - result.absent.keys()))
    verdicts = []
    if result.truncated is not None and result.plan.protocol != "by-position":
        verdicts = [_verdicts(result, result.truncated, label, family) for label in judged]
    by_cell = {(of.method, verdict.length): verdict for of in verdicts for verdict in of.verdicts}
    parts = []
    seen = None if result.plan.protocol == "by-position" else result.seen
    if seen is not None and len(np.unique(seen)) > 1:
        parts = [_part(result, cells, known, beyond, family) for known in (False, True)]
    unigram = None if result.unigram is None else pooled(result.unigram)
    learned = None
    if unigram is not None and result.truncated is not None:
        learned = unigram - pooled(result.truncated)
    measured = result.absent.keys() | result.failed.keys() | result.nll.keys()
    return Analysis(
        rows=[_row(result, cell, by_cell.get(cell)) for cell in cells if cell in measured],
        parts=parts,
        verdicts=verdicts,
        reaches=_reaches(result),
        buckets=_buckets(result),
        read_gains=_read_gains(result),
        family=family,
        units=len(np.unique(result.unit)),
        unit_kind=result.unit_kind,
        documents=len(np.unique(result.document)),
        n_targets=len(result.document),
        unigram=unigram,
        learned=learned,
        notes=notes,
    )


def _row(result: EvaluationResult, cell: tuple[str, int], verdict: Verdict | None) -> AnalysisRow:
    """A cell over all units."""
    label, length = cell
    failure = result.absent.get(cell) or result.failed.get(cell)
    if failure:
        scheme = describe_scheme(result, label, length)
        return AnalysisRow(label, scheme, length, failure=failure, exists=cell not in result.absent)
    return replace(
        _levels(result, cell),
        bits_per_byte=bits_per_byte(result.nll[cell], result.n_bytes),
        verdict=verdict,
        delta=verdict.delta if verdict else None,
        precision=result.precision.get(cell),
    )


def _levels(
    result: EvaluationResult, cell: tuple[str, int], targets: np.ndarray | slice = slice(None)
) -> AnalysisRow:
    """The numbers of a cell over some of the targets."""
    label, length = cell
    alpha = 1 - result.settings.confidence
    nll = result.nll[cell][targets]
    unit = result.unit[targets]
    gain = None
    if result.truncated is not None:
        gain = interval(unit_means(result.truncated[targets] - nll, unit), alpha=alpha)
    return AnalysisRow(
        label,
        describe_scheme(result, label, length),
        length,
        nll=pooled(nll),
        perplexity=perplexity(nll),
        level=interval(unit_means(nll, unit), alpha=alpha),
        gain=gain,
    )


def _part(
    result: EvaluationResult,
    cells: list[tuple[str, int]],
    known: bool,
    beyond: set[tuple[str, int]],
    family: int,
) -> SubsetAnalysis:
    """The units whose cluster (or document) is in the training text, or the others; no verdicts."""
    here = result.seen == known
    unit = result.unit[here]
    rows = []
    for cell in cells:
        if cell in result.nll:
            row = _levels(result, cell, here)
            if cell in beyond and result.truncated is not None:
                change = unit_means((result.nll[cell] - result.truncated)[here], unit)
                alpha = 1 - result.settings.confidence
                row = replace(row, delta=interval(change, alpha=alpha, family=family))
            rows.append(row)
    return SubsetAnalysis(
        seen=known,
        units=len(np.unique(unit)),
        documents=len(np.unique(result.document[here])),
        n_targets=len(unit),
        rows=rows,
    )


def _by_length(result: EvaluationResult, label: str) -> dict[int, np.ndarray]:
    return {length: nll for (method, length), nll in result.nll.items() if method == label}


def _failed(result: EvaluationResult, label: str) -> list[int]:
    return [length for method, length in result.failed if method == label]


def _verdicts(
    result: EvaluationResult, reference: np.ndarray, label: str, family: int
) -> MethodVerdicts:
    return judge(
        label,
        _by_length(result, label),
        reference,
        result.unit,
        result.subject.trained_length,
        tolerance=result.settings.tolerance,
        alpha=1 - result.settings.confidence,
        family=family,
        # else spans are not equally long
        span=result.plan.span if result.screening.kept.all() else None,
        document=result.document,
        failed=_failed(result, label),
    )


def _reaches(result: EvaluationResult) -> list[ContextReach]:
    """Context reach of every method with two lengths. Not for non-overlapping windows, where a
    longer length also means fewer targets with little context, nor by position, which has one
    length."""
    if result.plan.protocol not in ("fixed-targets", "sliding"):
        return []
    reaches = []
    for method in result.methods:
        nll = _by_length(result, method.label)
        if method.truncates or len(nll) < 2:
            continue
        reaches.append(
            context_reach(
                method.label,
                sorted(nll),
                lambda a, b, nll=nll: unit_means(nll[a] - nll[b], result.unit),
                tolerance=result.settings.tolerance,
                failed=_failed(result, method.label),
                alpha=1 - result.settings.confidence,
            )
        )
    return reaches


def _buckets(result: EvaluationResult) -> dict[str, list[PositionBucket]]:
    if result.plan.protocol != "by-position" or result.truncated is None:
        return {}
    (windows,) = result.plan.windows.values()
    position = windows.target_positions()[result.screening.kept]
    alpha = 1 - result.settings.confidence
    return {
        method: by_position(nll, result.truncated, position, result.unit, alpha)
        for (method, _), nll in result.nll.items()
    }


def _read_gains(result: EvaluationResult) -> list[ReadGain]:
    l0 = result.subject.trained_length
    truncated = result.repeated.get((TRAINED, l0))
    return [
        bucket
        for (method, length), nll in result.repeated.items()
        for bucket in read_gains(
            method,
            length,
            result.plan.repeats,
            context=min(length, l0) if method == TRUNCATE else length,
            nll=nll,
            control=result.control[method, length],
            truncated=truncated,
            units=result.units,
            alpha=1 - result.settings.confidence,
        )
    ]


def _judged_methods(result: EvaluationResult) -> tuple[list[str], list[str]]:
    """Labels that get a verdict, and a note for each that does not."""
    allowed = result.settings.tolerance / 10
    worst: dict[str, float] = {}
    for (label, _), difference in result.precision.items():
        worst[label] = max(worst.get(label, 0.0), abs(difference))
    labels = [method.label for method in result.methods if not method.truncates]
    bad = [label for label in labels if worst.get(label, 0.0) >= allowed]
    notes = [
        f"{label}: no verdict: bfloat16 differs by {worst[label]:.4f} nats on average from "
        f"float32 (allowed: {allowed:.4f}); use dtype=float32"
        for label in bad
    ]
    # Every verdict is about a difference from the checkpoint as trained.
    return ([] if TRAINED in bad else [label for label in labels if label not in bad]), notes


def describe_scheme(result: EvaluationResult, label: str, length: int) -> str:
    """The scheme as evaluated at this length: `rope, yarn factor 4 (auto)`."""
    if label == TRUNCATE:
        length = result.subject.trained_length
    record = result.schemes[label]
    schemes = record["kinds"].values() if "kinds" in record else [record]
    parts = [
        _POSITION.validate_python(scheme).describe(length, result.subject.original_length)
        for scheme in schemes
    ]
    tail = f", context truncated to {length}" if label == TRUNCATE else ""
    return " | ".join(parts) + tail
