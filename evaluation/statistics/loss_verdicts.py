"""Rows of the table of results for losses: levels, changes with their verdicts, context reach,
differences and read gains. They come from results.json of one checkpoint, or of each training seed
of a scheme.

All numbers are paired differences on the same targets. The reference is the checkpoint as trained
at its trained length L0, also for methods: a method that is bad at L0 could otherwise appear to
gain.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from evaluation.evaluation_settings import HALF
from evaluation.methods import TRAINED
from evaluation.statistics.intervals import MeanInterval, interval, seed_means
from evaluation.statistics.results_table import ResultRow, row_of
from evaluation.statistics.stored_results import StoredResults

HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
# Nats; a model whose loss is not at least this far below a unigram model's is undertrained.
UNDERTRAINED = 0.5
# A verdict requires the error of half precision to be below this share of the tolerance.
PRECISION = 0.1
ROUNDING = [f"{half}_minus_float32" for half in HALF]  # keys of a cell of results.json
# What a missing cell contains.
UNMEASURED = {"failure": "not measured for every seed", "exists": True}


@dataclass(frozen=True)
class VerdictRules:
    """The rules by which changes are judged.

    Attributes:
        tolerance: tolerance of loss increases in nats.
        counts: (D,) targets of each unit.
        alpha: error probability of intervals; simultaneous over `family` for changes.
        has_learned: False for an undertrained model. The loss of such a model holds at any length,
            so it gets neither "held" nor a context reach.
        is_precise: False for numbers with rounding errors, which are neither held nor broken.
    """

    trained_length: int
    tolerance: float
    counts: np.ndarray
    alpha: float = 0.05
    family: int = 1
    has_learned: bool = True
    is_precise: bool = True

    def interval(self, values: np.ndarray, family: int = 1) -> MeanInterval:
        """The interval of the mean over targets, simultaneous over `family`."""
        return interval(values, self.counts, alpha=self.alpha, family=family)

    def upper(self, values: np.ndarray, tests: int = 1) -> float:
        """The one-sided upper bound of the mean, at 97.5% for all `tests` bounds together."""
        return interval(values, self.counts, family=tests).high


@dataclass(kw_only=True)
class VariantLosses:
    """The NLL of one variant on the same targets at every length.

    Attributes:
        nll: by length, ascending: means of units, (D,) for one checkpoint, or (S, D) for seeds.
        truncated_nll: like `nll`, for the same checkpoints as trained, at L0.
        seeds: names of the S seeds.
        no_number_because: for each length without a number, the reason.
        failed_lengths: lengths without a number that could have been measured.
        notes: the scheme as evaluated, by length.
        more: further metrics, by length.
    """

    nll: dict[int, np.ndarray] = field(default_factory=dict)
    truncated_nll: np.ndarray | None = None
    seeds: Sequence[str] = ()
    no_number_because: dict[int, str] = field(default_factory=dict)
    failed_lengths: Collection[int] = ()
    notes: dict[int, str] = field(default_factory=dict)
    more: dict[int, dict[str, float]] = field(default_factory=dict)

    def is_absent(self, length: int) -> bool:
        """Whether the length cannot be measured, for example because positions end."""
        return length in self.no_number_because and length not in self.failed_lengths


def variant_losses(results: Sequence[StoredResults], lengths: Sequence[int]) -> VariantLosses:
    """The losses of a variant: of one checkpoint, or of all seeds that were measured as trained at
    the trained length.

    If one seed has no number at a length, because it failed or was not measured, the length has no
    number: a mean over the successful seeds only would be biased.
    """
    is_sample = any(each.seed for each in results)
    truncated = [truncated_nll_of(each.record) for each in results]
    kept = [n for n, own in enumerate(truncated) if own is not None or not is_sample]
    losses = VariantLosses(seeds=[results[n].seed for n in kept] if is_sample else ())
    known = [own for own in truncated if own is not None]
    if known:
        losses.truncated_nll = _stacked(known, is_sample)
    cells = [
        {(cell["method"], cell["length"]): cell for cell in each.record["cells"]}
        for each in results
    ]
    failed = []
    for length in lengths:
        here = [
            of_run.get((each.method, length), UNMEASURED)
            for each, of_run in zip(results, cells, strict=True)
        ]
        if not is_sample and UNMEASURED in here:
            continue
        without = [cell for cell in here if cell.get("unit_nll") is None]
        if without:
            losses.no_number_because[length] = without[-1].get("failure") or "no number"
            if len(without) < len(here) or any(cell.get("exists") for cell in without):
                failed.append(length)
        elif kept:
            here = [here[n] for n in kept]
            losses.nll[length] = _stacked([cell["unit_nll"] for cell in here], is_sample)
            losses.notes[length] = here[0].get("scheme", "")
            losses.more[length] = {
                metric: float(np.mean([cell[metric] for cell in here]))
                for metric in ("bits_per_byte", *ROUNDING)
                if all(cell.get(metric) is not None for cell in here)
            }
    losses.failed_lengths = failed
    return losses


def truncated_nll_of(record: dict) -> list[float] | None:
    """Mean NLL of each unit as trained, with the context truncated to the trained length; None if
    it was not measured."""
    if record["protocol"] == "by-position":
        return record["truncated_unit_nll"]
    place = (TRAINED, record["trained_length"])
    means = [
        cell.get("unit_nll")
        for cell in record["cells"]
        if (cell["method"], cell["length"]) == place
    ]
    return next(iter(means), None)


def _stacked(units: Sequence[Sequence[float]], is_sample: bool) -> np.ndarray:
    """Means of units: (S, D) for seeds, or (D,) for one checkpoint."""
    values = np.array(units, dtype=np.float64)
    return values if is_sample else values[0]


def rounding(results: Sequence[StoredResults]) -> float:
    """The largest mean difference of half precision from float32 in nats, as trained or under the
    method."""
    differences = [
        abs(cell.get(metric) or 0.0)
        for each in results
        for cell in each.record["cells"]
        for metric in ROUNDING
        if cell["method"] in (each.method, TRAINED)
    ]
    return max(differences, default=0.0)


def is_undertrained(truncated_nll: float | None, unigram_nll: float | None) -> bool:
    """Whether a model with the NLL `truncated_nll` at its trained length is hardly better than a
    unigram model on the same targets; False if one of the two losses is unknown."""
    if truncated_nll is None or unigram_nll is None:
        return False
    return truncated_nll > unigram_nll - UNDERTRAINED


def level_rows(variant: str, losses: VariantLosses, rules: VerdictRules) -> Iterator[ResultRow]:
    """NLL, gain over truncation and further metrics at every length, or the reason why they are
    missing."""
    for length in sorted({*losses.nll, *losses.no_number_because}):
        if length in losses.no_number_because:
            yield row_of(
                variant, "failure", math.nan, length, note=losses.no_number_because[length]
            )
        if length not in losses.nll:
            continue
        nll = losses.nll[length]
        level = rules.interval(nll)
        yield row_of(variant, "nll", level, length, note=losses.notes.get(length, ""))
        yield from seed_rows(variant, "nll", losses, nll, rules, length)
        yield row_of(variant, "perplexity", math.exp(level.value), length)
        if losses.truncated_nll is not None:
            gain = rules.interval(losses.truncated_nll - nll)
            yield row_of(variant, "gain", gain, length)
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
    """The change at every length, with verdicts beyond L0, and the lengths up to which the variant
    held.

    broken: the lower bound, simultaneous over the family, exceeds the tolerance. held: the
    one-sided 97.5% upper bound is below the tolerance at this and at every shorter length of the
    grid from L0 on; no length is held beyond a length that failed. Otherwise inconclusive: held is
    never inferred from "not broken". Metrics: `delta` with its verdict, `delta_upper_one_sided`,
    and for all lengths `held_to` and `break_point`.
    """
    words = {}
    holding = rules.is_precise and rules.has_learned
    for length in sorted({*losses.nll, *losses.failed_lengths}):
        if length not in losses.nll:
            holding = holding and length < rules.trained_length
            continue
        change = losses.nll[length] - losses.truncated_nll
        delta = rules.interval(change, rules.family)
        upper = rules.upper(change)
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
    the tolerance; NaN if there is none. The gain at L′ counts as small if, for at least one l ≤ L,
    the upper bound of NLL(l) − NLL(L′) is below the tolerance; bounds are one-sided at 97.5%,
    Bonferroni-corrected over the l. L′ are tested from the longest downwards, and testing stops at
    the first failure, or at a length that could not be measured.

    gain_shown_to: the longest length L that is better than every shorter length: the lower bounds
    of the gains over all l < L are positive, Bonferroni-corrected over the grid.
    """
    lengths = list(losses.nll)
    if len(lengths) < 2:
        return

    def gain(a: int, b: int) -> np.ndarray:
        return losses.nll[a] - losses.nll[b]

    def upper(a: int, b: int, tests: int) -> float:
        return rules.upper(gain(a, b), tests)

    for shorter, longer in pairwise(lengths):
        step = gain(shorter, longer) / math.log2(longer / shorter)
        yield row_of(variant, "gain_per_doubling", rules.interval(step), longer)
    if not rules.has_learned or math.isnan(upper(lengths[0], lengths[1], 1)):
        return  # undertrained, or too few units or seeds for bounds
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


