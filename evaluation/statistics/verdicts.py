"""Definitions of the derived numbers.

All are based on paired differences on the same targets. The reference is the checkpoint as trained
at its
trained length L0, also for methods: a method that is bad at L0 could otherwise appear to gain.
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
    upper_bound,
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
    """One method over all lengths. `held_to` and `break_point` are lengths or None."""

    method: str
    verdicts: list[Verdict]
    held_to: int | None
    break_point: int | None


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
    alpha: float,
    family: int,
    span: int | None = None,
    document: np.ndarray | None = None,
    failed: Collection[int] = (),
    resamples: int = 10_000,
    seed: int = 0,
) -> MethodVerdicts:
    """Verdicts for every measured length > L0.

    broken: the simultaneous lower bound exceeds the tolerance. held: the one-sided 97.5% upper
        bound is
    below it at this and at every shorter length of the grid from L0 on. Otherwise inconclusive:
    held is never inferred from "not broken". `unit` (n_targets,); `span`: targets per span, if
    every `document` (n_targets,; default: the unit) has equally many spans; `failed`: lengths that
    could not be measured: no longer length is held.
    """
    verdicts: list[Verdict] = []
    holding = True
    for length in sorted(n for n in nll if n >= trained_length):
        difference = nll[length] - reference
        means = unit_means(difference, unit)
        holding = holding and not any(trained_length <= bad < length for bad in failed)
        upper = upper_bound(means)
        holding = holding and upper < tolerance
        if length == trained_length:
            continue
        level = {"alpha": alpha, "family": family}
        delta = interval(means, **level, resamples=resamples, seed=seed)
        if math.isnan(upper):
            word = "points only"
        elif delta.low > tolerance:
            word = "broken"
        else:
            word = "held" if holding else "inconclusive"
        units = spans = None
        if delta.half > tolerance:
            units = units_needed(delta.sd, tolerance, **level)
            of = unit if document is None else document
            spans = _spans_needed(
                difference,
                unit,
                of,
                span,
                tolerance,
                **level,
            )
        verdicts.append(Verdict(length, word, delta, upper, units, spans))
    held = [v.length for v in verdicts if v.word == "held"]
    broken = [v.length for v in verdicts if v.word == "broken"]
    return MethodVerdicts(
        method,
        verdicts,
        max(held, default=None),
        min(broken, default=None),
    )


def _spans_needed(
    difference: np.ndarray,
    unit: np.ndarray,
    document: np.ndarray,
    span: int | None,
    half: float,
    **how,
) -> int | None:
    """Spans per document that would be enough, if every document has equally many of `span`
    targets."""
    _, first, counts = np.unique(
        document,
        return_index=True,
        return_counts=True,
    )
    if span is None or len(set(counts.tolist())) != 1 or counts[0] % span:
        return None
    ordered = difference[np.argsort(document, kind="stable")]
    means = ordered.reshape(len(counts), counts[0] // span, span).mean(axis=2)
    return spans_needed(means, unit[first], half, **how)


def net_gain(nll: np.ndarray, truncated: np.ndarray, unit: np.ndarray, **how) -> Interval:
    """NLL(as trained, context truncated to L0) - NLL(method, L). Positive: the additional context
    helps."""
    return interval(unit_means(truncated - nll, unit), **how)


@dataclass(frozen=True)
class PositionBucket:
    """Targets whose position in the window lies in [low, high)."""

    low: int
    high: int
    count: int
    nll: float
    gain: Interval  # truncation baseline - method on the same tokens, nats


def by_position(
    nll: np.ndarray, truncated: np.ndarray, position: np.ndarray, unit: np.ndarray, **how
) -> list[PositionBucket]:
    """NLL by position in geometric buckets [2^k, 2^(k+1)), the first being {0}; gain paired per
    bucket."""
    buckets = []
    low = 0
    high = 1
    while low <= int(position.max()):
        inside = (position >= low) & (position < high)
        if inside.any():
            gain = interval(unit_means((truncated - nll)[inside], unit[inside]), **how)
            buckets.append(PositionBucket(low, high, int(inside.sum()), pooled(nll[inside]), gain))
        low = high
        high = high * 2
    return buckets
