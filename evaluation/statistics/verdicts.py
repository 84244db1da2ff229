"""Definitions of the derived numbers.

All are based on paired differences on the same targets. The reference is the checkpoint as trained
at its trained length L0, also for methods: a method that is bad at L0 could otherwise appear to
gain.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from evaluation.statistics.intervals import (
    Interval,
    interval,
    spans_needed,
    unit_means,
    units_needed,
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one method at one length L > L0."""

    length: int
    word: str  # "held" | "broken" | "inconclusive" | "points only"
    delta: Interval  # NLL(method, L) - NLL(as trained, L0), simultaneous over the family
    upper: float  # one-sided 97.5% upper bound of the same difference
    # units for a half-width of at most the tolerance, if this one is wider
    units_needed: int | None
    spans_needed: int | None  # or spans per document with the same documents


@dataclass(frozen=True)
class MethodVerdicts:
    """One method over all lengths."""

    method: str
    verdicts: list[Verdict]

    @property
    def held_to(self) -> int | None:
        """The longest length held."""
        return max((v.length for v in self.verdicts if v.word == "held"), default=None)

    @property
    def break_point(self) -> int | None:
        """The shortest length broken."""
        return min((v.length for v in self.verdicts if v.word == "broken"), default=None)


def pooled(nll: np.ndarray) -> float:
    """Mean NLL over counted targets: sum / count, never a mean of window means."""
    return float(nll.sum() / len(nll))


def perplexity(nll: np.ndarray) -> float:
    return math.exp(pooled(nll))


def bits_per_byte(nll: np.ndarray, n_bytes: int | None) -> float | None:
    """Sum of NLL / ln 2 / bytes of the targets' raw text; None if the number of bytes is
    unknown."""
    return float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None


def judge(
    method: str,
    nll: dict[int, np.ndarray],
    reference: np.ndarray,
    unit: np.ndarray,
    trained_length: int,
    *,
    tolerance: float,
    alpha: float = 0.05,
    family: int = 1,
    span: int | None = None,
    document: np.ndarray | None = None,
    failed: Collection[int] = (),
) -> MethodVerdicts:
    """Verdicts for every measured length > L0.

    broken: the lower bound, simultaneous over the `family`, exceeds the tolerance. held: the
    one-sided 97.5% upper bound is below it at this and at every shorter length of the grid from L0
    on. Otherwise inconclusive: held is never inferred from "not broken". `unit` (n_targets,);
    `span`: targets per span, if every `document` (n_targets,; default: the unit) has equally many
    spans; `failed`: lengths that could not be measured: no longer length is held.
    """
    verdicts = []
    holding = True
    for length in sorted(n for n in nll if n >= trained_length):
        difference = nll[length] - reference
        means = unit_means(difference, unit)
        upper = interval(means).high
        skipped = any(trained_length <= shorter < length for shorter in failed)
        holding = holding and not skipped and upper < tolerance
        if length == trained_length:
            continue
        delta = interval(means, alpha=alpha, family=family)
        word = "held" if holding else "inconclusive"
        if math.isnan(upper):
            word = "points only"
        elif delta.low > tolerance:
            word = "broken"
        units = spans = None
        if delta.half > tolerance:
            level = 1 - delta.level
            units = units_needed(delta.sd, tolerance, alpha=level)
            of_spans = _span_means(difference, unit, unit if document is None else document, span)
            if of_spans is not None:
                spans = spans_needed(*of_spans, tolerance, alpha=level)
        verdicts.append(Verdict(length, word, delta, upper, units, spans))
    return MethodVerdicts(method, verdicts)


def _span_means(
    difference: np.ndarray, unit: np.ndarray, document: np.ndarray, span: int | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """(documents, N) means of the spans and (documents,) units, if every document has equally many
    spans of `span` targets."""
    _, first, counts = np.unique(document, return_index=True, return_counts=True)
    if span is None or np.ptp(counts) or counts[0] % span:
        return None
    ordered = difference[np.argsort(document, kind="stable")]
    return ordered.reshape(len(counts), -1, span).mean(axis=2), unit[first]


@dataclass(frozen=True)
class PositionBucket:
    """Targets whose position in the window lies in [low, high)."""

    low: int
    high: int
    count: int
    nll: float
    gain: Interval  # truncation baseline - method on the same tokens, nats


def by_position(
    nll: np.ndarray, truncated: np.ndarray, position: np.ndarray, unit: np.ndarray, alpha: float
) -> list[PositionBucket]:
    """NLL by position in geometric buckets [2^k, 2^(k+1)), the first being {0}; gain paired per
    bucket."""
    buckets = []
    exponents = np.frexp(position)[1]  # of the powers of two that lie above the positions
    for k in np.unique(exponents).tolist():
        inside = exponents == k
        gain = interval(unit_means((truncated - nll)[inside], unit[inside]), alpha=alpha)
        low = 2**k // 2
        buckets.append(PositionBucket(low, 2**k, int(inside.sum()), pooled(nll[inside]), gain))
    return buckets
