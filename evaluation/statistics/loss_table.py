"""The table of results of losses: levels, changes with their verdicts, context reach, differences.

All numbers are paired differences on the same targets. The reference is the checkpoint as trained
at its trained length L0, also for methods: a method that is bad at L0 could otherwise appear to
gain. The same functions serve one checkpoint under several methods, several runs, and the schemes
of a study, whose losses have an axis of training seeds.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from errors import EvaluationError
from evaluation.methods import TRAINED, TRUNCATE, name_of
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.statistics.intervals import (
    MeanInterval,
    interval,
    interval_columns,
    interval_over_units,
    seed_means,
    unit_counts,
    unit_means,
)
from evaluation.statistics.results_table import ResultRow, results_table, row_of
from model import AnyPosition

HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
UNDERTRAINED = 0.5  # a model is undertrained if it is fewer nats below a unigram model
PRECISION = 0.1  # share of the tolerance that half precision may be off for a verdict
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
        baseline_nll: as `nll`, of the same checkpoints as trained, at L0.
        unit: (n,) units of the targets of one checkpoint.
        seeds: names of the S seeds.
        no_number_because: the reason of each length without a number.
        failed_lengths: those of them that could have been measured.
        notes: the scheme as evaluated, by length.
        more: further metrics, by length.
    """

    nll: dict[int, np.ndarray] = field(default_factory=dict)
    baseline_nll: np.ndarray | None = None
    unit: np.ndarray | None = None
    seeds: Sequence[str] = ()
    no_number_because: dict[int, str] = field(default_factory=dict)
    failed_lengths: Collection[int] = ()
    notes: dict[int, str] = field(default_factory=dict)
    more: dict[int, dict[str, float]] = field(default_factory=dict)

    def by_unit(self, values: np.ndarray) -> np.ndarray:
        """Means of each unit: (D,) or (S, D)."""
        return values if self.unit is None else unit_means(values, self.unit)


def is_undertrained(baseline_nll: float | None, unigram_nll: float | None) -> bool:
    """Whether a model with the NLL `baseline_nll` at its trained length is hardly better than a
    unigram model on the same targets; False where one of the two is unknown."""
    if baseline_nll is None or unigram_nll is None:
        return False
    return baseline_nll > unigram_nll - UNDERTRAINED


def level_rows(variant: str, losses: VariantLosses, rules: VerdictRules) -> Iterator[ResultRow]:
    """NLL, gain over truncation and further metrics at every length, or why there is none."""
    for length in sorted({*losses.nll, *losses.no_number_because}):
        if length in losses.no_number_because:
            yield row_of(
                variant, "failure", math.nan, length, note=losses.no_number_because[length]
            )
        if length not in losses.nll:
            continue
        nll = losses.nll[length]
        level = rules.interval(losses.by_unit(nll), alpha=rules.alpha)
        yield row_of(variant, "nll", level, length, note=losses.notes.get(length, ""))
        yield from seed_rows(variant, "nll", losses, nll, rules, length)
        yield row_of(variant, "perplexity", math.exp(level.value), length)
        if losses.baseline_nll is not None:
            gain = losses.by_unit(losses.baseline_nll - nll)
            yield row_of(variant, "gain", rules.interval(gain, alpha=rules.alpha), length)
        for metric, value in losses.more.get(length, {}).items():
            yield row_of(variant, metric, value, length)


def seed_rows(
    variant: str,
    metric: str,
    losses: VariantLosses,
    values: np.ndarray,
    rules: VerdictRules,
    length: int,
) -> Iterator[ResultRow]:
    """The mean over targets of each seed."""
    if losses.seeds:
        means = seed_means(values, rules.counts)
        for seed, mean in zip(losses.seeds, means, strict=True):
            yield row_of(variant, metric, mean, length, seed=seed)


