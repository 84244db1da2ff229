"""The results of tasks, attention, generated text and loss by position.

Task accuracies have intervals over seeds and units, like losses. All other metrics are means over
seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from evaluation.statistics.seeds import SeedInterval, change
from studies.results.stored import CONFIDENCE, Group, StoredStudy
from studies.results.table import ResultsTable

TASKS = "tasks"
ATTENTION = "attention"
GENERATION = "generation"
BY_POSITION = "by-position"
ABOVE_CHANCE = "above chance"
NOT_ABOVE = "not shown above chance"
POINT = "points only"
# Facts that results must share to be averaged; others are excluded.
SHARED = ("protocol", "trained_length", "tokenizer_hash", "targets_hash", "items_hash", "bos")
Number = tuple[str, int | None, tuple, object]  # metric, length, where, value


def read_other(
    study: StoredStudy,
    name: str,
    group: Group,
) -> ResultsTable | None:
    """None if the evaluation has another protocol, or no results yet."""
    results = study.results(name, group)
    first = results[0][2] if results else {}
    reader = READERS.get(first.get("protocol", ""))
    if reader is None:
        return None
    facts = {k: v for k, v in first.items() if k not in ("cells", "by_distance", "summary")}
    table = ResultsTable(name, group, study.variants, facts)
    numbers: dict[tuple, list] = {}
    for variant, _, result in results:
        if all(result.get(key) == first.get(key) for key in SHARED):
            for metric, length, where, value in reader(result, variant.method):
                numbers.setdefault((variant.name, metric, length, where), []).append(value)
    lengths = {length for _, metric, length, _ in numbers if metric == "accuracy"}
    family = max(1, len(study.variants) * len(lengths))
    for (variant, metric, length, where), values in numbers.items():
        if metric == "accuracy":
            units = np.array(values, dtype=np.float64)  # (S, D)
            share = change(units, alpha=1 - CONFIDENCE, family=family)
            table.add(
                variant,
                metric,
                share,
                length,
                verdict=_verdict(share, facts["chance"]),
            )
        else:
            table.add(variant, metric, float(np.mean(values)), length, where)
    return table


def _verdict(share: SeedInterval, chance: float) -> str:
    if share.low > chance:
        return ABOVE_CHANCE
    return NOT_ABOVE if share.claimed else POINT


def _tasks(result: dict, method: str) -> Iterator[Number]:
    for row in result["cells"]:
        if row["method"] == method and row.get("unit_accuracy"):
            yield "accuracy", row["length"], (), row["unit_accuracy"]  # (D,) of units
            yield "exact", row["length"], (), row["exact"]
    for spot in result.get("by_depth") or []:
        if spot["method"] == method and spot["share"]["n"]:
            yield "accuracy_at_depth", spot["length"], (spot["where"],), spot["share"]["share"]


def _attention(result: dict, method: str) -> Iterator[Number]:
    for row in result["cells"]:
        is_total = row["layer"] is None and row["head"] is None
        if row["method"] == method and is_total and row["value"] is not None:
            yield row["measure"], row["length"], (), row["value"]


def _generation(result: dict, method: str) -> Iterator[Number]:
    for row in result["cells"]:
        if row["method"] == method and row["value"] is not None:
            yield row["measure"], None, (row["source"], row["start"], row["stop"]), row["value"]


def _positions(result: dict, method: str) -> Iterator[Number]:
    for bucket in (result.get("by_position") or {}).get(method, []):
        where = (bucket["low"], bucket["high"])
        yield "nll_at_positions", None, where, bucket["nll"]
        yield "gain_at_positions", None, where, bucket["gain"]["estimate"]


READERS = {TASKS: _tasks, ATTENTION: _attention, GENERATION: _generation, BY_POSITION: _positions}
