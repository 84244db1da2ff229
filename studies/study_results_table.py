"""The table of results of one evaluation of a study in one group of its cells.

Losses and task accuracies have intervals over seeds and units together; with fewer than 3 seeds or
6 units there are only point estimates. All other metrics are means over seeds. A number that one
seed of a variant lacks is missing for the variant: a mean over the other seeds would be biased.
"""

import math
from collections import Counter, defaultdict

import numpy as np

from evaluation.methods import name_of
from evaluation.reports.diagnostic_report import attention_rows, flat_rows
from evaluation.reports.loss_results import LossResults, loss_results
from evaluation.reports.loss_results_json import position_rows
from evaluation.reports.report import ReportedResults
from evaluation.reports.task_report import task_rows
from evaluation.statistics.intervals import interval
from evaluation.statistics.results_table import ResultRow, results_table, row_of
from evaluation.tasks.task_analysis import ABOVE_CHANCE
from studies.study_results_reader import CONFIDENCE, Group, StoredStudy, title_of

PROTOCOLS = ("fixed-targets", "sliding", "non-overlapping")  # with loss by unit and length
NOT_ABOVE = "not shown above chance"
POINT = "points only"
ROWS = {  # by other protocol: the function that reads the rows of results.json
    "tasks": task_rows,
    "attention": attention_rows,
    "generation": flat_rows,
    "by-position": position_rows,
}


def read_losses(study: StoredStudy, name: str, group: Group) -> LossResults | None:
    """The losses of one evaluation; None for other protocols or without results."""
    results, excluded = study.results(name, group)
    if not results or results[0].record["protocol"] not in PROTOCOLS:
        return None
    first = results[0].record
    declared = study.declared
    lengths = dict.fromkeys(declared["lengths"] or first["lengths"])
    primary = [n for n in lengths if n in first["lengths"]]
    r = loss_results(
        results,
        {variant.name: variant.columns for variant in study.variants},
        title=title_of(name, group),
        study_columns={"evaluation": name, **dict(group)},
        noun="scheme",
        record={**first, "targets": sum(first["units"]["targets"]), "checkpoint_hash": None},
        baseline=study.baseline,
        primary=primary,
        difference_family=declared["family"] or (len(study.variants) - 1) * len(primary),
        tolerance=declared["tolerance"],
        confidence=declared["confidence"],
    )
    r.missing |= dict.fromkeys(excluded.items(), "all")
    r.unigram = next((row.value for row in r.rows("unigram_nll")), None)
    if r.baseline is not None:
        r.truncated_nll = r.value("nll_as_trained", r.baseline, r.trained_length)
    return r


def read_other(study: StoredStudy, name: str, group: Group) -> ReportedResults | None:
    """The results of tasks, attention, generated text or loss by position; None for other protocols
    or without results."""
    results, _ = study.results(name, group)
    first = results[0].record if results else {}
    rows_of = ROWS.get(first.get("protocol", ""))
    if rows_of is None:
        return None
    seeds: dict[tuple, list[ResultRow]] = defaultdict(list)
    units: dict[tuple, list[list[float]]] = defaultdict(list)
    for each in results:
        for row in rows_of(each.record):
            # without the single layers and heads of an evaluation of attention
            if row.variant == name_of(each.method) and not row.where.startswith("layer"):
                row = row._replace(variant=each.variant)
                seeds[row.key].append(row)
        for cell in each.record["cells"]:
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
        # item i belongs to unit i mod D
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
