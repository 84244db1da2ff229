"""The table of results of losses: levels, changes with their verdicts, context reach, differences.

All numbers are paired differences on the same targets. The reference is the checkpoint as trained
at its trained length L0, also for methods: a method that is bad at L0 could otherwise appear to
gain. The same functions serve one checkpoint under several methods, several runs, and the schemes
of a study, whose losses have an axis of training seeds.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from pydantic import TypeAdapter

from errors import EvaluationError
from evaluation.results_table import ResultsTable
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.intervals import (
    MeanInterval,
    interval,
    interval_columns,
    interval_over_units,
    seed_means,
    unit_counts,
    unit_means,
)
from model import AnyPosition

HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
UNDERTRAINED = 0.5  # a model is undertrained if it is fewer nats below a unigram model
PRECISION = 0.1  # share of the tolerance that bfloat16 may be off for a verdict
_POSITION = TypeAdapter(AnyPosition)


@dataclass(frozen=True)
class VerdictRules:
    """How changes are judged.

    Attributes:
        tolerance: in nats.
        counts: (D,) targets of each unit.
        alpha: of intervals; simultaneous over `family` for changes.
        has_learned: False for an undertrained model. Its loss holds at any length, so it gets
            neither "held" nor a context reach.
        is_precise: False for numbers with rounding errors, which are neither held nor broken.
    """

    trained_length: int
    tolerance: float
    counts: np.ndarray
    alpha: float = 0.05
    family: int = 1
    has_learned: bool = True
    is_precise: bool = True

    def interval(self, values: np.ndarray, **level) -> MeanInterval:
        return interval(values, self.counts, **level)


@dataclass(kw_only=True)
class VariantLosses:
    """The NLL of one variant on the same targets at every length.

    Attributes:
        nll: by length, ascending: (n,) of each target of one checkpoint, or (S, D) means of each
            seed and unit.
        as_trained: the same of the same checkpoints as trained at L0.
        unit: (n,) units of the targets of one checkpoint.
        seeds: names of the S seeds.
        failures: why there is no number, by length.
        failed: the lengths among them that could have been measured.
        notes: the scheme as evaluated, by length.
        more: further metrics, by length.
    """

    nll: dict[int, np.ndarray] = field(default_factory=dict)
    as_trained: np.ndarray | None = None
    unit: np.ndarray | None = None
    seeds: Sequence[str] = ()
    failures: dict[int, str] = field(default_factory=dict)
    failed: Collection[int] = ()
    notes: dict[int, str] = field(default_factory=dict)
    more: dict[int, dict[str, float]] = field(default_factory=dict)

    def by_unit(self, values: np.ndarray) -> np.ndarray:
        """Means of each unit: (D,) or (S, D)."""
        return values if self.unit is None else unit_means(values, self.unit)


def is_undertrained(as_trained: float | None, unigram: float | None) -> bool:
    """Whether a model with the NLL `as_trained` at its trained length is hardly better than a
    unigram model on the same targets; False where one of the two is unknown."""
    if as_trained is None or unigram is None:
        return False
    return as_trained > unigram - UNDERTRAINED


def add_levels(
    table: ResultsTable, variant: str, losses: VariantLosses, rules: VerdictRules
) -> None:
    """Add NLL, gain over truncation and further metrics at every length, or why there is none."""
    for length in sorted({*losses.nll, *losses.failures}):
        if length in losses.failures:
            table.add(variant, "failure", math.nan, length, note=losses.failures[length])
        if length not in losses.nll:
            continue
        nll = losses.nll[length]
        level = rules.interval(losses.by_unit(nll), alpha=rules.alpha)
        table.add(variant, "nll", level, length, note=losses.notes.get(length, ""))
        add_seeds(table, variant, "nll", losses, nll, rules, length)
        table.add(variant, "perplexity", math.exp(level.estimate), length)
        if losses.as_trained is not None:
            gain = losses.by_unit(losses.as_trained - nll)
            table.add(variant, "gain", rules.interval(gain, alpha=rules.alpha), length)
        for metric, value in losses.more.get(length, {}).items():
            table.add(variant, metric, value, length)


def add_seeds(
    table: ResultsTable,
    variant: str,
    metric: str,
    losses: VariantLosses,
    values: np.ndarray,
    rules: VerdictRules,
    length: int,
) -> None:
    """Add the mean over targets of each seed."""
    if losses.seeds:
        means = seed_means(values, rules.counts)
        for seed, mean in zip(losses.seeds, means, strict=True):
            table.add(variant, metric, mean, length, seed=seed)


def add_verdicts(
    table: ResultsTable, variant: str, losses: VariantLosses, rules: VerdictRules
) -> None:
    """Add the change at every length, with verdicts beyond L0, and how far the variant held.

    broken: the lower bound, simultaneous over the family, exceeds the tolerance. held: the
    one-sided 97.5% upper bound is below it at this and at every shorter length of the grid from L0
    on; no length is held beyond one that failed. Otherwise inconclusive: held is never inferred
    from "not broken". Metrics: `delta` with its verdict, `delta_upper_one_sided`, and for all
    lengths `held_to` and `break_point`.
    """
    words = {}
    holding = rules.is_precise and rules.has_learned
    for length in sorted({*losses.nll, *losses.failed}):
        if length not in losses.nll:
            holding = holding and length < rules.trained_length
            continue
        change = losses.by_unit(losses.nll[length] - losses.as_trained)
        delta = rules.interval(change, alpha=rules.alpha, family=rules.family)
        upper = rules.interval(change).high
        if length >= rules.trained_length:
            holding = holding and upper < rules.tolerance
        word = ""
        if length > rules.trained_length:
            word = HELD if holding else INCONCLUSIVE
            if math.isnan(upper):
                word = POINTS_ONLY
            elif rules.is_precise and delta.low > rules.tolerance:
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


def add_reach(
    table: ResultsTable, variant: str, losses: VariantLosses, rules: VerdictRules
) -> None:
    """Add how far a variant uses context, from bounds of the gains NLL(l) − NLL(L′).

    gain_per_doubling: from one length of the grid to the next, with its own interval; positive:
    more context helps.

    context_reach: the smallest length L whose context no longer one improves on; NaN if that is not
    shown for any length. The gain of each L′ > L over the best context up to L is below the
    tolerance if its one-sided 97.5% upper bound is, for any l <= L and by Bonferroni over them. L′
    are tested from the longest downwards, and testing stops at the first failure, or at a length
    that could not be measured.

    gain_shown_to: the longest length that is better than every shorter one: the lower bounds over
    all l < L are positive, by Bonferroni over the grid.
    """
    lengths = list(losses.nll)
    if len(lengths) < 2:
        return

    def gain(a: int, b: int) -> np.ndarray:
        return losses.by_unit(losses.nll[a] - losses.nll[b])

    def upper(a: int, b: int, tests: int) -> float:
        """Of NLL(a) − NLL(b), one of so many bounds at 97.5% together."""
        return rules.interval(gain(a, b), family=tests).high

    for shorter, longer in pairwise(lengths):
        step = gain(shorter, longer) / math.log2(longer / shorter)
        table.add(variant, "gain_per_doubling", rules.interval(step, alpha=rules.alpha), longer)
    if not rules.has_learned or math.isnan(upper(lengths[0], lengths[1], 1)):
        return  # or too few units or seeds for any bound
    reach = math.nan
    for n in range(len(lengths) - 1, 0, -1):
        up_to = lengths[:n]
        bounds = [min(upper(shorter, longer, n) for shorter in up_to) for longer in lengths[n:]]
        if any(each > up_to[-1] for each in losses.failed) or not max(bounds) < rules.tolerance:
            break
        reach = up_to[-1]
    shown = lengths[0]
    for n in range(1, len(lengths)):
        if max(upper(lengths[n], shorter, len(lengths) - 1) for shorter in lengths[:n]) < 0:
            shown = lengths[n]
    if reach > shown:
        text = f"at most {reach:,}; no gain is shown beyond {shown:,}"
    elif reach <= shown:
        text = f"at most {reach:,}"
    elif shown == max((*lengths, *losses.failed)):
        text = f"a gain is shown up to {shown:,}, the longest length"
    else:
        text = f"a gain is shown up to {shown:,} and not excluded beyond"
    table.add(variant, "context_reach", reach, note=text)
    table.add(variant, "gain_shown_to", shown)


# One checkpoint.


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
    protocol = result.plan.protocol
    has_baseline = result.truncated is not None
    unigram = None if result.unigram is None else float(result.unigram.mean())
    truncated = None if result.truncated is None else float(result.truncated.mean())
    judged, notes = _judged_methods(result)
    cells = {(label, n) for label in judged for n in result.plan.lengths if n > l0}
    rules = VerdictRules(
        l0,
        result.settings.tolerance,
        unit_counts(result.unit),
        alpha=1 - result.settings.confidence,
        family=max(1, len(cells - result.absent.keys())),
        has_learned=not is_undertrained(truncated, unigram),
    )
    table = ResultsTable()
    for method in result.methods:
        losses = losses_of(result, method.label)
        name = name_of(method.label)
        add_levels(table, name, losses, rules)
        if method.label in judged and has_baseline and protocol != "by-position":
            add_verdicts(table, name, losses, rules)
        # Not for non-overlapping windows, where a longer length also means fewer targets with
        # little context, nor by position, which has one length.
        if protocol in ("fixed-targets", "sliding") and not method.truncates:
            add_reach(table, name, losses, rules)
    return Analysis(
        table=table,
        buckets=by_position(result) if protocol == "by-position" and has_baseline else {},
        read_gains=list(read_gains(result)),
        family=rules.family,
        unigram=unigram,
        truncated=truncated,
        notes=notes,
    )


def losses_of(result: EvaluationResult, label: str) -> VariantLosses:
    """The losses of a checkpoint under one method."""
    nll = {}
    more: dict[int, dict[str, float]] = {}
    failures = {}
    for length in result.plan.lengths:
        cell = (label, length)
        if failure := result.absent.get(cell) or result.failed.get(cell):
            failures[length] = failure
        if cell in result.nll:
            nll[length] = result.nll[cell]
            bits = bits_per_byte(nll[length], result.n_bytes)
            more[length] = {} if bits is None else {"bits_per_byte": bits}
            if cell in result.precision:
                more[length]["bfloat16_minus_float32"] = result.precision[cell]
    return VariantLosses(
        nll=nll,
        as_trained=result.truncated,
        unit=result.unit,
        failures=failures,
        failed=[length for each, length in result.failed if each == label],
        notes={length: describe_scheme(result, label, length) for length in result.plan.lengths},
        more=more,
    )


def bits_per_byte(nll: np.ndarray, n_bytes: int | None) -> float | None:
    """Sum of NLL / ln 2 / bytes of the targets' raw text; None if the number of bytes is
    unknown."""
    return float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None


def _judged_methods(result: EvaluationResult) -> tuple[list[str], list[str]]:
    """Labels that get a verdict, and a note for each that does not."""
    allowed = PRECISION * result.settings.tolerance
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
