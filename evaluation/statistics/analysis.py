"""Analyze per-target NLL: levels, differences, verdicts, net gains."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from pydantic import TypeAdapter

from errors import EvaluationError
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
    analyser = _Analyser(result)
    verdicts = analyser.verdicts()
    by_cell = {
        (judged.method, verdict.length): verdict
        for judged in verdicts
        for verdict in judged.verdicts
    }
    measured = result.absent.keys() | result.failed.keys() | result.nll.keys()
    unigram = None if result.unigram is None else pooled(result.unigram)
    learned = None
    if unigram is not None and result.truncated is not None:
        learned = unigram - pooled(result.truncated)
    return Analysis(
        rows=[
            analyser.row(*cell, verdict=by_cell.get(cell))
            for cell in analyser.cells
            if cell in measured
        ],
        parts=analyser.parts(),
        verdicts=verdicts,
        reaches=analyser.reaches(),
        buckets=analyser.buckets(),
        family=analyser.family,
        units=len(np.unique(result.unit)),
        unit_kind=result.unit_kind,
        documents=len(np.unique(result.document)),
        n_targets=len(result.document),
        unigram=unigram,
        learned=learned,
        notes=analyser.notes,
    )


class _Analyser:
    """The intervals of one evaluation: `individual`, and `joint`: simultaneous over the `family`,
    every method that is judged at every length beyond L0, against as trained at L0."""

    def __init__(self, result: EvaluationResult):
        self.result = result
        settings = result.settings
        self.trained_length = result.subject.trained_length
        self.by_position = settings.protocol == "by-position"
        self.cells = [(method.label, n) for method in result.methods for n in result.plan.lengths]
        self.judged, self.notes = _judged_methods(result)
        beyond = [cell for cell in self.cells if self.is_judged(*cell)]
        self.family = max(1, sum(cell not in result.absent for cell in beyond))
        alpha = 1 - settings.confidence
        self.individual = partial(
            interval, alpha=alpha, resamples=settings.resamples, seed=settings.seed
        )
        self.joint = partial(self.individual, family=self.family)
        changes = [
            unit_means(result.nll[cell] - result.truncated, result.unit)
            for cell in beyond
            if cell in result.nll and result.truncated is not None
        ]
        # Bonferroni where a cell of the family failed.
        if (
            settings.simultaneous == "max-t"
            and len(changes) == self.family
            and not self.by_position
        ):
            alpha = max_t_alpha(
                np.stack(changes, axis=1),
                alpha=alpha,
                resamples=settings.resamples,
                seed=settings.seed,
            )
            self.joint = partial(self.individual, alpha=alpha)

    def is_judged(self, label: str, length: int) -> bool:
        return label in self.judged and length > self.trained_length

    def nll_of(self, label: str) -> dict[int, np.ndarray]:
        return {length: nll for (method, length), nll in self.result.nll.items() if method == label}

    def failed_of(self, label: str) -> list[int]:
        return [length for method, length in self.result.failed if method == label]

    def row(
        self,
        label: str,
        length: int,
        where: np.ndarray | None = None,
        verdict: Verdict | None = None,
    ) -> AnalysisRow:
        """One cell, of all targets or of those in the mask `where` (n_targets,)."""
        result = self.result
        cell = (label, length)
        row = AnalysisRow(label, describe_scheme(result, label, length), length)
        failure = result.absent.get(cell) or result.failed.get(cell)
        if failure:
            return replace(row, failure=failure, exists=cell not in result.absent)
        targets = slice(None) if where is None else where
        nll = result.nll[cell][targets]
        unit = result.unit[targets]
        base = None if result.truncated is None else result.truncated[targets]
        row = replace(
            row,
            nll=pooled(nll),
            perplexity=perplexity(nll),
            level=self.individual(unit_means(nll, unit)),
            gain=None if base is None else self.individual(unit_means(base - nll, unit)),
        )
        if where is None:
            return replace(
                row,
                bits_per_byte=bits_per_byte(nll, result.n_bytes),
                verdict=verdict,
                delta=verdict.delta if verdict else None,
                precision=result.precision.get(cell),
            )
        if base is not None and self.is_judged(*cell):
            return replace(row, delta=self.joint(unit_means(nll - base, unit)))
        return row

    def verdicts(self) -> list[MethodVerdicts]:
        result = self.result
        if result.truncated is None or self.by_position:
            return []
        return [
            judge(
                label,
                self.nll_of(label),
                result.truncated,
                result.unit,
                self.trained_length,
                tolerance=result.settings.tolerance,
                joint=self.joint,
                # else spans are not equally long
                span=result.plan.span if result.screening.kept.all() else None,
                document=result.document,
                failed=self.failed_of(label),
            )
            for label in self.judged
        ]

    def parts(self) -> list[SubsetAnalysis]:
        """The units whose cluster (or document) is not in the training text, and the others, no
        verdicts."""
        result = self.result
        seen = result.seen
        if seen is None or self.by_position or seen.all() or not seen.any():
            return []
        return [
            SubsetAnalysis(
                seen=known,
                units=len(np.unique(result.unit[seen == known])),
                documents=len(np.unique(result.document[seen == known])),
                n_targets=int((seen == known).sum()),
                rows=[self.row(*cell, seen == known) for cell in self.cells if cell in result.nll],
            )
            for known in (False, True)
        ]

    def reaches(self) -> list[ContextReach]:
        """Context reach of every method with two lengths. Not for non-overlapping windows, where a
        longer length also means fewer targets with little context, nor by position, which has one
        length."""
        result = self.result
        settings = result.settings
        if result.plan.protocol not in ("fixed-targets", "sliding"):
            return []
        return [
            context_reach(
                method.label,
                nll,
                result.unit,
                tolerance=settings.tolerance,
                failed=self.failed_of(method.label),
                alpha=1 - settings.confidence,
                resamples=settings.resamples,
                seed=settings.seed,
            )
            for method in result.methods
            if not method.truncates and len(nll := self.nll_of(method.label)) > 1
        ]

    def buckets(self) -> dict[str, list[PositionBucket]]:
        result = self.result
        if not self.by_position or result.truncated is None:
            return {}
        positions = result.plan.windows[result.plan.lengths[-1]].target_positions()
        position = positions[result.screening.kept]
        return {
            method: by_position(nll, result.truncated, position, result.unit, self.individual)
            for (method, _), nll in result.nll.items()
        }


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
