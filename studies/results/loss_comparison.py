"""The results of a loss evaluation, with intervals over seeds and units together.

The reference of a variant is the NLL of the same checkpoints as trained, at the trained length L0
and on the same targets. With fewer than 3 seeds or 6 units there are only point estimates. Metrics
of the table:

    nll, nll_pooled, perplexity, bits_per_byte   mean over units, or over all targets; `nll` also of
                                                 each seed
    nll_as_trained                               at L0; the truncation baseline; also of each seed
    delta, delta_upper                           NLL(L) - NLL(as trained, L0), simultaneous over all
                                                 verdicts, and its one-sided 97.5% upper bound
    gain                                         -delta, with an individual interval
    gain_per_doubling                            of the step of the grid that ends at L
    seeds_needed, units_needed                   would reduce the half-width of `delta` to the
                                                 tolerance
    held_to, break_point                         largest length held, smallest length broken
    context_reach, gain_shown_to                 no longer context improves on the best up to it;
                                                 longest length shown to improve on all shorter
    difference                                   NLL minus that of the baseline, primary lengths
    repeated_nll, control_nll, read_gain         of tokens that repeat text at distances `where`,
                                                 before and after it was replaced, and the
                                                 difference, with individual intervals
    unigram_nll                                  of a unigram model on the same targets
    failure                                      why there is no number
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evaluation.statistics.context_reach import context_reach
from evaluation.statistics.seeds import SeedInterval, change, compare, needed, upper
from studies.results.losses import StudyLosses, stacked
from studies.results.stored import CONFIDENCE, TOLERANCE, StoredStudy, StudyVariant
from studies.results.table import ResultsTable, StudyResult

HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
# parts of the units: outside and inside the training data
UNSEEN = ("unseen",)
SEEN = ("seen",)


@dataclass(kw_only=True)
class LossComparison(ResultsTable):
    """The results of one loss evaluation.

    Attributes:
        baseline: the variant that the others are compared with; None if it was not measured.
        primary: lengths at which they are compared.
        family: number of simultaneous verdicts.
        difference_family: number of simultaneous differences.
        tolerance: in nats.
        confidence: simultaneous level of the intervals.
    """

    losses: StudyLosses
    baseline: str | None
    primary: list[int]
    family: int
    difference_family: int
    tolerance: float
    confidence: float

    def measured(self, name: str) -> list[StudyResult]:
        """NLL of a variant by length."""
        return self.select("nll", name)

    def beyond(self, name: str) -> list[StudyResult]:
        """Changes with their verdicts at the measured lengths beyond the trained length."""
        return [row for row in self.select("delta", name) if row.verdict]

    def claims(self, name: str) -> bool:
        """Whether the variant has enough seeds and units for verdicts."""
        return any(row.verdict != POINTS_ONLY for row in self.beyond(name))

    def longest(self, name: str) -> int | None:
        """The longest measured length."""
        return max((row.length for row in self.measured(name)), default=None)

    def seed_count(self, name: str) -> int:
        return len(self.losses.reference[name])

    def is_precise(self, name: str) -> bool:
        """Whether bfloat16 is within a tenth of the tolerance of float32, as verdicts require."""
        return self.losses.rounding.get(name, 0.0) < self.tolerance / 10

    @property
    def alpha(self) -> float:
        return 1 - self.confidence


def derive(study: StoredStudy, losses: StudyLosses) -> LossComparison:
    """All results of one evaluation."""
    declared = study.declared
    facts = losses.facts
    measured = [variant for variant in losses.variants if variant.name in losses.reference]
    primary = [n for n in declared.get("lengths") or losses.lengths if n in losses.lengths]
    baseline = next((variant for variant in measured if variant.name == study.baseline), None)
    # Failed cells count: the family follows from the declared study, not from its outcome.
    absent = set(losses.missing) - losses.failed
    verdicts = {(variant.name, n) for variant in losses.variants for n in losses.longer} - absent
    differences = declared.get("family") or (len(losses.variants) - 1) * len(primary)
    table = LossComparison(
        name=losses.name,
        group=losses.group,
        variants=measured,
        facts=facts,
        losses=losses,
        baseline=baseline.name if baseline else None,
        primary=primary,
        family=max(1, len(verdicts)),
        difference_family=max(1, differences),
        tolerance=declared.get("tolerance") or facts.get("tolerance") or TOLERANCE,
        confidence=declared.get("confidence") or facts.get("confidence") or CONFIDENCE,
    )
    for variant in measured:
        _add_levels(table, variant.name)
        _add_reach(table, variant.name)
        _add_parts(table, variant.name)
        _add_repeated(table, variant.name)
    for variant in measured:
        for length in primary:
            if baseline is not None and variant != baseline:
                _add_difference(table, variant, baseline, length)
    return table


def _add_levels(table: LossComparison, name: str) -> None:
    """NLL, change, verdict and gain at every length."""
    losses = table.losses
    l0 = table.trained_length
    reference = losses.reference[name]
    table.add(
        name,
        "nll_as_trained",
        change(stacked(reference), alpha=table.alpha),
        l0,
    )
    for seed, units in reference.items():
        table.add(name, "nll_as_trained", units.mean(), l0, seed=seed)
    if losses.unigram is not None:
        table.add(name, "unigram_nll", losses.unigram)
    is_holding = table.is_precise(name)  # so far; no length is held beyond one that is not
    for length in losses.lengths:
        if losses.seeds(name, length):
            is_holding = _add_length(table, name, length, is_holding)
        else:
            is_holding = is_holding and length < l0
            reason = losses.missing.get((name, length), "not measured")
            table.add(name, "failure", math.nan, length, note=reason)
    held = [row.length for row in table.beyond(name) if row.verdict == HELD]
    broken = [row.length for row in table.beyond(name) if row.verdict == BROKEN]
    if held:
        table.add(name, "held_to", max(held))
    if broken:
        table.add(name, "break_point", min(broken))


def _add_length(
    table: LossComparison,
    name: str,
    length: int,
    is_holding: bool,
) -> bool:
    """NLL, change, verdict and gain at one length; returns whether the variant still holds."""
    losses = table.losses
    alpha = table.alpha
    seeds = losses.seeds(name, length)
    nll = stacked(losses.nll[name, length], seeds)
    shift = losses.shift(name, length)
    delta = change(shift, alpha=alpha, family=table.family)
    bound = upper(shift)
    if length >= table.trained_length:
        is_holding = is_holding and bound < table.tolerance
    table.add(name, "nll", change(nll, alpha=alpha), length)
    for seed, units in zip(seeds, nll, strict=True):
        table.add(name, "nll", units.mean(), length, seed=seed)
    means, bits = zip(*(losses.pooled[name, length][seed] for seed in seeds), strict=True)
    table.add(name, "nll_pooled", float(np.mean(means)), length)
    table.add(name, "perplexity", math.exp(np.mean(means)), length)
    if None not in bits:
        table.add(name, "bits_per_byte", float(np.mean(bits)), length)
    verdict = ""
    if length > table.trained_length:
        verdict = _verdict(table, name, delta, bound, is_holding)
    table.add(name, "delta", delta, length, verdict=verdict)
    table.add(name, "delta_upper", bound, length)
    table.add(name, "gain", change(-shift, alpha=alpha), length)
    if table.is_precise(name) and delta.half > table.tolerance:
        more_seeds, more_units = needed(delta, table.tolerance)
        table.add(
            name,
            "seeds_needed",
            math.nan if more_seeds is None else more_seeds,
            length,
        )
        table.add(
            name,
            "units_needed",
            math.nan if more_units is None else more_units,
            length,
        )
    return is_holding


def _verdict(
    table: LossComparison, name: str, delta: SeedInterval, bound: float, is_holding: bool
) -> str:
    if math.isnan(bound):
        return POINTS_ONLY
    if delta.low > table.tolerance:
        return BROKEN if table.is_precise(name) else INCONCLUSIVE
    return HELD if is_holding else INCONCLUSIVE


def _add_reach(table: LossComparison, name: str) -> None:
    """The gain of each step of the grid, and the context reach, of the seeds measured at every
    length."""
    losses = table.losses
    lengths = [n for n in losses.lengths if losses.nll.get((name, n))]
    # Without overlap a longer window also has fewer targets with little context.
    if len(lengths) < 2 or losses.facts.get("protocol") == "non-overlapping":
        return
    by_length = [losses.nll[name, n] for n in lengths]
    seeds = [seed for seed in by_length[-1] if all(seed in measured for measured in by_length)]
    if not seeds:
        return
    nll = {n: stacked(losses.nll[name, n], seeds) for n in lengths}
    reach = context_reach(
        name,
        lengths,
        lambda a, b: nll[a] - nll[b],
        tolerance=table.tolerance,
        failed=[n for n in losses.lengths if (name, n) in losses.failed],
        alpha=table.alpha,
        interval=change,
    )
    for doubling in reach.doublings:
        table.add(name, "gain_per_doubling", doubling.gain, doubling.longer)
    if table.is_precise(name) and not reach.points:
        reached = math.nan if reach.reach is None else reach.reach
        table.add(name, "context_reach", reached, note=reach.text)
        table.add(name, "gain_shown_to", reach.shown)


def _add_parts(table: LossComparison, name: str) -> None:
    """The longest length on only the units outside, and inside, the training data."""
    losses = table.losses
    longest = table.longest(name)
    if longest is None or losses.seen.all() or not losses.seen.any():
        return
    seeds = losses.seeds(name, longest)
    nll = stacked(losses.nll[name, longest], seeds)
    trained = stacked(losses.reference[name], seeds)
    for where, units in ((UNSEEN, ~losses.seen), (SEEN, losses.seen)):
        for metric, length, values in (
            ("nll_as_trained", table.trained_length, trained),
            ("nll", longest, nll),
            ("gain", longest, trained - nll),
        ):
            table.add(
                name,
                metric,
                change(values[:, units], alpha=table.alpha),
                length,
                where,
            )


def _add_repeated(table: LossComparison, name: str) -> None:
    """NLL and read gain of repeated text by length and distance."""
    for (variant, length, where), by_seed in table.losses.repeated.items():
        if variant == name:
            nll, control = stacked(by_seed).swapaxes(0, 1)  # (S, D) each
            for metric, values in (
                ("repeated_nll", nll),
                ("control_nll", control),
                ("read_gain", control - nll),
            ):
                table.add(name, metric, change(values, alpha=table.alpha), length, where)


def _add_difference(
    table: LossComparison, variant: StudyVariant, baseline: StudyVariant, length: int
) -> None:
    """NLL minus that of the baseline; two methods on the same checkpoints are paired by seed."""
    ours = table.losses.nll.get((variant.name, length), {})
    theirs = table.losses.nll.get((baseline.name, length), {})
    is_paired = variant.scheme == baseline.scheme
    if is_paired:
        seeds = [seed for seed in ours if seed in theirs]
        ours = {seed: ours[seed] for seed in seeds}
        theirs = {seed: theirs[seed] for seed in seeds}
    if not ours or not theirs:
        return
    a = stacked(ours)
    b = stacked(theirs)
    family = table.difference_family
    if is_paired:
        difference = change(a - b, alpha=table.alpha, family=family)
        table.add(
            variant.name,
            "difference",
            difference,
            length,
            note="paired by seed",
        )
    else:
        difference = compare(a, b, alpha=table.alpha, family=family)
        table.add(variant.name, "difference", difference, length)
