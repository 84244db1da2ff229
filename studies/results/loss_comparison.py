"""The results of a loss evaluation of a study, with intervals over seeds and units together.

The reference of a variant is the NLL of the same checkpoints as trained, at the trained length L0
and on the same targets. With fewer than 3 seeds or 6 units there are only point estimates. Metrics
of the table besides those of `LossResults`:

    nll                           mean over units; also of each seed
    nll_pooled                    mean over all targets
    nll_as_trained                at L0; the truncation baseline; also of each seed
    seeds_needed, units_needed    would reduce the half-width of `delta` to the tolerance
    unigram_nll                   of a unigram model on the same targets
"""

import math
from dataclasses import dataclass

import numpy as np

from evaluation.reports.loss_report import UNDERTRAINED, LossResults
from evaluation.statistics.context_reach import add_reach, context_reach
from evaluation.statistics.seeds import change, compare, needed
from evaluation.statistics.verdicts import VerdictRules, add_verdicts
from studies.results.losses import StudyLosses, stacked
from studies.results.stored import (
    CONFIDENCE,
    TOLERANCE,
    StoredStudy,
    StudyVariant,
    title_of,
)


@dataclass(kw_only=True)
class LossComparison(LossResults):
    """The results of one loss evaluation in one group of cells."""

    losses: StudyLosses

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
        title=title_of(losses.name, losses.group),
        place={"evaluation": losses.name, **dict(losses.group)},
        names=[variant.name for variant in measured],
        noun="scheme",
        facts={**facts, "targets": int(losses.targets.sum())},
        seeds={name: len(by_seed) for name, by_seed in losses.reference.items()},
        lengths=losses.lengths,
        unit_kind=losses.kind,
        units=len(losses.units),
        losses=losses,
        baseline=baseline.name if baseline else None,
        against=f"NLL minus that of {baseline.name}" if baseline else "",
        primary=primary,
        family=max(1, len(verdicts)),
        difference_family=max(1, differences),
        tolerance=declared.get("tolerance") or facts.get("tolerance") or TOLERANCE,
        confidence=declared.get("confidence") or facts.get("confidence") or CONFIDENCE,
        unigram=losses.unigram,
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
    l0 = table.trained_length
    if baseline is not None:
        table.truncated = table.table.value(baseline.name, "nll_as_trained", l0)
    if losses.unigram is not None:
        learned = losses.unigram - UNDERTRAINED
        rows = table.table.select("nll_as_trained")
        table.undertrained = [row.variant for row in rows if row.value > learned]
    return table


def _add_levels(r: LossComparison, name: str) -> None:
    """NLL, change, verdict and gain at every length."""
    losses = r.losses
    l0 = r.trained_length
    reference = losses.reference[name]
    r.table.add(name, "nll_as_trained", change(stacked(reference), alpha=r.alpha), l0)
    for seed, units in reference.items():
        r.table.add(name, "nll_as_trained", units.mean(), l0, seed=seed)
    if losses.unigram is not None:
        r.table.add(name, "unigram_nll", losses.unigram)
    measured = [length for length in losses.lengths if losses.seeds(name, length)]
    for length in losses.lengths:
        if length in measured:
            _add_length(r, name, length)
        else:
            reason = losses.missing.get((name, length), "not measured")
            r.table.add(name, "failure", math.nan, length, note=reason)
    changes = {length: losses.shift(name, length) for length in measured}
    missing = set(losses.lengths) - set(measured)
    rules = VerdictRules(l0, r.tolerance, r.alpha, r.family, interval=change)
    is_precise = r.is_precise(name)
    add_verdicts(r.table, name, changes, rules, missing=missing, is_precise=is_precise)
    for length in measured if is_precise else ():
        delta = change(changes[length], alpha=r.alpha, family=r.family)
        if delta.half > r.tolerance:
            seeds, units = needed(delta, r.tolerance)
            r.table.add(name, "seeds_needed", math.nan if seeds is None else seeds, length)
            r.table.add(name, "units_needed", math.nan if units is None else units, length)