def verdict_rows(variant: str, losses: VariantLosses, rules: VerdictRules) -> Iterator[ResultRow]:
    """The change at every length, with verdicts beyond L0, and how far the variant held.

    broken: the lower bound, simultaneous over the family, exceeds the tolerance. held: the
    one-sided 97.5% upper bound is below it at this and at every shorter length of the grid from L0
    on; no length is held beyond one that failed. Otherwise inconclusive: held is never inferred
    from "not broken". Metrics: `delta` with its verdict, `delta_upper_one_sided`, and for all
    lengths `held_to` and `break_point`.
    """
    words = {}
    holding = rules.is_precise and rules.has_learned
    for length in sorted({*losses.nll, *losses.failed_lengths}):
        if length not in losses.nll:
            holding = holding and length < rules.trained_length
            continue
        change = losses.by_unit(losses.nll[length] - losses.baseline_nll)
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
        yield row_of(variant, "delta", delta, length, verdict=word)
        yield row_of(variant, "delta_upper_one_sided", upper, length)
    held = [length for length, word in words.items() if word == HELD]
    broken = [length for length, word in words.items() if word == BROKEN]
    if held:
        yield row_of(variant, "held_to", max(held))
    if broken:
        yield row_of(variant, "break_point", min(broken))


def reach_rows(variant: str, losses: VariantLosses, rules: VerdictRules) -> Iterator[ResultRow]:
    """How far a variant uses context, from bounds of the gains NLL(l) − NLL(L′).

    gain_per_doubling: from one length of the grid to the next, with its own interval; positive:
    more context helps.

    context_reach: the smallest length L such that every longer context is shown to gain less than
    the tolerance; NaN if there is none. The gain of each L′ > L over the best context up to L is
    shown to be less if its one-sided 97.5% upper bound is, for any l <= L and by Bonferroni over
    them. L′ are tested from the longest downwards, and testing stops at the first failure, or at a
    length that could not be measured.

    gain_shown_to: the longest length that is better than every shorter one: the lower bounds over
    all l < L are positive, by Bonferroni over the grid.
    """
    lengths = list(losses.nll)
    if len(lengths) < 2:
        return

    def gain(a: int, b: int) -> np.ndarray:
        return losses.by_unit(losses.nll[a] - losses.nll[b])

    def upper(a: int, b: int, tests: int) -> float:
        """The upper bound of NLL(a) − NLL(b), at 97.5% for all `tests` bounds together."""
        return rules.interval(gain(a, b), family=tests).high

    for shorter, longer in pairwise(lengths):
        step = gain(shorter, longer) / math.log2(longer / shorter)
        yield row_of(variant, "gain_per_doubling", rules.interval(step, alpha=rules.alpha), longer)
    if not rules.has_learned or math.isnan(upper(lengths[0], lengths[1], 1)):
        return  # or too few units or seeds for any bound
    reach = math.nan
    for n in range(len(lengths) - 1, 0, -1):
        up_to = lengths[:n]
        bounds = [min(upper(shorter, longer, n) for shorter in up_to) for longer in lengths[n:]]
        if (
            any(each > up_to[-1] for each in losses.failed_lengths)
            or not max(bounds) < rules.tolerance
        ):
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
    elif shown == max((*lengths, *losses.failed_lengths)):
        text = f"a gain is shown up to {shown:,}, the longest length"
    else:
        text = f"a gain is shown up to {shown:,} and not excluded beyond"
    yield row_of(variant, "context_reach", reach, note=text)
    yield row_of(variant, "gain_shown_to", shown)


# One checkpoint, or several.


@dataclass
class Analysis:
    """The numbers of one run, or of several.

    Attributes:
        variants: methods (`name_of`), or runs under methods, with their columns in results.csv.
        family: number of simultaneous verdicts, or of differences of several runs.
        undertrained: variants of models hardly better than a unigram model.
        notes: about the methods without a verdict.
    """

    table: pd.DataFrame = field(default_factory=results_table)
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    family: int = 1
    undertrained: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()


