"""The table of results of one evaluation of a study in one group of its cells.

Losses and task accuracies have intervals over seeds and units together; with fewer than 3 seeds or
6 units there are only point estimates. All other metrics are means over seeds. What one seed
of a variant lacks has no number: a mean over the others only would be biased. The reference of a
variant is the NLL of the same checkpoints as trained, at the trained length L0 and on the same
targets.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from evaluation.evaluation_settings import HALF
from evaluation.methods import TRAINED, name_of
from evaluation.reports.diagnostic_report import attention_rows, flat_rows
from evaluation.reports.loss_report import LossResults, position_rows
from evaluation.reports.report import ReportedResults
from evaluation.reports.task_report import task_rows
from evaluation.statistics.intervals import interval, seed_means
from evaluation.statistics.loss_table import (
    PRECISION,
    VariantLosses,
    VerdictRules,
    is_undertrained,
    level_rows,
    reach_rows,
    seed_rows,
    verdict_rows,
)
from evaluation.statistics.results_table import ResultRow, results_table, row_of
from evaluation.tasks.task_analysis import ABOVE_CHANCE
from studies.study_results_reader import (
    CONFIDENCE,
    Group,
    StoredStudy,
    StudyVariant,
    VariantResult,
    title_of,
)

PROTOCOLS = ("fixed-targets", "sliding", "non-overlapping")  # with the loss of units by length
NOT_ABOVE = "not shown above chance"
POINT = "points only"
ROWS = {  # by other protocol: the rows of results.json
    "tasks": task_rows,
    "attention": attention_rows,
    "generation": flat_rows,
    "by-position": position_rows,
}
UNMEASURED = {"failure": "not measured for every seed", "exists": True}  # a row that is missing


def read_losses(study: StoredStudy, name: str, group: Group) -> LossResults | None:
    """The losses of one evaluation; None for another protocol or no results."""
    results, excluded = study.results(name, group)
    if not results or results[0].result["protocol"] not in PROTOCOLS:
        return None
    first = results[0].result
    declared = study.declared
    units = first["units"]
    counts = np.array(units["targets"])
    unigram = first.get("unigram_unit_nll")
    unigram = None if unigram is None else float(np.average(unigram, weights=counts))
    measured = {
        variant.name: [each for each in results if each.variant == variant.name]
        for variant in study.variants
    }
    losses = {label: variant_losses(own, first) for label, own in measured.items()}
    variants = {
        variant.name: variant
        for variant in study.variants
        if losses[variant.name].baseline_nll is not None
    }
    primary = [n for n in declared["lengths"] or first["lengths"] if n in first["lengths"]]
    # Failed cells count: the family follows from the declared study, not from its outcome.
    judged = [
        (label, length)
        for label, own in losses.items()
        for length in first["lengths"]
        if length > first["trained_length"]
        and (length not in own.no_number_because or length in own.failed_lengths)
    ]
    r = LossResults(
        title=title_of(name, group),
        study_columns={"evaluation": name, **dict(group)},
        variants={label: variant.columns for label, variant in variants.items()},
        noun="scheme",
        record={**first, "targets": sum(units["targets"]), "checkpoint_hash": None},
        seeds={label: len(losses[label].seeds) for label in variants},
        lengths=first["lengths"],
        unit_kind=units["kind"],
        units=len(units["names"]),
        baseline=study.baseline if study.baseline in variants else None,
        primary=primary,
        family=max(1, len(judged)),
        difference_family=max(1, declared["family"] or (len(losses) - 1) * len(primary)),
        tolerance=declared["tolerance"],
        confidence=declared["confidence"],
        unigram=unigram,
        missing=missing_of(losses, excluded),
        imprecise=[
            label
            for label in variants
            if rounding(measured[label]) >= PRECISION * declared["tolerance"]
        ],
    )
    rows: list[ResultRow] = []
    for label in variants:
        own = losses[label]
        assert own.baseline_nll is not None
        level = float(seed_means(own.baseline_nll, counts).mean())
        if is_undertrained(level, unigram):
            r.undertrained = [*r.undertrained, label]
        rows += _loss_rows(r, label, own, counts)
        rows += _repeated_rows(r, measured[label])
        if label == r.baseline:
            r.baseline_nll = level
    rows += _difference_rows(r, variants, losses, counts)
    r.table = results_table(rows)
    return r


def variant_losses(results: Sequence[VariantResult], first: dict) -> VariantLosses:
    """The losses of a variant, of the seeds that were measured as trained at the trained length.

    If one seed has no number at a length, because it failed or was not measured, the others are
    dropped too: a mean over the successful seeds only would be biased.
    """
    rows = {
        (each.seed, row["method"], row["length"]): row
        for each in results
        for row in each.result["cells"]
    }
    trained = {each.seed: (each.seed, TRAINED, first["trained_length"]) for each in results}
    seeds = [seed for seed, key in trained.items() if rows.get(key, {}).get("unit_nll") is not None]
    losses = VariantLosses(seeds=seeds)
    failed = []
    for length in first["lengths"]:
        own = {
            each.seed: rows.get((each.seed, each.method, length), UNMEASURED) for each in results
        }
        without = [row for row in own.values() if row.get("unit_nll") is None]
        if without:
            losses.no_number_because[length] = without[-1].get("failure") or "no number"
            if len(without) < len(own) or any(row.get("exists") for row in without):
                failed.append(length)
        elif seeds:
            losses.nll[length] = unit_values([own[seed] for seed in seeds])
            bits = [own[seed].get("bits_per_byte") for seed in seeds]
            if None not in bits:
                losses.more[length] = {"bits_per_byte": float(np.mean(bits))}
    losses.failed_lengths = failed
    if seeds:
        losses.baseline_nll = unit_values([rows[trained[seed]] for seed in seeds])
    return losses


def unit_values(rows: Sequence[dict], metric: str = "unit_nll") -> np.ndarray:
    """(S, D) mean of each unit, in the given order of seeds."""
    return np.array([row[metric] for row in rows], dtype=np.float64)


def rounding(results: Sequence[VariantResult]) -> float:
    """The largest mean difference of half precision from float32 in nats, as trained or under
    the method."""
    return max(
        abs(row.get(f"{half}_minus_float32") or 0.0)
        for each in results
        for row in each.result["cells"]
        for half in HALF
        if row["method"] in (each.method, TRAINED)
    )


def missing_of(
    losses: Mapping[str, VariantLosses], excluded: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """The lengths without numbers by variant and reason, and the cells that are not comparable."""
    lengths: dict[tuple[str, str], list[str]] = defaultdict(list)
    for label, own in losses.items():
        for length, reason in own.no_number_because.items():
            lengths[label, reason].append(f"{length:,}")
    missing = {key: ", ".join(own) for key, own in lengths.items()}
    return missing | dict.fromkeys(excluded.items(), "all")


def _loss_rows(
    r: LossResults, name: str, losses: VariantLosses, counts: np.ndarray
) -> Iterator[ResultRow]:
    assert losses.baseline_nll is not None
    l0 = r.trained_length
    rules = VerdictRules(
        l0,
        r.tolerance,
        counts,
        alpha=1 - r.confidence,
        family=r.family,
        has_learned=name not in r.undertrained,
        is_precise=name not in r.imprecise,
    )
    level = rules.interval(losses.baseline_nll, alpha=rules.alpha)
    yield row_of(name, "nll_as_trained", level, l0)
    yield from seed_rows(name, "nll_as_trained", losses, losses.baseline_nll, rules, l0)
    if r.unigram is not None:
        yield row_of(name, "unigram_nll", r.unigram)
    yield from level_rows(name, losses, rules)
    yield from verdict_rows(name, losses, rules)
    # Without overlap a longer window also has fewer targets with little context.
    if r.record["protocol"] != "non-overlapping" and rules.is_precise:
        yield from reach_rows(name, losses, rules)


def _repeated_rows(r: LossResults, results: Sequence[VariantResult]) -> Iterator[ResultRow]:
    """NLL and read gain of repeated text by length and distance, of the seeds with the same
    targets."""
    targets = r.record.get("repeated", {}).get("hash")
    by_row: dict[tuple, list[dict]] = defaultdict(list)
    for each in results:
        repeated = each.result.get("repeated", {})
        for row in repeated.get("cells", ()) if repeated.get("hash") == targets else ():
            if row["method"] == each.method:
                key = (each.variant, row["length"], row["distance_low"], row["distance_high"])
                by_row[key].append(row)
    for (name, length, low, high), rows in by_row.items():
        counts = np.array(rows[0]["unit_targets"])
        nll = unit_values(rows)
        control = unit_values(rows, "unit_control_nll")
        values = {"repeated_nll": nll, "control_nll": control, "read_gain": control - nll}
        for metric, each in values.items():
            mean = interval(each, counts, alpha=1 - r.confidence)
            yield row_of(name, metric, mean, length, at=low, until=high)


def _difference_rows(
    r: LossResults,
    variants: Mapping[str, StudyVariant],
    losses: Mapping[str, VariantLosses],
    counts: np.ndarray,
) -> Iterator[ResultRow]:
    """NLL minus that of the baseline; two methods on the same checkpoints are paired by seed."""
    if r.baseline is None:
        return
    theirs = losses[r.baseline].nll
    level = {"alpha": 1 - r.confidence, "family": r.difference_family}
    for name, variant in variants.items():
        ours = losses[name].nll
        for length in r.primary:
            if name == r.baseline or length not in ours or length not in theirs:
                continue
            if variant.scheme == variants[r.baseline].scheme:
                note = "paired by seed"
                difference = interval(ours[length] - theirs[length], counts, **level)
            else:
                note = ""
                difference = interval(ours[length], counts, minus=theirs[length], **level)
            yield row_of(name, "difference", difference, length, note=note)


def read_other(study: StoredStudy, name: str, group: Group) -> ReportedResults | None:
    """The results of tasks, attention, generated text or loss by position; None for another
    protocol or no results."""
    results, _ = study.results(name, group)
    first = results[0].result if results else {}
    rows_of = ROWS.get(first.get("protocol", ""))
    if rows_of is None:
        return None
    seeds: dict[tuple, list[ResultRow]] = defaultdict(list)
    units: dict[tuple, list[list[float]]] = defaultdict(list)
    for each in results:
        for row in rows_of(each.result):
            # not the single layers and heads of an evaluation of attention
            if row.variant == name_of(each.method) and not row.where.startswith("layer"):
                row = row._replace(variant=each.variant)
                seeds[row.key].append(row)
        for cell in each.result["cells"]:
            metric = "accuracy" if "unit_accuracy" in cell else "exact"
            values = cell.get(f"unit_{metric}")
            if values and cell["method"] == each.method:
                units[each.variant, metric, cell["length"]].append(values)
    measured = Counter(each.variant for each in results)
    means: dict[tuple, ResultRow] = {}
    for rows in seeds.values():
        if len(rows) == measured[rows[0].variant]:
            mean = float(np.mean([row.value for row in rows]))
            row = rows[0]._replace(value=mean, low=math.nan, high=math.nan, verdict="")
            means[row.key] = row
    family = max(1, len(study.variants) * len({length for _, _, length in units}))
    for (variant, metric, length), values in units.items():
        if len(values) < measured[variant]:
            continue
        shares = np.array(values)  # (S, D)
        # item i is one of unit i mod D
        counts = np.bincount(np.arange(first["items"]) % shares.shape[1])
        share = interval(shares, counts, alpha=1 - CONFIDENCE, family=family)
        word = NOT_ABOVE if math.isfinite(share.low) else POINT
        if share.low > first["chance"]:
            word = ABOVE_CHANCE
        row = row_of(variant, metric, share, length, verdict=word)
        means[row.key] = row
    names = [variant for variant in study.variants if variant.name in measured]
    return ReportedResults(
        title=title_of(name, group),
        study_columns={"evaluation": name, **dict(group)},
        variants={variant.name: variant.columns for variant in names},
        noun="scheme",
        record=first | {"checkpoint_hash": None},
        table=results_table(means.values()),
    )