def _add_length(r: LossComparison, name: str, length: int) -> None:
    """NLL and gain at one length."""
    losses = r.losses
    seeds = losses.seeds(name, length)
    nll = stacked(losses.nll[name, length], seeds)
    r.table.add(name, "nll", change(nll, alpha=r.alpha), length)
    for seed, units in zip(seeds, nll, strict=True):
        r.table.add(name, "nll", units.mean(), length, seed=seed)
    means, bits = zip(*(losses.pooled[name, length][seed] for seed in seeds), strict=True)
    r.table.add(name, "nll_pooled", np.mean(means), length)
    r.table.add(name, "perplexity", math.exp(np.mean(means)), length)
    if None not in bits:
        r.table.add(name, "bits_per_byte", np.mean(bits), length)
    r.table.add(name, "gain", change(-losses.shift(name, length), alpha=r.alpha), length)


def _add_reach(r: LossComparison, name: str) -> None:
    """The gain of each step of the grid, and the context reach, of the seeds measured at every
    length."""
    losses = r.losses
    lengths = [n for n in losses.lengths if losses.nll.get((name, n))]
    # Without overlap a longer window also has fewer targets with little context.
    if len(lengths) < 2 or losses.facts.get("protocol") == "non-overlapping":
        return
    by_length = [losses.nll[name, n] for n in lengths]
    seeds = [seed for seed in by_length[-1] if all(seed in measured for measured in by_length)]
    if not seeds or not r.is_precise(name):
        return
    nll = {n: stacked(losses.nll[name, n], seeds) for n in lengths}
    reach = context_reach(
        lengths,
        lambda a, b: nll[a] - nll[b],
        tolerance=r.tolerance,
        failed=[n for n in losses.lengths if (name, n) in losses.failed],
        alpha=r.alpha,
        interval=change,
    )
    add_reach(r.table, name, reach)


def _add_parts(r: LossComparison, name: str) -> None:
    """The longest length on only the units outside, and inside, the training data."""
    losses = r.losses
    longest = max((row.length for row in r.table.select("nll", name)), default=None)
    if longest is None or losses.seen.all() or not losses.seen.any():
        return
    seeds = losses.seeds(name, longest)
    nll = stacked(losses.nll[name, longest], seeds)
    trained = stacked(losses.reference[name], seeds)
    for where, units in (("unseen", ~losses.seen), ("seen", losses.seen)):
        for metric, length, values in (
            ("nll_as_trained", r.trained_length, trained),
            ("nll", longest, nll),
            ("gain", longest, trained - nll),
        ):
            part = change(values[:, units], alpha=r.alpha)
            r.table.add(name, metric, part, length, where=where)


def _add_repeated(r: LossComparison, name: str) -> None:
    """NLL and read gain of repeated text by length and distance."""
    for (variant, length, where), by_seed in r.losses.repeated.items():
        if variant == name:
            nll, control = stacked(by_seed).swapaxes(0, 1)  # (S, D) each
            for metric, values in (
                ("repeated_nll", nll),
                ("control_nll", control),
                ("read_gain", control - nll),
            ):
                place = {"length": length, "at": where[0], "until": where[1]}
                r.table.add(name, metric, change(values, alpha=r.alpha), **place)


def _add_difference(
    r: LossComparison, variant: StudyVariant, baseline: StudyVariant, length: int
) -> None:
    """NLL minus that of the baseline; two methods on the same checkpoints are paired by seed."""
    ours = r.losses.nll.get((variant.name, length), {})
    theirs = r.losses.nll.get((baseline.name, length), {})
    is_paired = variant.scheme == baseline.scheme
    if is_paired:
        seeds = [seed for seed in ours if seed in theirs]
        ours = {seed: ours[seed] for seed in seeds}
        theirs = {seed: theirs[seed] for seed in seeds}
    if not ours or not theirs:
        return
    a = stacked(ours)
    b = stacked(theirs)
    if is_paired:
        difference = change(a - b, alpha=r.alpha, family=r.difference_family)
    else:
        difference = compare(a, b, alpha=r.alpha, family=r.difference_family)
    note = "paired by seed" if is_paired else ""
    r.table.add(variant.name, "difference", difference, length, note=note)
