"""The results of a loss evaluation, with intervals over seeds and units together (recipe (b)).

The reference of a variant is the NLL of the same checkpoints as trained, at the trained length L0 and on the
same targets. With fewer than 3 seeds or 6 units there are only point estimates. Metrics of the table:

    nll, nll_pooled, perplexity, bits_per_byte   mean over units, or over all targets; `nll` also of each seed
    nll_as_trained                               at L0; the truncation baseline; also of each seed
    delta, delta_upper                           NLL(L) - NLL(as trained, L0), simultaneous over all verdicts,
                                                 and its one-sided 97.5% upper bound
    gain                                         -delta, with an individual interval
    step_gain                                    NLL(L) - NLL(the next length), which is `where`
    seeds_needed, units_needed                   would reduce the half-width of `delta` to the tolerance
    held_to, break_point                         largest length held, smallest length broken
    context_reach                                smallest length that no longer one improves on
    difference                                   NLL minus that of the baseline at the primary lengths
    unigram_nll                                  of a unigram model on the same targets
    failure                                      why there is no number
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from evaluation.scoring.methods import TRAINED
from evaluation.statistics.seeds import SeedInterval, change, compare, needed, pool, upper
from studies.results.losses import StudyLosses, stacked
from studies.results.stored import CONFIDENCE, TOLERANCE, StoredStudy, StudyVariant
from studies.results.table import ResultsTable, StudyResult

ONE_SIDED = 2 * (1 - 0.975)  # two-sided alpha whose upper end is the one-sided 97.5% bound
HELD = "held"
BROKEN = "broken"
INCONCLUSIVE = "inconclusive"
POINTS_ONLY = "points only"
# parts of the units: outside and inside the training data
UNSEEN = ("unseen",)
SEEN = ("seen",)


@dataclass(kw_only=True)
class StudyComparison(ResultsTable):
    """The results of one loss evaluation; `family`: number of simultaneous verdicts, and of differences."""

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

    def last(self, name: str) -> int | None:
        """The longest measured length."""
        return max((row.at for row in self.measured(name)), default=None)

    def seed_count(self, name: str) -> int:
        return len(self.losses.reference[name])

    def precise(self, name: str) -> bool:
        """Whether bfloat16 is within a tenth of the tolerance of float32, as verdicts require."""
        return self.losses.rounding.get(name, 0.0) < self.tolerance / 10

    @property
    def alpha(self) -> float:
        return 1 - self.confidence


def derive(study: StoredStudy, losses: StudyLosses) -> StudyComparison:
    """All results of one evaluation."""
    declared = study.declared
    facts = losses.facts
    measured = [variant for variant in losses.variants if variant.name in losses.reference]
    # Failed cells count: the family follows from the declared study, not from its outcome.
    absent = set(losses.missing) - losses.failed
    judged = {(variant.name, n) for variant in losses.variants for n in losses.longer} - absent
    primary = [n for n in declared.get("lengths") or losses.lengths if n in losses.lengths]
    baseline = next((variant for variant in measured if variant.name == study.baseline), None)
    table = StudyComparison(
        losses.name,
        losses.group,
        measured,
        facts,
        losses=losses,
        baseline=baseline.name if baseline else None,
        primary=primary,
        family=max(1, len(judged)),
        difference_family=declared.get("family")
        or max(1, (len(losses.variants) - 1) * len(primary)),
        tolerance=declared.get("tolerance") or facts.get("tolerance") or TOLERANCE,
        confidence=declared.get("confidence") or facts.get("confidence") or CONFIDENCE,
    )
    pooled = _pooled_variances(losses, measured) if declared.get("pool_seed_variance") else {}
    for variant in measured:
        _add_levels(table, variant.name, pooled)
        _add_steps_and_reach(table, variant.name)
        _add_parts(table, variant.name)
    for variant, length in product(measured, primary):
        if baseline is not None and variant != baseline:
            _add_difference(table, variant, baseline, length, pooled.get(("nll", length)))
    return table


def _pooled_variances(
    losses: StudyLosses, variants: list[StudyVariant]
) -> dict[tuple[str, int], tuple[float, float]]:
    """Seed variances of NLL and of its change by length, pooled over all variants with at least two seeds."""
    out = {}
    for length in losses.lengths:
        nll = [losses.nll.get((variant.name, length), {}) for variant in variants]
        levels = [stacked(one) for one in nll if len(one) > 1]
        # As trained at L0 the change is 0 by definition and has no variance.
        moved = [v.name for v in variants if length != losses.trained_length or v.method != TRAINED]
        changes = [
            losses.shift(name, length) for name in moved if len(losses.seeds(name, length)) > 1
        ]
        if levels:
            out["nll", length] = pool(levels)
        if changes:
            out["delta", length] = pool(changes)
    return out


def _add_levels(table: StudyComparison, name: str, pooled: dict) -> None:
    """NLL, change, verdict and gain at every length."""
    losses = table.losses
    alpha = table.alpha
    l0 = table.trained_length
    exact = holding = table.precise(name)
    table.add(name, "nll_as_trained", change(stacked(losses.reference[name]), alpha=alpha), l0)
    for seed, units in losses.reference[name].items():
        table.add(name, "nll_as_trained", units.mean(), l0, seed=seed)
    if losses.unigram is not None:
        table.add(name, "unigram_nll", losses.unigram)
    for length in losses.lengths:
        seeds = losses.seeds(name, length)
        if not seeds:
            holding = holding and length < l0
            reason = losses.missing.get((name, length), "not measured")
            table.add(name, "failure", math.nan, length, note=reason)
            continue
        nll = stacked(losses.nll[name, length], seeds)
        shift = losses.shift(name, length)
        of_nll = pooled.get(("nll", length))
        of_shift = pooled.get(("delta", length))
        delta = change(shift, alpha=alpha, family=table.family, pooled_variance=of_shift)
        bound = change(shift, alpha=ONE_SIDED, pooled_variance=of_shift).high
        holding = holding and (length < l0 or bound < table.tolerance)
        verdict = _verdict(delta, bound, table.tolerance, holding, exact) if length > l0 else ""
        table.add(name, "nll", change(nll, alpha=alpha, pooled_variance=of_nll), length)
        for seed, units in zip(seeds, nll, strict=True):
            table.add(name, "nll", units.mean(), length, seed=seed)
        means, bits = zip(*(losses.pooled[name, length][seed] for seed in seeds), strict=True)
        table.add(name, "nll_pooled", float(np.mean(means)), length)
        table.add(name, "perplexity", math.exp(np.mean(means)), length)
        if None not in bits:
            table.add(name, "bits_per_byte", float(np.mean(bits)), length)
        table.add(name, "delta", delta, length, verdict=verdict)
        table.add(name, "delta_upper", bound, length)
        table.add(name, "gain", change(-shift, alpha=alpha, pooled_variance=of_shift), length)
        if exact and delta.half > table.tolerance:
            for metric, number in zip(
                ("seeds_needed", "units_needed"), needed(delta, table.tolerance), strict=True
            ):
                table.add(name, metric, math.nan if number is None else number, length)
    lengths = {
        verdict: [r.at for r in table.beyond(name) if r.verdict == verdict]
        for verdict in (HELD, BROKEN)
    }
    if lengths[HELD]:
        table.add(name, "held_to", max(lengths[HELD]))
    if lengths[BROKEN]:
        table.add(name, "break_point", min(lengths[BROKEN]))


def _verdict(
    delta: SeedInterval, bound: float, tolerance: float, holding: bool, exact: bool
) -> str:
    if math.isnan(bound):
        return POINTS_ONLY
    if delta.low > tolerance:
        return BROKEN if exact else INCONCLUSIVE
    return HELD if holding else INCONCLUSIVE


def _add_steps_and_reach(table: StudyComparison, name: str) -> None:
    """The gain of each step of the grid, and the context reach.

    Reach is tested from the longest length downwards and stops at the first failure: otherwise a length could
    pass because the next one is equally bad.
    """
    losses = table.losses
    lengths = [n for n in losses.lengths if losses.nll.get((name, n))]
    # Without overlap a longer window also has fewer targets with little context.
    if not lengths or losses.facts.get("protocol") == "non-overlapping":
        return
    shared = [
        seed
        for seed in losses.nll[name, lengths[-1]]
        if all(seed in losses.nll[name, n] for n in lengths)
    ]
    if not shared:
        return
    nll = {n: stacked(losses.nll[name, n], tuple(shared)) for n in lengths}
    for a, b in pairwise(lengths):
        table.add(name, "step_gain", change(nll[a] - nll[b], alpha=table.alpha), a, where=(b,))
    reach = None
    for length in reversed(lengths[:-1] if table.precise(name) else []):
        if any((name, n) in losses.failed for n in losses.lengths if n > length):
            break
        longer = [n for n in lengths if n > length]
        if not all(upper(nll[length] - nll[n]) < table.tolerance for n in longer):
            break
        reach = length
    if reach is not None:
        table.add(name, "context_reach", reach)


def _add_parts(table: StudyComparison, name: str) -> None:
    """The longest length on only the units outside, and inside, the training data; nothing if all are of one
    kind."""
    losses = table.losses
    last = table.last(name)
    if last is None or losses.seen.all() or not losses.seen.any():
        return
    seeds = losses.seeds(name, last)
    nll = stacked(losses.nll[name, last], seeds)
    trained = stacked(losses.reference[name], seeds)
    for where, chosen in ((UNSEEN, ~losses.seen), (SEEN, losses.seen)):
        numbers = {"nll_as_trained": trained, "nll": nll, "gain": trained - nll}
        for metric, values in numbers.items():
            length = table.trained_length if metric == "nll_as_trained" else last
            table.add(name, metric, change(values[:, chosen], alpha=table.alpha), length, where)


def _add_difference(
    table: StudyComparison,
    variant: StudyVariant,
    baseline: StudyVariant,
    length: int,
    pooled: tuple[float, float] | None,
) -> None:
    """NLL minus that of the baseline. The same checkpoints under two methods are paired seed by seed."""
    ours, theirs = (table.losses.nll.get((one.name, length), {}) for one in (variant, baseline))
    settings = {"alpha": table.alpha, "family": table.difference_family}
    if variant.scheme == baseline.scheme:
        seeds = tuple(seed for seed in ours if seed in theirs)
        if seeds:
            paired = change(stacked(ours, seeds) - stacked(theirs, seeds), **settings)
            table.add(variant.name, "difference", paired, length, note="paired by seed")
    elif ours and theirs:
        found = compare(stacked(ours), stacked(theirs), pooled_variance=pooled, **settings)
        table.add(variant.name, "difference", found, length)