def analyze(runs: Mapping[str, LossMeasurement]) -> Analysis:
    """All numbers of a run under its methods, with verdicts; or of several runs, by name, with
    differences from the first one as trained, paired by target. Verdicts and differences have
    intervals that are simultaneous over all of them.

    Raises EvaluationError if no cell of a run has a finite mean, and for runs that were not scored
    on the same targets.
    """
    first_name, *others = runs
    first = runs[first_name]
    is_one = not others
    analysis = Analysis()
    losses: dict[str, VariantLosses] = {}
    for run, measurement in runs.items():
        same_documents = np.array_equal(measurement.document, first.document)
        if not same_documents or measurement.plan.hash != first.plan.hash:
            raise EvaluationError(
                f"{run} and {first_name} have different targets; evaluate both with equal settings"
            )
        is_void = is_undertrained(measurement.baseline_mean, measurement.unigram_mean)
        for method in measurement.methods:
            name = name_of(method.label)
            columns = {"method": method.label}
            if not is_one:
                name = run if method.label == TRAINED else f"{run}, {method.label}"
                columns = {"run": measurement.subject.name, **columns}
            analysis.variants[name] = columns
            analysis.undertrained += [name] if is_void else []
            losses[name] = losses_of(measurement, method.label)
    protocol = first.plan.protocol
    judged: list[str] = []
    changes = {}
    if is_one:
        if first.failed and not first.nll:
            raise EvaluationError(
                f"{first.subject.name}: no cell of step {first.subject.step} could be measured, "
                f"under any method at any length ({next(iter(first.failed.values()))}); evaluate "
                "another checkpoint"
            )
        judged, analysis.notes = _judged_methods(first)
        beyond = [n for n in first.plan.lengths if n > first.subject.trained_length]
        cells = {(label, length) for label in judged for length in beyond}
        analysis.family = max(1, len(cells - first.absent.keys()))
    else:
        baseline = next(iter(losses.values())).nll
        changes = {  # truncation to the trained length changes nothing there: it is the same array
            (name, length): own.by_unit(nll - baseline[length])
            for name, own in losses.items()
            for length, nll in own.nll.items()
            if length in baseline and nll is not baseline[length]
        }
        analysis.family = max(1, len(changes))
    rules = VerdictRules(
        first.subject.trained_length,
        first.settings.tolerance,
        unit_counts(first.unit),
        alpha=1 - first.settings.confidence,
        family=analysis.family,
        has_learned=not analysis.undertrained,
    )
    rows: list[ResultRow] = []
    for name, own in losses.items():
        method = analysis.variants[name]["method"]
        rows += level_rows(name, own, rules)
        if method in judged and own.baseline_nll is not None and protocol != "by-position":
            rows += verdict_rows(name, own, rules)
        # Not for non-overlapping windows, where a longer length also means fewer targets with
        # little context, nor by position, which has one length.
        if is_one and protocol in ("fixed-targets", "sliding") and method != TRUNCATE:
            rows += reach_rows(name, own, rules)
    for (name, length), change in changes.items():
        difference = rules.interval(change, alpha=rules.alpha, family=rules.family)
        rows.append(row_of(name, "difference", difference, length))
    analysis.table = results_table(rows)
    return analysis


def losses_of(measurement: LossMeasurement, label: str) -> VariantLosses:
    """The losses of a checkpoint under one method."""
    nll = {}
    more: dict[int, dict[str, float]] = {}
    reasons = {}
    for length in measurement.plan.lengths:
        cell = (label, length)
        if reason := measurement.absent.get(cell) or measurement.failed.get(cell):
            reasons[length] = reason
        if cell in measurement.nll:
            nll[length] = measurement.nll[cell]
            bits = bits_per_byte(nll[length], measurement.n_bytes)
            more[length] = {} if bits is None else {"bits_per_byte": bits}
            if cell in measurement.rounding_error:
                half = f"{measurement.settings.dtype}_minus_float32"
                more[length][half] = measurement.rounding_error[cell]
    return VariantLosses(
        nll=nll,
        baseline_nll=measurement.baseline_nll,
        unit=measurement.unit,
        no_number_because=reasons,
        failed_lengths=[length for each, length in measurement.failed if each == label],
        notes={
            length: describe_scheme(measurement, label, length)
            for length in measurement.plan.lengths
        },
        more=more,
    )


def bits_per_byte(nll: np.ndarray, n_bytes: int | None) -> float | None:
    """Sum of NLL / ln 2 / bytes of the targets' raw text; None if the number of bytes is
    unknown."""
    return float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None


