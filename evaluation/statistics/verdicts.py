"""Definitions of the derived numbers.

All are based on paired differences on the same targets. The reference is the checkpoint as trained
at its trained length L0, also for methods: a method that is bad at L0 could otherwise appear to
gain.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from evaluation.results_table import ResultsTable
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRUNCATE
from evaluation.statistics.intervals import (
    MeanInterval,
    interval_columns,
    interval_over_units,
    unit_counts,
    unit_means,
)

HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
UNDERTRAINED = 0.5  # a model is undertrained if it is fewer nats below a unigram model


@dataclass(frozen=True)
class VerdictRules:
    """How changes are judged.

    Attributes:
        tolerance: in nats.
        alpha: of intervals; simultaneous over `family` for changes.
        interval: of an array of changes and (alpha, family): over units (`intervals.interval`), or
            over seeds and units (`seeds.change`), with the counts of their targets.
        has_learned: False for an undertrained model. Its loss holds at any length, so it gets
            neither "held" nor a context reach.
    """

    trained_length: int
    tolerance: float
    interval: Callable[..., MeanInterval]
    alpha: float = 0.05
    family: int = 1
    has_learned: bool = True


def is_undertrained(as_trained: float | None, unigram: float | None) -> bool:
    """Whether a model with the NLL `as_trained` at its trained length is hardly better than a
    unigram model on the same targets; False where one of the two is unknown."""
    if as_trained is None or unigram is None:
        return False
    return as_trained > unigram - UNDERTRAINED


def bits_per_byte(nll: np.ndarray, n_bytes: int | None) -> float | None:
    """Sum of NLL / ln 2 / bytes of the targets' raw text; None if the number of bytes is
    unknown."""
    return float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None


def add_verdicts(
    table: ResultsTable,
    variant: str,
    changes: Mapping[int, np.ndarray],
    rules: VerdictRules,
    *,
    missing: Collection[int] = (),
    is_precise: bool = True,
) -> None:
    """Add the change at every length, with verdicts beyond L0, and how far the variant held.

    broken: the lower bound, simultaneous over the family, exceeds the tolerance. held: the
    one-sided 97.5% upper bound is below it at this and at every shorter length of the grid from L0
    on. Otherwise inconclusive: held is never inferred from "not broken". Metrics: `delta` with its
    verdict, `delta_upper_one_sided`, and for all lengths `held_to` and `break_point`.

    Args:
        changes: NLL(L) − NLL(as trained, L0) on the same targets, as `rules.interval` takes it.
        missing: lengths of the grid without a number: no longer length is held.
        is_precise: False for numbers with rounding errors, which are neither held nor broken.
    """
    words = {}
    holding = is_precise and rules.has_learned
    for length in sorted({*changes, *missing}):
        if length in missing:
            holding = holding and length < rules.trained_length
            continue
        delta = rules.interval(changes[length], alpha=rules.alpha, family=rules.family)
        upper = rules.interval(changes[length]).high
        if length >= rules.trained_length:
            holding = holding and upper < rules.tolerance
        word = ""
        if length > rules.trained_length:
            word = HELD if holding else INCONCLUSIVE
            if math.isnan(upper):
                word = POINTS_ONLY
            elif is_precise and delta.low > rules.tolerance:
                word = BROKEN
            words[length] = word
        table.add(variant, "delta", delta, length, verdict=word)
        table.add(variant, "delta_upper_one_sided", upper, length)
    held = [length for length, word in words.items() if word == HELD]
    broken = [length for length, word in words.items() if word == BROKEN]
    if held:
        table.add(variant, "held_to", max(held))
    if broken:
        table.add(variant, "break_point", min(broken))


def by_position(result: EvaluationResult) -> dict[str, list[dict]]:
    """NLL of each method by position in geometric buckets [2^k, 2^(k+1)), the first being {0}, up
    to the last position; gain over truncation paired per bucket."""
    ((length, windows),) = result.plan.windows.items()
    position = windows.target_positions()[result.screening.kept]
    exponents = np.frexp(position)[1]  # of the powers of two that are above the positions
    buckets: dict[str, list[dict]] = {}
    for (method, _), nll in result.nll.items():
        for k in np.unique(exponents).tolist():
            inside = exponents == k
            gains = (result.truncated - nll)[inside]
            alpha = 1 - result.settings.confidence
            gain = interval_over_units(gains, result.unit[inside], alpha=alpha)
            bucket = {
                "low": 2**k // 2,
                "high": min(2**k, length),
                "count": int(inside.sum()),
                "nll": float(nll[inside].mean()),
                "gain": {"estimate": gain.estimate, "low": gain.low, "high": gain.high},
            }
            buckets.setdefault(method, []).append(bucket)
    return buckets


def read_gains(result: EvaluationResult) -> Iterator[dict]:
    """The cell of results.json for each method, length and octave of distances, from [2^k,
    2^(k+1)); intervals over units, paired by target.

    readable: number of targets whose earlier occurrence is among the inputs; nll, control_nll:
    means over targets, before and after it was replaced, and of each unit; read_gain: what the
    model reads at this distance, control NLL − NLL.
    """
    targets = result.plan.repeats
    if targets is None:
        return
    units = result.units[np.repeat(targets.document, targets.keep)]
    octave = np.frexp(targets.target_distances())[1]
    for (method, length), losses in result.repeated.items():
        inputs = result.subject.trained_length if method == TRUNCATE else length
        readable = targets.is_readable(inputs)
        for k in np.unique(octave).tolist():
            here = octave == k
            unit = units[here]
            nll = losses[here]
            control = result.control[method, length][here]
            alpha = 1 - result.settings.confidence
            gain = interval_over_units(control - nll, unit, alpha=alpha)
            yield {
                "method": method,
                "length": length,
                "targets": len(nll),
                "nll": float(nll.mean()),
                "distance_low": 2**k // 2,
                "distance_high": 2**k,
                "readable": int(readable[here].sum()),
                "control_nll": float(control.mean()),
                **interval_columns("read_gain", gain),
                "units": [result.unit_names[each] for each in np.unique(unit)],
                "unit_targets": unit_counts(unit).tolist(),
                "unit_nll": unit_means(nll, unit).tolist(),
                "unit_control_nll": unit_means(control, unit).tolist(),
            }