def repeated_rows(
    variant: str, results: Sequence[StoredResults], rules: VerdictRules, targets: str | None
) -> Iterator[ResultRow]:
    """NLL and read gain of repeated text by length and distance, from the results on the `targets`
    with this hash. A single checkpoint has no read gain if no target is readable. There are no
    numbers where one of several seeds has none."""
    by_place: dict[tuple, list[dict]] = defaultdict(list)
    is_sample = any(each.seed for each in results)
    same = [each for each in results if each.record.get("repeated", {}).get("hash") == targets]
    for each in same if targets else ():
        for cell in each.record["repeated"]["cells"]:
            if cell["method"] == each.method:
                place = (cell["length"], cell["distance_low"], cell["distance_high"])
                by_place[place].append(cell)
    for (length, low, high), cells in by_place.items():
        if is_sample and len(cells) < len(same):
            continue
        counts = np.array(cells[0]["unit_targets"])
        nll = _stacked([cell["unit_nll"] for cell in cells], is_sample)
        control = _stacked([cell["unit_control_nll"] for cell in cells], is_sample)
        values = {"repeated_nll": nll, "control_nll": control}
        if is_sample or cells[0]["readable"]:
            values["read_gain"] = control - nll
        for metric, of_units in values.items():
            mean = interval(of_units, counts, alpha=rules.alpha)
            note = f"{counts.sum()} targets"
            yield row_of(variant, metric, mean, length, at=low, until=high, note=note)
