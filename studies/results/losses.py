"""The losses of one evaluation as arrays: the NLL of every variant, length, seed and unit."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from evaluation.scoring.methods import TRAINED
from studies.results.stored import Group, StoredStudy, StudyVariant

PROTOCOLS = ("fixed-targets", "sliding", "non-overlapping")  # with the loss of units by length
Rows = dict[str, dict]  # of `cells` in results.json, by seed


@dataclass
class StudyLosses:
    """The losses of one evaluation in one group of cells.

    Attributes:
        facts: protocol, corpus, units and other facts from the evaluation of the first cell.
        excluded: cells whose results are not comparable, and why.
        rows: what was measured, by (variant, length).
        reference: by variant, as trained at the trained length.
        repeated: by (variant, length, (shortest distance, longest + 1)), the rows of repeated text.
        missing: by (variant, length): why there is no number. If one seed has none, because it
            failed or was not measured, the other seeds are dropped too: a mean over the successful
            seeds only would be biased.
        failed: entries of `missing` that could have been measured; they count in the family.
        rounding: by variant, the largest mean difference of bfloat16 from float32 in nats.
    """

    name: str
    group: Group
    variants: list[StudyVariant]
    facts: dict
    excluded: dict[str, str]
    rows: dict[tuple[str, int], Rows] = field(default_factory=dict)
    reference: dict[str, Rows] = field(default_factory=dict)
    repeated: dict[tuple, Rows] = field(default_factory=dict)
    missing: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: set[tuple[str, int]] = field(default_factory=set)
    rounding: dict[str, float] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return self.facts["lengths"]

    def seeds(self, name: str, length: int) -> list[str]:
        """The seeds measured at this length and as trained at the trained length."""
        measured = self.rows.get((name, length), {})
        reference = self.reference.get(name, {})
        return [seed for seed in measured if seed in reference]

    def shift(self, name: str, length: int) -> np.ndarray:
        """(S, D) NLL at this length minus NLL as trained at the trained length."""
        seeds = self.seeds(name, length)
        nll = unit_nll(self.rows[name, length], seeds)
        return nll - unit_nll(self.reference[name], seeds)

    def add(self, variant: StudyVariant, seed: str, result: dict) -> None:
        """Add the results of a cell for a variant of its scheme."""
        name = variant.name
        absent = set(self.lengths)
        for row in result["cells"]:
            method = row["method"]
            length = row["length"]
            if method not in (variant.method, TRAINED):
                continue
            off = abs(row.get("bfloat16_minus_float32") or 0.0)
            self.rounding[name] = max(off, self.rounding.get(name, 0.0))
            is_measured = row.get("unit_nll") is not None
            if is_measured and method == TRAINED and length == self.facts["trained_length"]:
                self.reference.setdefault(name, {})[seed] = row
            if method != variant.method:
                continue
            absent.discard(length)
            if is_measured:
                self.rows.setdefault((name, length), {})[seed] = row
                continue
            self.missing[name, length] = row.get("failure") or "no number"
            if row.get("exists"):
                self.failed.add((name, length))
        for length in absent:
            self.missing[name, length] = f"not measured for seed {seed}"
            self.failed.add((name, length))
        repeated = result.get("repeated", {})
        if repeated.get("hash") != self.facts.get("repeated", {}).get("hash"):
            return
        for row in repeated.get("cells", ()):
            if row["method"] == variant.method:
                distances = (row["distance_low"], row["distance_high"])
                place = (name, row["length"], distances)
                self.repeated.setdefault(place, {})[seed] = row

    def drop_incomplete(self) -> None:
        """Drop the other seeds of a length at which one seed has no number."""
        for place in self.missing:
            if measured := self.rows.pop(place, None):
                self.failed.add(place)
                self.missing[place] += f" (measured for seed {', '.join(measured)})"


def unit_nll(
    rows: Rows, seeds: Iterable[str] | None = None, metric: str = "unit_nll"
) -> np.ndarray:
    """(S, D) mean NLL of each unit, in the given order of seeds."""
    chosen = rows if seeds is None else seeds
    return np.array([rows[seed][metric] for seed in chosen], dtype=np.float64)


def read_losses(study: StoredStudy, name: str, group: Group) -> StudyLosses | None:
    """The losses of one evaluation in one group; None for another protocol or no results."""
    results, excluded = study.results(name, group)
    if not results or results[0][2]["protocol"] not in PROTOCOLS:
        return None
    _, _, facts = results[0]
    losses = StudyLosses(name, group, study.variants, facts, excluded)
    for variant, cell, result in results:
        losses.add(variant, cell.seed, result)
    losses.drop_incomplete()
    return losses
