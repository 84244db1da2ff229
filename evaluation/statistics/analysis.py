"""Analyze per-target NLL: levels, differences, verdicts, net gains."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from pydantic import TypeAdapter

from errors import EvaluationError
from evaluation.results_table import ResultsTable
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.context_reach import add_reach
from evaluation.statistics.intervals import (
    interval,
    interval_over_units,
    unit_counts,
    unit_means,
)
from evaluation.statistics.verdicts import (
    VerdictRules,
    add_verdicts,
    bits_per_byte,
    by_position,
    is_undertrained,
    read_gains,
)
from model import AnyPosition

_POSITION = TypeAdapter(AnyPosition)


@dataclass(frozen=True)
class Analysis:
    """The numbers of one evaluation.

    Attributes:
        table: the long table; variants are the names of methods (`name_of`).
        buckets, read_gains: parts of results.json by position, and of repeated text.
        unigram, truncated: NLL of a unigram model and as trained at L0, on the same targets.
        notes: about the methods without a verdict.
    """

    table: ResultsTable
    buckets: dict[str, list[dict]]
    read_gains: list[dict]
    family: int
    unigram: float | None
    truncated: float | None
    notes: list[str]


def analyze(result: EvaluationResult) -> Analysis:
    """Derive all numbers of one evaluation. Raises EvaluationError if no cell has a finite mean."""
    if result.failed and not result.nll:
        raise EvaluationError(
            f"{result.subject.name}: no cell of step {result.subject.step} could be measured, "
            f"under any method at any length ({next(iter(result.failed.values()))}); evaluate "
            "another checkpoint"
        )
    l0 = result.subject.trained_length
    has_baseline = result.truncated is not None
    unigram = None if result.unigram is None else float(result.unigram.mean())
    truncated = float(result.truncated.mean()) if has_baseline else None
    is_by_position = result.plan.protocol == "by-position"
    judged, notes = _judged_methods(result)
    cells = {(label, n) for label in judged for n in result.plan.lengths if n > l0}
    rules = VerdictRules(
        l0,
        result.settings.tolerance,
        interval=partial(interval, counts=unit_counts(result.unit)),
        alpha=1 - result.settings.confidence,
        family=max(1, len(cells - result.absent.keys())),
        has_learned=not is_undertrained(truncated, unigram),
    )
    if not has_baseline or is_by_position:
        judged = []
    # Not for non-overlapping windows, where a longer length also means fewer targets with little
    # context, nor by position, which has one length.
    has_reach = result.plan.protocol in ("fixed-targets", "sliding")
    table = ResultsTable()
    for method in result.methods:
        label = method.label
        name = name_of(label)
        add_levels(table, result, label, name)
        nll = {n: own for (each, n), own in result.nll.items() if each == label}
        failed = [n for each, n in result.failed if each == label]
        if label in judged:
            changes = {n: unit_means(own - result.truncated, result.unit) for n, own in nll.items()}
            add_verdicts(table, name, changes, rules, missing=failed)
        if has_reach and not method.truncates and len(nll) > 1:

            def gain(a: int, b: int, nll: dict[int, np.ndarray] = nll) -> np.ndarray:
                return unit_means(nll[a] - nll[b], result.unit)

            add_reach(table, name, sorted(nll), gain, rules, failed)
    return Analysis(
        table=table,
        buckets=by_position(result) if is_by_position and has_baseline else {},
        read_gains=list(read_gains(result)),
        family=rules.family,
        unigram=unigram,
        truncated=truncated,
        notes=notes,
    )


def add_levels(table: ResultsTable, result: EvaluationResult, label: str, name: str) -> None:
    """Add NLL and gain over truncation of a method at every length as those of the variant `name`;
    the note of `nll` is the scheme as evaluated."""
    alpha = 1 - result.settings.confidence
    for length in result.plan.lengths:
        cell = (label, length)
        failure = result.absent.get(cell) or result.failed.get(cell)
        if failure:
            table.add(name, "failure", math.nan, length, note=failure)
        if cell not in result.nll:
            continue
        nll = result.nll[cell]
        level = interval_over_units(nll, result.unit, alpha=alpha)
        table.add(name, "nll", level, length, note=describe_scheme(result, label, length))
        table.add(name, "perplexity", math.exp(level.estimate), length)
        if result.truncated is not None:
            gain = interval_over_units(result.truncated - nll, result.unit, alpha=alpha)
            table.add(name, "gain", gain, length)
        bits = bits_per_byte(nll, result.n_bytes)
        if bits is not None:
            table.add(name, "bits_per_byte", bits, length)
        if cell in result.precision:
            table.add(name, "bfloat16_minus_float32", result.precision[cell], length)


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