def _judged_methods(measurement: LossMeasurement) -> tuple[list[str], list[str]]:
    """Labels that get a verdict, and a note for each that does not."""
    allowed = PRECISION * measurement.settings.tolerance
    dtype = measurement.settings.dtype
    worst: dict[str, float] = {}
    for (label, _), difference in measurement.rounding_error.items():
        worst[label] = max(worst.get(label, 0.0), abs(difference))
    labels = [method.label for method in measurement.methods if not method.truncates]
    bad = [label for label in labels if worst.get(label, 0.0) >= allowed]
    notes = [
        f"{label}: no verdict: {dtype} differs by {worst[label]:.4f} nats on average from "
        f"float32 (allowed: {allowed:.4f}); use dtype=float32"
        for label in bad
    ]
    # Every verdict is about a difference from the checkpoint as trained.
    return ([] if TRAINED in bad else [label for label in labels if label not in bad]), notes


def describe_scheme(measurement: LossMeasurement, label: str, length: int) -> str:
    """The scheme as evaluated at this length: `rope, yarn factor 4 (auto)`."""
    if label == TRUNCATE:
        length = measurement.subject.trained_length
    record = measurement.schemes[label]
    schemes = record["kinds"].values() if "kinds" in record else [record]
    parts = [
        _POSITION.validate_python(scheme).describe(length, measurement.subject.original_length)
        for scheme in schemes
    ]
    tail = f", context truncated to {length}" if label == TRUNCATE else ""
    return " | ".join(parts) + tail


def by_position(measurement: LossMeasurement) -> dict[str, list[dict]]:
    """NLL of each method by position in geometric buckets [2^k, 2^(k+1)), the first being {0}, up
    to the last position; gain over truncation paired per bucket. Empty for other protocols, and
    where the baseline has failed."""
    if measurement.plan.protocol != "by-position" or measurement.baseline_nll is None:
        return {}
    ((length, windows),) = measurement.plan.windows.items()
    position = np.tile(np.arange(length), len(windows))[measurement.screening.kept]
    exponents = np.frexp(position)[1]  # of the powers of two that are above the positions
    buckets: dict[str, list[dict]] = {}
    for (method, _), nll in measurement.nll.items():
        for k in np.unique(exponents).tolist():
            inside = exponents == k
            gains = (measurement.baseline_nll - nll)[inside]
            alpha = 1 - measurement.settings.confidence
            gain = interval_over_units(gains, measurement.unit[inside], alpha=alpha)
            bucket = {
                "low": 2**k // 2,
                "high": min(2**k, length),
                "count": int(inside.sum()),
                "nll": float(nll[inside].mean()),
                "gain": {"estimate": gain.value, "low": gain.low, "high": gain.high},
            }
            buckets.setdefault(method, []).append(bucket)
    return buckets


def read_gains(measurement: LossMeasurement) -> Iterator[dict]:
    """The cell of results.json for each method, length and octave of distances, from [2^k,
    2^(k+1)); intervals over units, paired by target.

    readable: number of targets whose earlier occurrence is among the inputs; nll, control_nll:
    means over targets, before and after it was replaced, and of each unit; read_gain: what the
    model reads at this distance, control NLL − NLL.
    """
    targets = measurement.plan.repeats
    if targets is None:
        return
    units = measurement.units[np.repeat(targets.document, targets.keep)]
    octave = np.frexp(targets.target_distances())[1]
    for (method, length), losses in measurement.repeated.items():
        inputs = measurement.subject.trained_length if method == TRUNCATE else length
        readable = targets.is_readable(inputs)
        for k in np.unique(octave).tolist():
            here = octave == k
            unit = units[here]
            nll = losses[here]
            control = measurement.control[method, length][here]
            alpha = 1 - measurement.settings.confidence
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
                "units": [measurement.unit_names[each] for each in np.unique(unit)],
                "unit_targets": unit_counts(unit).tolist(),
                "unit_nll": unit_means(nll, unit).tolist(),
                "unit_control_nll": unit_means(control, unit).tolist(),
            }
