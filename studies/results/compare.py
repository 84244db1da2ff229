"""The derived numbers of a study, with intervals over seeds and units together (recipe (b)).

The reference of a variant is the NLL of the same checkpoints as trained, at the training length L0 and on the
same targets. With fewer than 3 seeds or 6 units there are only point estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from evaluation.scoring.methods import TRAINED
from evaluation.statistics.seeds import SeedInterval, change, compare, needed, pool, upper
from studies.results.stored import CONFIDENCE, TOLERANCE, StoredStudy, StudyLosses, StudyVariant

ONE_SIDED = 2 * (1 - 0.975)  # two-sided alpha whose upper end is the one-sided 97.5% bound


@dataclass(frozen=True)
class MeanNLL:
    """One variant at one length; numbers are None if it was not measured, for the reason in `failure`.

    Attributes:
        seeds: measured training seeds.
        nll: NLL, mean over units.
        pooled: NLL over all targets, mean over seeds; the basis of perplexity and bits per byte.
        delta: NLL(L) - NLL(as trained, L0), simultaneous over the family of verdicts.
        upper: one-sided 97.5% upper bound of `delta`.
        verdict: "held", "broken", "inconclusive", "points only", or "" up to the training length.
        needed: (seeds, units) that would reduce the half-width to the tolerance, if it is wider.
        gain: NLL(as trained, context truncated to L0) - NLL(L), an individual interval.
    """

    variant: str
    length: int
    seeds: tuple[str, ...] = ()
    nll: SeedInterval | None = None
    pooled: float | None = None
    bits_per_byte: float | None = None
    delta: SeedInterval | None = None
    upper: float = math.nan
    verdict: str = ""
    needed: tuple[int | None, int | None] | None = None
    gain: SeedInterval | None = None
    failure: str = ""

    @property
    def perplexity(self) -> float | None:
        return None if self.pooled is None else math.exp(self.pooled)


@dataclass(frozen=True)
class VariantSummary:
    """One variant over all lengths.

    Attributes:
        trained: NLL as trained at the training length; the truncation baseline.
        held_to: largest length held, or None; break_point: smallest length broken, or None.
        reach: context reach, the smallest length that no longer one improves on by the tolerance, or None.
        doublings: (L, L', NLL(L) - NLL(L')) of neighbouring lengths.
    """

    variant: StudyVariant
    trained: SeedInterval
    trained_seeds: dict[str, float]
    readings: list[MeanNLL]
    held_to: int | None
    break_point: int | None
    reach: int | None
    doublings: list[tuple[int, int, SeedInterval]]

    @property
    def measured(self) -> list[MeanNLL]:
        return [one for one in self.readings if one.nll is not None]

    @property
    def beyond(self) -> list[MeanNLL]:
        return [one for one in self.measured if one.verdict]

    @property
    def last(self) -> MeanNLL | None:
        """The longest measured length."""
        return self.measured[-1] if self.measured else None

    @property
    def claims(self) -> bool:
        return any(one.verdict != "points only" for one in self.beyond)

    def at(self, length: int) -> MeanNLL | None:
        return next((one for one in self.measured if one.length == length), None)


@dataclass(frozen=True)
class VariantDifference:
    """NLL(variant) - NLL(baseline) at one length; negative: the variant is better. `paired`: both are the
    same checkpoints under two methods, and are paired seed by seed."""

    variant: str
    length: int
    interval: SeedInterval
    paired: bool


@dataclass(frozen=True)
class StudyComparison:
    """All derived numbers of one evaluation in one group of cells."""

    losses: StudyLosses
    lines: list[VariantSummary]
    baseline: str | None
    differences: list[VariantDifference]
    primary: list[int]
    family: int  # of verdicts
    difference_family: int
    tolerance: float
    confidence: float

    def line(self, name: str) -> VariantSummary | None:
        return next((line for line in self.lines if line.variant.name == name), None)


def derive(study: StoredStudy, losses: StudyLosses) -> StudyComparison:
    """All derived numbers of one evaluation."""
    tolerance = study.declared.get("tolerance") or losses.facts.get("tolerance") or TOLERANCE
    confidence = study.declared.get("confidence") or losses.facts.get("confidence") or CONFIDENCE
    alpha, l0 = 1 - confidence, losses.trained_length
    measured = [variant for variant in losses.variants if variant.name in losses.reference]
    beyond = [length for length in losses.lengths if length > l0]
    # Failed cells count: the family follows from the declared study, not from its outcome.
    absent = set(losses.missing) - losses.failed
    cells = {(v.name, n) for v in losses.variants for n in beyond} - absent
    family = max(1, len(cells))
    pooled = _pools(losses, measured) if study.declared.get("pool_seed_variance") else {}
    lines = [_line(losses, variant, tolerance, alpha, family, pooled) for variant in measured]
    primary = [n for n in study.declared.get("lengths") or losses.lengths if n in losses.lengths]
    wanted = study.declared.get("family") or max(1, (len(losses.variants) - 1) * len(primary))
    baseline = next((v for v in measured if v.name == study.baseline), None)
    differences = []
    if baseline is not None:
        for variant, length in product((v for v in measured if v != baseline), primary):
            pool_here = pooled.get(("nll", length))
            one = _difference(losses, variant, baseline, length, alpha, wanted, pool_here)
            differences += [one] if one else []
    return StudyComparison(
        losses,
        lines,
        baseline.name if baseline else None,
        differences,
        primary,
        family,
        wanted,
        tolerance,
        confidence,
    )


def stacked(by_seed: dict[str, np.ndarray], seeds: tuple[str, ...]) -> np.ndarray:
    """(S, D) in the given order of seeds."""
    return np.stack([by_seed[seed] for seed in seeds])


def _shift(losses: StudyLosses, name: str, length: int) -> np.ndarray | None:
    """(S, D) NLL(L) - NLL(as trained, L0) of the seeds that have both numbers."""
    by_seed, reference = losses.nll.get((name, length), {}), losses.reference.get(name, {})
    seeds = tuple(seed for seed in by_seed if seed in reference)
    return stacked(by_seed, seeds) - stacked(reference, seeds) if seeds else None


def _pools(losses: StudyLosses, variants: list[StudyVariant]) -> dict[tuple[str, int], tuple[float, float]]:
    """Seed variances of NLL and of its change by length, pooled over all variants with at least two seeds."""
    out = {}
    for length in losses.lengths:
        nll = [losses.nll.get((variant.name, length), {}) for variant in variants]
        levels = [stacked(one, tuple(one)) for one in nll if len(one) > 1]
        # As trained at L0 the change is 0 by definition and has no variance.
        moved = [v for v in variants if length != losses.trained_length or v.method != TRAINED]
        shifts = [_shift(losses, variant.name, length) for variant in moved]
        changes = [one for one in shifts if one is not None and len(one) > 1]
        if levels:
            out["nll", length] = pool(levels)
        if changes:
            out["delta", length] = pool(changes)
    return out


def _line(
    losses: StudyLosses,
    variant: StudyVariant,
    tolerance: float,
    alpha: float,
    family: int,
    pooled: dict[tuple[str, int], tuple[float, float]],
) -> VariantSummary:
    l0, reference = losses.trained_length, losses.reference[variant.name]
    exact = precise(losses, variant.name, tolerance)
    readings, holding = [], exact
    for length in losses.lengths:
        by_seed = losses.nll.get((variant.name, length), {})
        seeds = tuple(seed for seed in by_seed if seed in reference)
        if not seeds:
            holding = holding and length < l0
            why = losses.missing.get((variant.name, length), "not measured")
            readings.append(MeanNLL(variant.name, length, failure=why))
            continue
        nll = stacked(by_seed, seeds)
        shift = nll - stacked(reference, seeds)
        of_nll, of_shift = pooled.get(("nll", length)), pooled.get(("delta", length))
        bound = change(shift, alpha=ONE_SIDED, pooled_variance=of_shift).high
        holding = holding and (length < l0 or bound < tolerance)
        delta = change(shift, alpha=alpha, family=family, pooled_variance=of_shift)
        verdict = _verdict(delta, bound, tolerance, holding) if length > l0 else ""
        verdict = verdict if exact or verdict != "broken" else "inconclusive"
        means, bits = zip(*(losses.pooled[variant.name, length][seed] for seed in seeds), strict=True)
        readings.append(
            MeanNLL(
                variant.name,
                length,
                seeds,
                nll=change(nll, alpha=alpha, pooled_variance=of_nll),
                pooled=float(np.mean(means)),
                bits_per_byte=None if None in bits else float(np.mean(bits)),
                delta=delta,
                upper=bound,
                verdict=verdict,
                needed=needed(delta, tolerance) if exact and delta.half > tolerance else None,
                gain=change(-shift, alpha=alpha, pooled_variance=of_shift),
            )
        )
    held = [one.length for one in readings if one.verdict == "held"]
    broken = [one.length for one in readings if one.verdict == "broken"]
    order = tuple(reference)
    return VariantSummary(
        variant,
        change(stacked(reference, order), alpha=alpha),
        {seed: float(reference[seed].mean()) for seed in order},
        readings,
        max(held, default=None),
        min(broken, default=None),
        *_reach(losses, variant.name, tolerance, alpha, exact),
    )


def precise(losses: StudyLosses, name: str, tolerance: float) -> bool:
    """Whether bfloat16 is within a tenth of the tolerance of float32, as verdicts require."""
    return losses.rounding.get(name, 0.0) < tolerance / 10


def _verdict(delta: SeedInterval, bound: float, tolerance: float, holding: bool) -> str:
    if math.isnan(bound):
        return "points only"
    if delta.low > tolerance:
        return "broken"
    return "held" if holding else "inconclusive"


def _reach(losses: StudyLosses, name: str, tolerance: float, alpha: float, exact: bool):
    """(context reach or None, gain of each step of the grid).

    Reach is tested from the longest length downwards and stops at the first failure: otherwise a length could
    pass because the next one is equally bad.
    """
    lengths = [n for n in losses.lengths if losses.nll.get((name, n))]
    # Without overlap a longer window also has fewer targets with little context.
    if not lengths or losses.facts.get("protocol") == "non-overlapping":
        return None, []
    shared = [
        seed
        for seed in losses.nll.get((name, lengths[-1]), {})
        if all(seed in losses.nll[name, n] for n in lengths)
    ]
    if not shared:
        return None, []
    nll = {n: stacked(losses.nll[name, n], tuple(shared)) for n in lengths}
    reach = None
    for length in reversed(lengths[:-1] if exact else []):
        if any((name, n) in losses.failed for n in losses.lengths if n > length):
            break
        if not all(upper(nll[length] - nll[longer]) < tolerance for longer in lengths if longer > length):
            break
        reach = length
    return reach, [(a, b, change(nll[a] - nll[b], alpha=alpha)) for a, b in pairwise(lengths)]


def _difference(
    losses: StudyLosses,
    variant: StudyVariant,
    baseline: StudyVariant,
    length: int,
    alpha: float,
    family: int,
    pooled: tuple[float, float] | None,
) -> VariantDifference | None:
    ours, theirs = losses.nll.get((variant.name, length)), losses.nll.get((baseline.name, length))
    if not ours or not theirs:
        return None
    if variant.scheme == baseline.scheme:
        seeds = tuple(seed for seed in ours if seed in theirs)
        if not seeds:
            return None
        shift = stacked(ours, seeds) - stacked(theirs, seeds)
        return VariantDifference(variant.name, length, change(shift, alpha=alpha, family=family), True)
    a, b = stacked(ours, tuple(ours)), stacked(theirs, tuple(theirs))
    found = compare(a, b, alpha=alpha, family=family, pooled_variance=pooled)
    return VariantDifference(variant.name, length, found, False)


@dataclass(frozen=True)
class SeenSplit:
    """A variant on only those units that are inside, or outside, its training data."""

    variant: str
    where: str
    units: int
    targets: int
    trained: SeedInterval
    length: int
    nll: SeedInterval
    gain: SeedInterval


def split_by_seen(comparison: StudyComparison) -> list[SeenSplit]:
    """Every variant at its longest length on the units outside and inside the training data; empty if all are
    of one kind."""
    losses, out = comparison.losses, []
    if losses.seen.all() or not losses.seen.any():
        return []
    alpha = 1 - comparison.confidence
    for line in comparison.lines:
        if line.last is None:
            continue
        seeds, length = line.last.seeds, line.last.length
        nll = stacked(losses.nll[line.variant.name, length], seeds)
        trained = stacked(losses.reference[line.variant.name], seeds)
        for where, chosen in (("unseen", ~losses.seen), ("seen", losses.seen)):
            out.append(
                SeenSplit(
                    line.variant.name,
                    where,
                    int(chosen.sum()),
                    int(losses.targets[chosen].sum()),
                    change(trained[:, chosen], alpha=alpha),
                    length,
                    change(nll[:, chosen], alpha=alpha),
                    change((trained - nll)[:, chosen], alpha=alpha),
                )
            )
    return out
