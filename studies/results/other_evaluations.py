"""The results of tasks, attention, generated text and loss by position of a study.

Task accuracies have intervals over seeds and units, like losses. All other metrics are means over
seeds. What one seed of a variant lacks has no number: a mean over the others only would be biased.
"""

import math
from collections import Counter, defaultdict

import numpy as np

from evaluation.reports.diagnostic_report import attention_rows, flat_rows
from evaluation.reports.position_report import position_rows
from evaluation.reports.reported_results import ReportedResults
from evaluation.reports.task_report import task_rows
from evaluation.results_table import ResultRow
from evaluation.scoring.methods import name_of
from evaluation.statistics.seeds import change
from evaluation.tasks.task_analysis import ABOVE_CHANCE
from studies.results.stored import CONFIDENCE, Group, StoredStudy, title_of

NOT_ABOVE = "not shown above chance"
POINT = "points only"
ROWS = {  # by protocol: the rows of results.json
    "tasks": task_rows,
    "attention": attention_rows,
    "generation": flat_rows,
    "by-position": position_rows,
}


def read_other(study: StoredStudy, name: str, group: Group) -> ReportedResults | None:
    """None if the evaluation has another protocol, or no results yet."""
    results, _ = study.results(name, group)
    first = results[0][2] if results else {}
    rows_of = ROWS.get(first.get("protocol", ""))
    if rows_of is None:
        return None
    seeds: dict[tuple, list[ResultRow]] = defaultdict(list)
    units: dict[tuple, list[list[float]]] = defaultdict(list)
    for variant, _, result in results:
        for row in rows_of(result):
            # not the single layers and heads of an evaluation of attention
            if row.variant == name_of(variant.method) and not row.where.startswith("layer"):
                row = row._replace(variant=variant.name)
                seeds[row.place].append(row)
        for cell in result["cells"]:
            metric = "accuracy" if "unit_accuracy" in cell else "exact"
            values = cell.get(f"unit_{metric}")
            if values and cell["method"] == variant.method:
                units[variant.name, metric, cell["length"]].append(values)
    r = ReportedResults(
        title=title_of(name, group),
        place={"evaluation": name, **dict(group)},
        variants={variant.name: variant.columns for variant, *_ in results},
        noun="scheme",
        facts=first | {"checkpoint_hash": None},
    )
    measured = Counter(variant.name for variant, *_ in results)
    for rows in seeds.values():
        if len(rows) < measured[rows[0].variant]:
            continue
        mean = float(np.mean([row.value for row in rows]))
        row = rows[0]._replace(value=mean, low=math.nan, high=math.nan, verdict="")
        r.table.put(row)
    lengths = {length for _, _, length in units}
    family = max(1, len(study.variants) * len(lengths))
    for (variant, metric, length), values in units.items():
        if len(values) < measured[variant]:
            continue
        shares = np.array(values)  # (S, D)
        # item i is one of unit i mod D
        counts = np.bincount(np.arange(first["items"]) % shares.shape[1])
        share = change(shares, counts, alpha=1 - CONFIDENCE, family=family)
        word = NOT_ABOVE if math.isfinite(share.low) else POINT
        if share.low > first["chance"]:
            word = ABOVE_CHANCE
        r.table.add(variant, metric, share, length, verdict=word)
    return r
