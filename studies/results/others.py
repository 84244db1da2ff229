"""Evaluations other than loss by length: tasks, attention, generated text, loss by position.

Task accuracies have intervals over seeds and units, like losses. The others are reported as means over seeds,
without intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from evaluation.statistics.seeds import SeedInterval, change
from studies.results.stored import CONFIDENCE, Group, StoredStudy, StudyVariant

TASKS, ATTENTION, GENERATION, BY_POSITION = "tasks", "attention", "generation", "by-position"
KNOWN = (TASKS, ATTENTION, GENERATION, BY_POSITION)
# Facts that results must share to be averaged; others are excluded.
SHARED = ("protocol", "trained_length", "tokenizer_hash", "targets_hash", "items_hash", "bos")


@dataclass(frozen=True)
class AccuracyMeasure:
    """A variant at a length: accuracy over seeds and units, and the share of exactly generated answers."""

    variant: str
    length: int
    seeds: int
    share: SeedInterval
    exact: float

    def verdict(self, chance: float) -> str:
        if math.isnan(self.share.low):
            return "point"
        return "above chance" if self.share.low > chance else "not shown above chance"


@dataclass
class OtherMeasure:
    """One evaluation in one group.

    Attributes:
        facts: facts from the results of the first cell.
        accuracy: tasks only, by variant and length; simultaneous over `family` intervals.
        depth: tasks only, (variant, length, depth) -> accuracy, mean over seeds.
        means: others only, (variant, where, measure) -> mean over seeds; `where` is a length, or a source and
            a range of positions.
    """

    name: str
    group: Group
    protocol: str
    facts: dict
    variants: list[str] = field(default_factory=list)
    accuracy: dict[tuple[str, int], AccuracyMeasure] = field(default_factory=dict)
    depth: dict[tuple[str, int, float], float] = field(default_factory=dict)
    means: dict[tuple, float] = field(default_factory=dict)
    family: int = 1

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]

    @property
    def lengths(self) -> list[int]:
        found = {key[1] for key in (*self.accuracy, *self.means) if isinstance(key[1], int)}
        return sorted(found)


def read_other(study: StoredStudy, name: str, group: Group) -> OtherMeasure | None:
    """None if the evaluation has another protocol, or no results yet."""
    first = next((result for _, _, result in _results(study, name, group)), None)
    if first is None or first.get("protocol") not in KNOWN:
        return None
    facts = {key: value for key, value in first.items() if key not in ("cells", "by_distance", "summary")}
    found = OtherMeasure(name, group, first["protocol"], facts)
    reading = {TASKS: _tasks, ATTENTION: _attention, GENERATION: _generation, BY_POSITION: _positions}
    gathered: dict[tuple, list] = {}
    for variant, _, result in _results(study, name, group):
        if all(result.get(key) == first.get(key) for key in SHARED):
            for where, value in reading[found.protocol](result, variant.method):
                gathered.setdefault((variant.name, *where), []).append(value)
                if variant.name not in found.variants:
                    found.variants.append(variant.name)
    if found.protocol == TASKS:
        _accuracies(found, gathered, len(study.variants))
    else:
        found.means = {key: float(np.mean(values)) for key, values in gathered.items()}
    return found


def _results(study: StoredStudy, name: str, group: Group) -> Iterator[tuple[StudyVariant, str, dict]]:
    for variant in study.variants:
        for cell in study.of(variant, group):
            result = (cell.record.get("evaluations") or {}).get(name)
            if result:
                yield variant, cell.seed, result


def _tasks(result: dict, method: str) -> Iterator[tuple[tuple, object]]:
    for row in result["cells"]:
        if row["method"] == method and row.get("unit_accuracy"):
            yield ("cell", row["length"]), row
    for spot in result.get("by_depth") or []:
        if spot["method"] == method and spot["share"]["n"]:
            yield ("depth", spot["length"], spot["where"]), spot["share"]["share"]


def _accuracies(found: OtherMeasure, gathered: dict[tuple, list], variants: int) -> None:
    cells = {key: rows for key, rows in gathered.items() if key[1] == "cell"}
    found.family = max(1, variants * len({key[2] for key in cells}))
    for (variant, _, length), rows in cells.items():
        share = change(
            np.array([row["unit_accuracy"] for row in rows], dtype=np.float64),
            alpha=1 - CONFIDENCE,
            family=found.family,
        )
        exact = float(np.mean([row["exact"] for row in rows]))
        found.accuracy[variant, length] = AccuracyMeasure(variant, length, len(rows), share, exact)
    for key, values in gathered.items():
        if key[1] == "depth":
            found.depth[key[0], key[2], key[3]] = float(np.mean(values))


def _attention(result: dict, method: str) -> Iterator[tuple[tuple, float]]:
    for row in result["cells"]:
        if (
            row["method"] == method
            and row["layer"] is None
            and row["head"] is None
            and row["value"] is not None
        ):
            yield (row["length"], row["measure"]), row["value"]


def _generation(result: dict, method: str) -> Iterator[tuple[tuple, float]]:
    for row in result["cells"]:
        if row["method"] == method and row["value"] is not None:
            yield ((row["source"], row["start"], row["stop"]), row["measure"]), row["value"]


def _positions(result: dict, method: str) -> Iterator[tuple[tuple, float]]:
    for bucket in (result.get("by_position") or {}).get(method, []):
        where = (bucket["low"], bucket["high"])
        yield (where, "nll"), bucket["nll"]
        yield (where, "gain"), bucket["gain"]["estimate"]
