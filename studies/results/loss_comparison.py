"""The results of a loss evaluation of a study, with intervals over seeds and units together.

The reference of a variant is the NLL of the same checkpoints as trained, at the trained length L0
and on the same targets. With fewer than 3 seeds or 6 units there are only point estimates. Metrics
of the table besides those of `LossResults`:

    nll                           mean over targets; also of each seed
    nll_as_trained                at L0; the truncation baseline; also of each seed
    unigram_nll                   of a unigram model on the same targets
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from errors import StudyError
from evaluation.reports.loss_report import LossResults
from evaluation.statistics.context_reach import add_reach
from evaluation.statistics.seeds import change, compare, seed_means
from evaluation.statistics.verdicts import VerdictRules, add_verdicts, is_undertrained
from studies.results.losses import Rows, StudyLosses, unit_nll
from studies.results.stored import StoredStudy, StudyVariant, title_of


@dataclass(kw_only=True)
class LossComparison(LossResults):
    """The results of one loss evaluation in one group of cells."""

    losses: StudyLosses

    def is_precise(self, name: str) -> bool:
        """Whether bfloat16 is within a tenth of the tolerance of float32, as verdicts require."""
        return self.losses.rounding.get(name, 0.0) < self.tolerance / 10

    def rules(self, name: str) -> VerdictRules:
        """For the verdicts on a variant."""
        return VerdictRules(
            self.trained_length,
            self.tolerance,
            interval=partial(change, counts=self.counts),
            alpha=1 - self.confidence,
            family=self.family,
            has_learned=name not in self.undertrained,
        )

    @property
    def counts(self) -> np.ndarray:
        """(D,) targets of each unit."""
        return np.array(self.facts["units"]["targets"])

    def add(
        self,
        name: str,
        metric: str,
        values: np.ndarray,
        length: int,
        counts: np.ndarray | None = None,
        **columns,
    ) -> None:
        """Add a mean over seeds and units (S, D) with its own interval; None: of all targets."""
        counts = self.counts if counts is None else counts
        mean = change(values, counts, alpha=1 - self.confidence)
        self.table.add(name, metric, mean, length, **columns)

    def add_seeds(self, name: str, metric: str, rows: Rows, seeds: list[str], length: int) -> None:
        """Add a mean over targets, over all seeds and of each."""
        values = unit_nll(rows, seeds)
        self.add(name, metric, values, length)
        for seed, mean in zip(seeds, seed_means(values, self.counts), strict=True):
            self.table.add(name, metric, mean, length, seed=seed)


def derive(study: StoredStudy, losses: StudyLosses) -> LossComparison:
    """All results of one evaluation."""
    declared = study.declared
    facts = losses.facts
    units = facts["units"]
    unigram = facts.get("unigram_unit_nll")
    counts = np.array(units["targets"])
    unigram = None if unigram is None else float(np.average(unigram, weights=counts))
    variants = {v.name: v for v in losses.variants if v.name in losses.reference}
    asked = declared["lengths"] or losses.lengths
    primary = [length for length in asked if length in losses.lengths]
    # Failed cells count: the family follows from the declared study, not from its outcome.
    absent = losses.missing.keys() - losses.failed
    judged = [
        (variant.name, length)
        for variant in losses.variants
        for length in losses.lengths
        if length > facts["trained_length"] and (variant.name, length) not in absent
    ]
    differences = declared["family"] or (len(losses.variants) - 1) * len(primary)
    r = LossComparison(
        title=title_of(losses.name, losses.group),
        place={"evaluation": losses.name, **dict(losses.group)},
        variants={name: variant.columns for name, variant in variants.items()},
        noun="scheme",
        facts={**facts, "targets": sum(units["targets"]), "checkpoint_hash": None},
        seeds={name: len(by_seed) for name, by_seed in losses.reference.items()},
        lengths=losses.lengths,
        unit_kind=units["kind"],
        units=len(units["names"]),
        losses=losses,
        baseline=study.baseline if study.baseline in variants else None,
        primary=primary,
        family=max(1, len(judged)),
        difference_family=max(1, differences),
        tolerance=declared["tolerance"],
        confidence=declared["confidence"],
        unigram=unigram,
        undertrained=[
            name
            for name, rows in losses.reference.items()
            if is_undertrained(float(seed_means(unit_nll(rows), counts).mean()), unigram)
        ],
    )
    for name in variants:
        _add_levels(r, name)
        _add_reach(r, name)
        _add_repeated(r, name)
    if r.baseline:
        r.truncated = r.table.value(r.baseline, "nll_as_trained", r.trained_length)
        baseline = variants.pop(r.baseline)
        for variant in variants.values():
            for length in primary:
                _add_difference(r, variant, baseline, length)
    return r


def _add_levels(r: LossComparison, name: str) -> None:
    """NLL, change, verdict and gain at every length."""
    losses = r.losses
    reference = losses.reference[name]
    r.add_seeds(name, "nll_as_trained", reference, list(reference), r.trained_length)
    if r.unigram is not None:
        r.table.add(name, "unigram_nll", r.unigram)
    changes = {}
    for length in losses.lengths:
        if losses.seeds(name, length):
            changes[length] = losses.shift(name, length)
            _add_length(r, name, length)
            r.add(name, "gain", -changes[length], length)
        else:
            reason = losses.missing.get((name, length), "not measured")
            r.table.add(name, "failure", math.nan, length, note=reason)
    missing = set(losses.lengths) - set(changes)
    is_precise = r.is_precise(name)
    add_verdicts(r.table, name, changes, r.rules(name), missing=missing, is_precise=is_precise)


def _add_length(r: LossComparison, name: str, length: int) -> None:
    """NLL at one length."""
    rows = r.losses.rows[name, length]
    seeds = r.losses.seeds(name, length)
    r.add_seeds(name, "nll", rows, seeds, length)
    r.table.add(name, "perplexity", math.exp(r.table.value(name, "nll", length)), length)
    bits = [rows[seed].get("bits_per_byte") for seed in seeds]
    if None not in bits:
        r.table.add(name, "bits_per_byte", np.mean(bits), length)


def _add_reach(r: LossComparison, name: str) -> None:
    """The gain of each step of the grid, and the context reach."""
    losses = r.losses
    # Without overlap a longer window also has fewer targets with little context.
    if losses.facts["protocol"] == "non-overlapping" or not r.is_precise(name):
        return
    rows = {}
    failed = []
    for length in losses.lengths:
        if (name, length) in losses.rows:
            rows[length] = losses.rows[name, length]
        if (name, length) in losses.failed:
            failed.append(length)
    if len(rows) < 2:
        return
    nll = {length: unit_nll(measured) for length, measured in rows.items()}

    def gain(a: int, b: int) -> np.ndarray:
        return nll[a] - nll[b]

    add_reach(r.table, name, list(nll), gain, r.rules(name), failed)


def _add_repeated(r: LossComparison, name: str) -> None:
    """NLL and read gain of repeated text by length and distance."""
    for (variant, length, (low, high)), rows in r.losses.repeated.items():
        if variant == name:
            first = next(iter(rows.values()))
            if "unit_targets" not in first:
                raise StudyError(
                    "an evaluation of repeated text does not state the targets of each unit; "
                    "delete its results.json in the runs and run study.py again"
                )
            counts = np.array(first["unit_targets"])
            place = {"length": length, "at": low, "until": high, "counts": counts}
            nll = unit_nll(rows)
            control = unit_nll(rows, metric="unit_control_nll")
            r.add(name, "repeated_nll", nll, **place)
            r.add(name, "control_nll", control, **place)
            r.add(name, "read_gain", control - nll, **place)


def _add_difference(
    r: LossComparison,
    variant: StudyVariant,
    baseline: StudyVariant,
    length: int,
) -> None:
    """NLL minus that of the baseline; two methods on the same checkpoints are paired by seed."""
    ours = r.losses.rows.get((variant.name, length), {})
    theirs = r.losses.rows.get((baseline.name, length), {})
    level = {"alpha": 1 - r.confidence, "family": r.difference_family}
    note = ""
    if not ours or not theirs:
        return
    if variant.scheme == baseline.scheme:
        note = "paired by seed"
        difference = change(unit_nll(ours) - unit_nll(theirs, ours), r.counts, **level)
    else:
        difference = compare(unit_nll(ours), unit_nll(theirs), r.counts, **level)
    r.table.add(variant.name, "difference", difference, length, note=note)
