"""The numbers of a loss evaluation of one run under its methods, of several runs, or of the schemes
of a study, all computed from results.json."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evaluation.methods import TRUNCATE
from evaluation.reports.document import counted, dtype_note
from evaluation.reports.report import ReportedResults
from evaluation.statistics.intervals import interval, seed_means
from evaluation.statistics.loss_verdicts import (
    POINTS_ONLY,
    PRECISION,
    VariantLosses,
    VerdictRules,
    is_undertrained,
    level_rows,
    reach_rows,
    repeated_rows,
    rounding,
    seed_rows,
    variant_losses,
    verdict_rows,
)
from evaluation.statistics.results_table import ResultRow, results_table, row_of
from evaluation.statistics.stored_results import StoredResults


@dataclass(kw_only=True)
class LossResults(ReportedResults):
    """The results of a loss evaluation. Metrics of the table, by length unless stated otherwise:

        nll, perplexity, bits_per_byte   NLL, perplexity and bits per byte of the evaluated text
        delta                            NLL(L) − NLL(as trained, L0), simultaneous over all
                                         verdicts, with the verdict
        gain                             −delta, with an individual interval
        gain_per_doubling                gain per doubling of length, from the previous length to L
        held_to, break_point             (all lengths) largest length held, smallest length broken
        context_reach                    (all lengths) smallest length such that every longer
                                         context is shown to gain less than the tolerance
        gain_shown_to                    (all lengths) longest length shown to improve on all
                                         shorter ones
        difference                       NLL minus the baseline's NLL
        repeated_nll, control_nll,       NLL of tokens that repeat text at distances from `at` to
        read_gain                        before `until`, before and after replacing it; the change
        nll_at_positions,                (one length) NLL of positions from `at` to before `until`,
        gain_at_positions                and its gain over truncation
        failure                          `note`: why there is no number

    A study also has nll_as_trained (at L0) and unigram_nll, and nll and nll_as_trained of each
    seed.

    Attributes:
        lengths: lengths of the grid.
        unit_kind, units: the independent units of the intervals.
        family, difference_family: numbers of simultaneous verdicts and differences.
        truncated_nll: NLL of the baseline with its context truncated to the trained length.
        unigram: NLL of a unigram model on the same targets.
        undertrained: variants of models hardly better than the unigram model.
        imprecise: variants whose losses in half precision differ too much from float32 for
            verdicts.
        baseline: the variant that the others are compared with, at the lengths `primary`.
        per: unit of the losses: token, or byte if tokenizers differ.
        missing: the lengths without comparable numbers, by (variant or cell of a study, reason).
    """

    lengths: list[int]
    unit_kind: str
    units: int
    tolerance: float
    confidence: float
    family: int = 1
    difference_family: int = 1
    truncated_nll: float | None = None
    unigram: float | None = None
    undertrained: list[str] = field(default_factory=list)
    imprecise: Sequence[str] = ()
    baseline: str | None = None
    primary: Sequence[int] = ()
    also_trained: Sequence[int] = ()  # trained lengths of further runs
    per: str = "token"
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def against(self) -> str:
        """The label of a difference, such as `NLL minus that of rope`."""
        return f"NLL minus that of {self.baseline}"

    def beyond(self, name: str) -> list[ResultRow]:
        """Changes with their verdicts at the measured lengths beyond the trained length."""
        return [row for row in self.rows("delta", name) if row.verdict]

    def has_verdicts(self, name: str) -> bool:
        """Whether the variant has enough seeds and units for verdicts."""
        return any(row.verdict != POINTS_ONLY for row in self.beyond(name))

    @property
    def sample(self) -> str:
        noun = "targets" if self.per == "token" else f"{self.per}s"
        targets = f"{self.record['targets']:,} {noun} of {counted(self.units, self.unit_kind)}"
        documents = self.record.get("documents")
        if documents and self.unit_kind != "document":
            targets += f" ({counted(documents, 'document')})"
        if self.seeds:
            targets += f", {self.seed_counts('seed')} per {self.noun}"
        return targets + dtype_note(self.record.get("dtype", "float32"))

    @property
    def intervals(self) -> str:
        """The description of the simultaneous intervals of gains; '' if none is reported."""
        if not any(map(self.has_verdicts, self.names)):
            return ""
        over = f"seeds and {self.unit_kind}s" if self.seeds else f"{self.unit_kind}s"
        note = f"{100 * self.confidence:g}% intervals over {over}"
        return note if self.family == 1 else f"{note}, simultaneous over {self.family}"


def loss_results(
    results: Sequence[StoredResults],
    variants: Mapping[str, dict[str, str]],
    *,
    tolerance: float,
    confidence: float,
    baseline: str | None = None,
    primary: Sequence[int] | None = None,
    difference_family: int | None = None,
    **described: Any,
) -> LossResults:
    """The numbers of results on the same targets: verdicts for one run, differences from the
    baseline for several runs, both for a study, whose results have seeds.

    Args:
        variants: the variants of the results with their columns; for a study, also variants without
            results.
        baseline: the variant that the others are compared with.
        primary: lengths of the comparisons with the baseline; None: all lengths.
        difference_family: number of simultaneous comparisons; None: count them.
        described: attributes of `LossResults` that do not affect numbers.
    """
    first = results[0].record
    is_study = bool(results[0].seed)
    measured = {name: [each for each in results if each.variant == name] for name in variants}
    losses = {name: variant_losses(own, first["lengths"]) for name, own in measured.items()}
    shown = {
        name: columns
        for name, columns in variants.items()
        if not is_study or losses[name].truncated_nll is not None
    }
    imprecise = [name for name, own in measured.items() if rounding(own) >= PRECISION * tolerance]
    judged = list(losses)
    if not is_study:
        judged = [name for name in losses if not baseline and name not in (TRUNCATE, *imprecise)]
    # Failed cells count: the size of the family must not depend on outcomes.
    family = [
        (name, length)
        for name in judged
        for length in first["lengths"]
        if length > first["trained_length"] and not losses[name].is_absent(length)
    ]
    r = LossResults(
        variants=shown,
        lengths=first["lengths"],
        unit_kind=first["units"]["kind"],
        units=len(first["units"]["names"]),
        seeds={name: len(losses[name].seeds) for name in shown if is_study},
        tolerance=tolerance,
        confidence=confidence,
        family=max(1, len(family)),
        imprecise=imprecise,
        baseline=baseline if baseline in shown else None,
        primary=[n for n in primary or first["lengths"] if n in first["lengths"]],
        missing=missing_of(losses),
        **described,
    )
    counts = np.array(first["units"]["targets"])
    rows: list[ResultRow] = []
    for name in shown:
        rows += _variant_rows(r, name, losses[name], measured[name], counts, name in judged)
    if r.baseline is not None:
        compared = list(_compared(r, losses))
        r.difference_family = max(1, difference_family or len(compared))
        rows += [_difference(r, losses, counts, *where) for where in compared]
    r.table = results_table(rows)
    return r


def _variant_rows(
    r: LossResults,
    name: str,
    losses: VariantLosses,
    results: Sequence[StoredResults],
    counts: np.ndarray,
    is_judged: bool,
) -> Iterator[ResultRow]:
    """The rows of one variant; adds the variant to `r.undertrained` if it is undertrained."""
    level = unigram = None
    if losses.truncated_nll is not None:
        level = float(seed_means(losses.truncated_nll, counts).mean())
    if (of_units := results[0].record.get("unigram_unit_nll")) is not None:
        unigram = float(np.average(of_units, weights=counts))
    if is_undertrained(level, unigram):
        r.undertrained.append(name)
    rules = VerdictRules(
        r.trained_length,
        r.tolerance,
        counts,
        alpha=1 - r.confidence,
        family=r.family,
        has_learned=name not in r.undertrained,
        is_precise=name not in r.imprecise,
    )
    if losses.seeds and losses.truncated_nll is not None:
        baseline = rules.interval(losses.truncated_nll)
        yield row_of(name, "nll_as_trained", baseline, r.trained_length)
        yield from seed_rows(
            name, "nll_as_trained", losses, losses.truncated_nll, rules, r.trained_length
        )
        if unigram is not None:
            yield row_of(name, "unigram_nll", unigram)
    yield from level_rows(name, losses, rules)
    protocol = results[0].record["protocol"]
    if is_judged and losses.truncated_nll is not None and protocol != "by-position":
        yield from verdict_rows(name, losses, rules)
        # Not for non-overlapping windows: a longer length also means fewer targets with little
        # context.
        if protocol != "non-overlapping" and rules.is_precise:
            yield from reach_rows(name, losses, rules)
    if losses.seeds or results[0].method != TRUNCATE:
        yield from repeated_rows(name, results, rules, r.record.get("repeated", {}).get("hash"))


def _compared(r: LossResults, losses: Mapping[str, VariantLosses]) -> Iterator[tuple[str, int]]:
    """The variants and lengths that are compared with the baseline."""
    assert r.baseline is not None
    truncated = r.variants[r.baseline] | {"method": TRUNCATE}
    for name, columns in r.variants.items():
        # one run truncated to the trained length is the run as trained
        same = [r.trained_length] if columns == truncated and not r.seeds else []
        for length in r.primary:
            is_measured = length in losses[name].nll and length in losses[r.baseline].nll
            if name != r.baseline and is_measured and length not in same:
                yield name, length


def _difference(
    r: LossResults,
    losses: Mapping[str, VariantLosses],
    counts: np.ndarray,
    name: str,
    length: int,
) -> ResultRow:
    """NLL minus the baseline's NLL, paired by unit; two methods on the same checkpoints are also
    paired by seed."""
    assert r.baseline is not None
    ours = losses[name].nll[length]
    theirs = losses[r.baseline].nll[length]
    level = {"alpha": 1 - r.confidence, "family": r.difference_family}
    if r.seeds and r.variants[name]["scheme"] == r.variants[r.baseline]["scheme"]:
        difference = interval(ours - theirs, counts, **level)
        return row_of(name, "difference", difference, length, note="paired by seed")
    return row_of(name, "difference", interval(ours, counts, minus=theirs, **level), length)


def missing_of(losses: Mapping[str, VariantLosses]) -> dict[tuple[str, str], str]:
    """The lengths without numbers, by (variant, reason)."""
    lengths: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, own in losses.items():
        for length, reason in own.no_number_because.items():
            lengths[name, reason].append(f"{length:,}")
    return {key: ", ".join(own) for key, own in lengths.items()}
